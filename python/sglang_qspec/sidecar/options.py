"""Command line options of the sidecar."""

from __future__ import annotations

import argparse

from sglang_qspec import config, values
from sglang_qspec.config import (
    LONGEST_BACKLOG_S,
    MAX_BACKLOG_S,
    MAX_SERVER_TOKENS,
    SHARED_FRACTION,
    SLOTS_ON_CPU,
    SLOTS_ON_GPU,
    QSpecConfig,
)
from sglang_qspec.values import option


def parser() -> argparse.ArgumentParser:
    """The parser of the options; QSpecConfig has the defaults of those that a server also has."""
    default = QSpecConfig()
    made = argparse.ArgumentParser(
        prog="python -m sglang_qspec.sidecar",
        description="Draft for the servers that connect to an endpoint.",
    )
    add = made.add_argument
    add(
        "--model-path",
        required=True,
        help="draft model: a local checkpoint or a name on a hub; or the folder of a head",
    )
    add(
        "--target-path",
        default="",
        help="folder of a head's target, of which it reads the tokenizer, and for EAGLE heads the "
        "embeddings and the LM head",
    )
    add("--head-path", default="", help=argparse.SUPPRESS)  # of a head beside a draft model
    add(
        "--draft-model-head",
        default="",
        help="folder of a Hydra head of the draft model, which then drafts two tokens in some "
        "passes; on a CPU",
    )
    add("--revision", help="branch, tag or commit of a model on a hub (default: the hub's)")
    add("--endpoint", required=True, help="address to listen at: ipc://PATH or tcp://HOST:PORT")
    add("--quantization", help="SGLang's quantization method (default: the checkpoint's)")
    add(
        "--dtype", default=default.dtype, help="data type of the activations (default: %(default)s)"
    )
    add("--device", default="", help="cpu, cuda or cuda:N (default: SGLang's choice)")
    add("--cores", default="", help="CPUs to run on, such as 1 or 2-5 (default: all)")
    add(
        "--background",
        action="store_true",
        help="once the model is loaded, run while nothing else wants the CPUs",
    )
    add(
        "--mem-fraction",
        type=option(config.parser("mem_fraction")),
        default=default.mem_fraction,
        help="fraction of the device's memory for the sidecar; 0, the default, means all free "
        f"memory on a GPU, and {SHARED_FRACTION} on a CPU",
    )
    add(
        "--max-total-tokens",
        type=option(values.positive),
        help="maximum number of KV slots (default: all that fit into --mem-fraction)",
    )
    add(
        "--context-length",
        type=option(values.positive),
        help="maximum length of prompt and completion, in tokens (default: the model's)",
    )
    add(
        "--slots",
        type=option(config.parser("draft_slots")),
        default=default.draft_slots,
        help="maximum number of completions in one pass; 0, the default, means "
        f"{SLOTS_ON_CPU} on a CPU and {SLOTS_ON_GPU} on a GPU",
    )
    add(
        "--max-completion-tokens",
        type=option(config.parser("max_completion_tokens")),
        default=default.max_completion_tokens,
        help="maximum length of a completion, in tokens (default: %(default)s)",
    )
    add(
        "--prefill-tokens",
        type=option(values.positive),
        help="maximum number of prompt tokens in one pass (default: 256 on a CPU, otherwise 2048)",
    )
    add(
        "--share-between-servers",
        action="store_true",
        help="draft equal prompts of several servers once, and share their KV. Draft latency then "
        "reveals to a server that another server had the same prompt, and completions reveal "
        "tokens sampled with the seeds of the other server's requests",
    )
    add(
        "--max-server-tokens",
        type=option(values.positive),
        default=MAX_SERVER_TOKENS,
        help="maximum number of text tokens, and of draft tokens, kept for one server "
        "(default: %(default)s)",
    )
    add(
        "--max-backlog",
        type=option(values.number(0.1, LONGEST_BACKLOG_S)),
        default=MAX_BACKLOG_S,
        metavar="SECONDS",
        help="backlog of one of several servers above which the sidecar skips the least valuable "
        "drafts (default: %(default)g)",
    )
    add(
        "--metrics-port",
        type=option(values.whole(0, 65535)),
        default=0,
        metavar="PORT",
        help="port of /metrics for Prometheus and of /health; 0, the default, opens none",
    )
    add(
        "--metrics-host",
        default="127.0.0.1",
        metavar="HOST",
        help="address that --metrics-port listens at (default: %(default)s)",
    )
    add(
        "--replicas",
        type=option(values.whole(1, 64)),
        default=1,
        metavar="N",
        help="run N sidecars, on cuda:0 to cuda:N-1 with --device cuda. Replica 0 listens at "
        "PATH-0 or at the port of --endpoint, replica 1 at PATH-1 or at the next port, and so on; "
        "their metrics have consecutive ports too (default: 1)",
    )
    add("--key-file", default="", help="key file for a tcp endpoint (see qspec keys)")
    add("--attention-backend", help="SGLang's backend (default: one for pages of one token)")
    add("--trust-remote-code", action="store_true", help="run code that is part of the checkpoint")
    pid = option(values.positive)
    add("--supervisor-pid", type=pid, help=argparse.SUPPRESS)
    add("--parent-pid", type=pid, help="PID of the parent process; the sidecar stops when it ends")
    return made
