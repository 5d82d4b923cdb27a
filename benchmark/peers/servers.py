"""Starts the servers of `bench_peers`, and sends each of them requests in its own format."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmark.harness.configuration import Configuration, Settings
from benchmark.harness.server import Server
from benchmark.harness.serving import Raw, checked
from benchmark.peers.pipelines import BASELINE, PIPELINES
from sglang_qspec.tools.ports import HOST

QSPEC, PINNED, LOOKUPS, STEPS = "qspec", "qspec-pinned", "lookups", "steps"
JACOBI = "jacobi"
HEAD, BESIDE = "head", "head-beside"
SGLANG, AGAIN = "sglang", "sglang-again"
VLLM, VLLM_NGRAM = "vllm", "vllm-ngram"
LLAMA, LLAMA_DRAFT = "llama", "llama-draft"
OPENVINO, OPENVINO_LOOKUP = "openvino", "openvino-lookup"
ALWAYS = (QSPEC, PINNED, SGLANG, AGAIN, LOOKUPS, JACOBI, STEPS, BASELINE, *PIPELINES)
"""Names of the configurations of SGLang that need nothing else."""
OWN = (*ALWAYS, HEAD, BESIDE)
"""Names of all configurations of SGLang; all others are peers."""
NAMES = (*OWN, VLLM, VLLM_NGRAM, LLAMA, LLAMA_DRAFT, OPENVINO, OPENVINO_LOOKUP)
NGRAM = '{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":4,"prompt_lookup_min":2}'
"""vLLM's speculation by n-grams of the context."""
OPENVINO_SERVER = Path(__file__).with_name("openvino_server.py")
PRECISIONS = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
"""OpenVINO's names of dtypes."""
WITHOUT_MODEL = ("--speculative-algorithm", "QSPEC")
"""Flags of a server with QSPEC and without a draft model."""
JACOBI_TOKENS = "4"
"""Length of the guesses that the target improves."""
MODEL = "target"
"""Name of the model in requests to vLLM."""
MEM_FRACTION = 0.08
"""Share of a CPU's memory for the sidecar of a server, which waits beside the others."""
SCHEMA = {
    "type": "array",
    "items": {"type": "string", "minLength": 20, "maxLength": 80},
    "minItems": 4,
    "maxItems": 8,
}
SAMPLINGS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0, "ignore_eos": True},
    "sampled": {"temperature": 0.8, "top_p": 0.95, "ignore_eos": True},
    "json": {"temperature": 0.0, "json_schema": json.dumps(SCHEMA)},
}
"""Kinds of answers, with SGLang's sampling parameters besides the length."""
SLOWEST_S = 3600.0
"""Maximum wait for an answer in seconds; it may have to wait for all others."""


@dataclass(frozen=True)
class Programs:
    """The peers that the command line names, and a head."""

    vllm: Path | None = None
    """A Python interpreter that has vLLM."""
    llama_server: Path | None = None
    """llama.cpp's server."""
    openvino: Path | None = None
    """A Python interpreter that has OpenVINO GenAI."""
    gguf: Path | None = None
    """The target for llama.cpp and OpenVINO, as GGUF."""
    gguf_draft: Path | None = None
    """The draft model for llama.cpp, as GGUF."""
    head: Path | None = None
    """A head for the target."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the configurations that can run."""
        found = [*(ALWAYS if self.head is None else OWN)]
        if self.vllm is not None:
            found += [VLLM, VLLM_NGRAM]
        if self.llama_server is not None:
            found += [LLAMA, *([LLAMA_DRAFT] if self.gguf_draft is not None else [])]
        if self.openvino is not None:
            found += [OPENVINO, OPENVINO_LOOKUP]
        return tuple(found)


KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"
"""Environment variable: GiB of vLLM's KV cache on a CPU. By default it takes most of the memory,
which the benchmark's other servers need."""
KV_GIB = "2"


class Peer(Server):
    """A server of another project."""

    health = "/health"

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """`command` is the server's command line without host and port."""
        super().__init__("", environment=dict(environment))
        self.command = [*command, "--host", HOST, "--port", str(self.port)]


@dataclass(frozen=True)
class PeerConfiguration(Configuration):
    """A server of another project."""

    command: Sequence[str] = field(default=())
    """The command line without host and port."""

    @property
    def server_key(self) -> tuple[tuple[str, ...], tuple[int, ...]]:
        return tuple(self.command), ()

    def server(
        self,
        environment: Mapping[str, str] | None = None,
        launcher: Sequence[str] = (),  # noqa: ARG002
    ) -> Server:
        """A server that is not started yet; `launcher` has no effect."""
        return Peer(
            self.command, {KV_SPACE: os.environ.get(KV_SPACE, KV_GIB), **(environment or {})}
        )


