"""Starts the servers of `bench_peers`, and sends each of them requests in its own format."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmark.harness.configuration import Configuration, Settings
from benchmark.harness.run import Answer
from benchmark.harness.server import Server
from benchmark.harness.serving import checked, read_answer

QSPEC, PINNED, SGLANG = "qspec", "qspec-pinned", "sglang"
VLLM, VLLM_NGRAM = "vllm", "vllm-ngram"
LLAMA, LLAMA_DRAFT = "llama", "llama-draft"
OWN = (QSPEC, PINNED, SGLANG)
"""Names of the configurations of SGLang; all others are peers."""
NAMES = (*OWN, VLLM, VLLM_NGRAM, LLAMA, LLAMA_DRAFT)
NGRAM = '{"method":"ngram","num_speculative_tokens":4,"prompt_lookup_max":4,"prompt_lookup_min":2}'
"""vLLM's speculation by n-grams of the context."""
MODEL = "target"
"""Name of the model in requests to vLLM."""
WIDTH = 16
"""Maximum width of a pass of QSPEC, in tokens of a request."""


@dataclass(frozen=True)
class Programs:
    """The peers that the command line names."""

    vllm: Path | None = None
    """A Python interpreter that has vLLM."""
    llama_server: Path | None = None
    """llama.cpp's server."""
    llama_model: Path | None = None
    """The target for llama.cpp, as GGUF."""
    llama_draft: Path | None = None
    """The draft model for llama.cpp, as GGUF."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the configurations that can run."""
        found = [*OWN]
        if self.vllm is not None:
            found += [VLLM, VLLM_NGRAM]
        if self.llama_server is not None:
            found += [LLAMA, *([LLAMA_DRAFT] if self.llama_draft is not None else [])]
        return tuple(found)


def add_programs(parser: argparse.ArgumentParser) -> None:
    """Add the options that name peers; `programs_of` reads them."""
    add = parser.add_argument
    add("--vllm", type=Path, help="a Python interpreter that has vLLM")
    add("--llama-server", type=Path, help="llama.cpp's server; needs --llama-model")
    add("--llama-model", type=Path, help="the target as a GGUF file")
    add("--llama-draft", type=Path, help="the draft model as a GGUF file (default: none)")


def programs_of(parser: argparse.ArgumentParser, options: argparse.Namespace) -> Programs:
    """The peers of the options. Ends the process with a message if these conflict."""
    if (options.llama_server is None) != (options.llama_model is None):
        parser.error("--llama-server and --llama-model go together")
    return Programs(options.vllm, options.llama_server, options.llama_model, options.llama_draft)


def chosen(
    parser: argparse.ArgumentParser, names: Sequence[str] | None, known: Sequence[str]
) -> Sequence[str]:
    """The configurations of `--configs`: `names`, or all that are `known`.

    Ends the process with a message if one is not known.
    """
    unknown = sorted(set(names or ()) - set(known))
    if unknown:
        choices = ", ".join(known)
        parser.error(f"--configs: {unknown[0]!r} cannot run; those that can: {choices}")
    return names or known


KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"
"""Environment variable: GiB of vLLM's KV cache on a CPU. By default it takes most of the memory,
which the benchmark's other servers need."""
KV_GIB = "2"


class Peer(Server):
    """A server of another project."""

    health = "/health"

    def __init__(
        self, command: Callable[[int], Sequence[str]], environment: Mapping[str, str]
    ) -> None:
        """`command` is the server's command line on a given port of 127.0.0.1."""
        super().__init__("", environment=dict(environment))
        self.command = list(command(self.port))


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

        def command(port: int) -> Sequence[str]:
            return [*self.command, "--host", "127.0.0.1", "--port", str(port)]

        return Peer(command, {KV_SPACE: os.environ.get(KV_SPACE, KV_GIB), **(environment or {})})


def configuration(name: str, settings: Settings, programs: Programs) -> Configuration:
    """The configuration with this name; all but QSPEC's pinned one use all processors."""
    widest = ("--speculative-num-draft-tokens", str(WIDTH))
    if name == SGLANG:
        return Configuration(name, settings)
    if name == QSPEC:
        flags = _unpinned(settings).qspec(*widest)
        return Configuration(name, settings, flags)
    if name == PINNED:
        return Configuration(name, settings, settings.qspec(*widest), settings.target_cores)
    return PeerConfiguration(name, settings, command=tuple(_command(name, settings, programs)))


def _unpinned(settings: Settings) -> Settings:
    return replace(settings, target_cores=(), sidecar_cores=())


def _command(name: str, settings: Settings, programs: Programs) -> list[str]:
    """The command line of a peer, for as many requests and tokens as SGLang's."""
    slots, context = str(settings.slots), settings.context_length
    if name in (VLLM, VLLM_NGRAM):
        found = [str(programs.vllm), "-m", "vllm.entrypoints.openai.api_server"]
        found += ["--model", str(settings.model), "--served-model-name", MODEL]
        found += ["--dtype", settings.dtype, "--max-num-seqs", slots]
        found += ["--max-model-len", str(context), "--uvicorn-log-level", "warning"]
        return [*found, *(["--speculative-config", NGRAM] if name == VLLM_NGRAM else [])]
    found = [str(programs.llama_server), "--model", str(programs.llama_model)]
    # llama.cpp divides the context among its slots.
    found += ["--parallel", slots, "--ctx-size", str(settings.slots * context)]
    drafted = ["--model-draft", str(programs.llama_draft)] if name == LLAMA_DRAFT else []
    return [*found, *drafted]


def ask(name: str, server: Server, prompt: Sequence[int], tokens: int) -> Answer:
    """The greedy answer of exactly `tokens` tokens to a prompt of token ids.

    `latency` and `service` are 0; a peer's `passes` are 1 a token. Raises ServerError or OSError.
    """
    body: dict[str, Any]
    if name in OWN:
        sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": list(prompt), "sampling_params": sampling}
        return read_answer(checked(server.post("/generate", body)), 0.0)
    shared: dict[str, Any] = {"prompt": list(prompt), "temperature": 0.0, "ignore_eos": True}
    if name in (VLLM, VLLM_NGRAM):
        body = {**shared, "model": MODEL, "max_tokens": tokens, "return_token_ids": True}
        found = server.post("/v1/completions", body)["choices"][0]["token_ids"]
    else:
        body = {**shared, "n_predict": tokens, "return_tokens": True, "cache_prompt": False}
        found = server.post("/completion", body)["tokens"]
    return Answer(tuple(found), 0.0, 0.0, passes=max(0, len(found) - 1))
