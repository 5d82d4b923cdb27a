"""`sglang serve`, beside the launcher that all other tests start."""

import sys
from pathlib import Path

import pytest

from benchmark.server import Server
from sglang_qspec.models import DemoModels
from test.engine.server.running import COMMON, cores, generate, sidecar_process, state, until

pytestmark = pytest.mark.server


def test_sglang_serve_starts_the_same_and_leaves_no_process_and_no_socket(
    models: DemoModels,
) -> None:
    arguments = [
        *COMMON,
        *("--speculative-algorithm", "QSPEC", "--speculative-draft-model-path", str(models.draft)),
        *("--speculative-qspec-cores", str(cores(1)[0]), "--speculative-qspec-disable-guess-tags"),
    ]
    program = Path(sys.executable).with_name("sglang")
    server = Server(models.target, arguments, cores=cores(0), launcher=[str(program), "serve"])
    try:
        server.start()
        until(lambda: state(server)["sidecar"] == "ready", 120)
        process = sidecar_process(server)
        command = process.cmdline()
        (endpoint,) = (part for part in command if part.startswith("--endpoint="))
        socket = Path(endpoint.removeprefix("--endpoint=ipc://"))
        assert socket.exists()
        # With the parsing turned off a tag is text like any other.
        lengths = [
            generate(server, text, max_new_tokens=1)["meta_info"]["prompt_tokens"]
            for text in ("a b", "a <NGRAMGUESS>b</NGRAMGUESS>", "a <NGRAMGUESS> b")
        ]
        assert lengths[0] < lengths[2] < lengths[1]
    finally:
        server.stop()
    assert not process.is_running()
    assert not socket.parent.exists()