def configuration(name: str, settings: Settings, programs: Programs, width: int) -> Configuration:
    """The configuration with this name.

    All pipelines share a server, and so one sidecar; `width` is its widest pass, in tokens of a
    request. Its target has the cores of the settings, as have those of `none`, `qspec-pinned` and
    heads; all others use all processors.
    """
    if name == SGLANG:
        return Configuration(name, settings)
    if name == AGAIN:  # with a name of its own it has a process of its own
        return Configuration(name, settings, ("--served-model-name", AGAIN))
    if name == BASELINE:
        return Configuration(name, settings, (), settings.target_cores)
    if name == LOOKUPS:
        return Configuration(name, settings, WITHOUT_MODEL)
    if name == JACOBI:
        guesses = ("--speculative-qspec-jacobi-tokens", JACOBI_TOKENS)
        return Configuration(name, settings, (*WITHOUT_MODEL, *guesses))
    if name in (HEAD, BESIDE):
        head = str(programs.head)
        flags = settings.qspec(mem_fraction=MEM_FRACTION)
        alone = ("--speculative-draft-model-path", head)  # overrides the draft model
        more = alone if name == HEAD else ("--speculative-qspec-head-path", head)
        return Configuration(name, settings, (*flags, *more), settings.target_cores)
    if name == PINNED or name in PIPELINES:
        widest = ("--speculative-num-draft-tokens", str(width)) if name in PIPELINES else ()
        flags = settings.qspec(*widest, mem_fraction=MEM_FRACTION)
        return Configuration(name, settings, flags, settings.target_cores)
    if name in OWN:
        mode = ("--speculative-qspec-mode", "ahead") if name == STEPS else ()
        unpinned = replace(settings, target_cores=(), sidecar_cores=())
        return Configuration(name, settings, unpinned.qspec(*mode, mem_fraction=MEM_FRACTION))
    return PeerConfiguration(name, settings, command=tuple(_command(name, settings, programs)))


def _command(name: str, settings: Settings, programs: Programs) -> list[str]:
    """The command line of a peer, for as many requests and tokens as SGLang's."""
    slots, context = str(settings.slots), settings.context_length
    if name in (VLLM, VLLM_NGRAM):
        found = [str(programs.vllm), "-m", "vllm.entrypoints.openai.api_server"]
        found += ["--model", str(settings.model), "--served-model-name", MODEL]
        found += ["--dtype", settings.dtype, "--max-num-seqs", slots]
        found += ["--max-model-len", str(context), "--uvicorn-log-level", "warning"]
        return [*found, *(["--speculative-config", NGRAM] if name == VLLM_NGRAM else [])]
    if name in (OPENVINO, OPENVINO_LOOKUP):
        found = [str(programs.openvino), str(OPENVINO_SERVER), "--model", str(programs.gguf)]
        found += ["--slots", slots, "--precision", PRECISIONS[settings.dtype]]
        return [*found, *(["--lookup"] if name == OPENVINO_LOOKUP else [])]
    found = [str(programs.llama_server), "--model", str(programs.gguf)]
    # llama.cpp divides the context among its slots.
    found += ["--parallel", slots, "--ctx-size", str(settings.slots * context)]
    drafted = ["--model-draft", str(programs.gguf_draft)] if name == LLAMA_DRAFT else []
    return [*found, *drafted]


def ask(name: str, server: Server, prompt: Sequence[int], tokens: int, kind: str = "greedy") -> Raw:
    """The answer of exactly `tokens` tokens to a prompt of token ids; JSON may end earlier.

    `kind` is one of SAMPLINGS, and greedy for peers. Raises ServerError or OSError.
    """
    body: dict[str, Any]
    if name in OWN:
        sampling = {**SAMPLINGS[kind], "max_new_tokens": tokens}
        if name in PIPELINES and PIPELINES[name].sources:
            sampling["custom_params"] = {"qspec_sources": list(PIPELINES[name].sources)}
        body = {"input_ids": list(prompt), "sampling_params": sampling}
        return checked(server.post("/generate", body, SLOWEST_S))
    shared: dict[str, Any] = {"prompt": list(prompt), "temperature": 0.0, "ignore_eos": True}
    if name in (VLLM, VLLM_NGRAM):
        body = {**shared, "model": MODEL, "max_tokens": tokens, "return_token_ids": True}
        found = server.post("/v1/completions", body)["choices"][0]["token_ids"]
    else:
        body = {**shared, "n_predict": tokens, "return_tokens": True, "cache_prompt": False}
        found = server.post("/completion", body)["tokens"]
    return {"output_ids": found, "meta_info": {}}
