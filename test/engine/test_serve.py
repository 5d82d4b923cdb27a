"""A server that `sglang serve` starts, with SGLang options that change how answers arrive.

It streams only the new text in each piece, and retracts running requests every few passes, as
SGLang does when memory runs out. QSPEC divides the cores.
"""

import os
import secrets
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmark.harness.dataset import render
from benchmark.harness.server import Server
from benchmark.prompts import PROMPTS
from sglang_qspec.__main__ import main
from sglang_qspec.tools.models import DemoModels
from test.engine.awaiting import awaiting
from test.engine.server.running import (
    COMMON,
    GREEDY,
    QSPEC,
    generate,
    sidecar_process,
    state,
    until,
)
from test.engine.server.traces import TRACED, check_trace

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def abandoned() -> Path:
    """The directory of a private endpoint that a killed server left behind."""
    directory = Path(tempfile.gettempdir(), f"qspec-{secrets.token_hex(4)}")
    directory.mkdir(mode=0o700)
    (directory / "owner").touch()
    return directory


@pytest.fixture(scope="module")
def server(
    models: DemoModels, abandoned: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    arguments = [
        *COMMON,
        *(*QSPEC, "--speculative-draft-model-path", str(models.draft)),
        *("--speculative-qspec-guess-tags", "off", "--speculative-qspec-cores", "auto"),
        *("--speculative-qspec-return-provenance", "--incremental-streaming-output"),
    ]
    program = Path(sys.executable).with_name("sglang")
    retracting = {"SGLANG_TEST_RETRACT": "true", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
    with Server(
        models.target,
        arguments,
        launcher=[str(program), "serve"],
        environment=awaiting(tmp_path_factory.mktemp("plugin")) | retracting,
    ) as server:
        until(lambda: state(server)["sidecar"] == "ready")
        yield server


def test_the_start_removes_what_a_killed_server_left_behind(
    server: Server, abandoned: Path
) -> None:
    assert not abandoned.exists()


def test_with_tag_parsing_off_a_tag_is_plain_text(server: Server) -> None:
    lengths = [
        generate(server, text, max_new_tokens=1)["meta_info"]["prompt_tokens"]
        for text in ("a b", "a <NGRAMGUESS>b</NGRAMGUESS>", "a <NGRAMGUESS> b")
    ]
    assert lengths[0] < lengths[2] < lengths[1]


def test_retracted_requests_stream_each_pass_and_the_label_of_each_token_once(
    server: Server, models: DemoModels
) -> None:
    prompts = render(models.target, PROMPTS[:3])
    off = {"qspec_enabled": False, "qspec_return_provenance": False}
    plain = [generate(server, text, custom_params=off) for text in prompts]
    assert all("qspec_provenance" not in answer["meta_info"] for answer in plain)

    def ask(text: str) -> list[dict[str, Any]]:
        sampling = {**GREEDY, "custom_params": TRACED}
        body = {"text": text, "sampling_params": sampling, "stream": True}
        return list(server.stream("/generate", body))

    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = list(pool.map(ask, prompts))
    assert sum(pieces[-1]["meta_info"]["num_retractions"] for pieces in answers) > 0
    for pieces, expected in zip(answers, plain, strict=True):
        labels = [label for piece in pieces for label in piece["meta_info"]["qspec_provenance"]]
        for piece in pieces:
            assert len(piece["meta_info"]["qspec_provenance"]) == len(piece["output_ids"])
        assert [i for piece in pieces for i in piece["output_ids"]] == expected["output_ids"]
        assert len(labels) == len(expected["output_ids"])
        record = pieces[-1]["meta_info"]["qspec"]
        drafted = Counter(label for label in labels if label != "target")
        assert drafted == {name: n for name, n in record["accepted_by_source"].items() if n}
        check_joined(pieces, labels, expected["output_ids"])


def check_joined(pieces: list[dict[str, Any]], labels: list[str], output_ids: list[int]) -> None:
    """Fail unless the last chunk of a stream, and no other, has the passes of all tokens."""
    assert not any("qspec_trace" in piece["meta_info"] for piece in pieces[:-1])
    last = pieces[-1]["meta_info"]
    meta_info = {**last, "qspec_provenance": labels}
    answer = {"output_ids": output_ids, "meta_info": meta_info}
    # Each retraction repeats the prefill, which gives a token.
    check_trace(answer, prefills=1 + last["num_retractions"])


def test_the_sidecar_comes_from_a_fork_of_the_scheduler(server: Server) -> None:
    fork_server = sidecar_process(server).parent()
    assert fork_server is not None
    scheduler = fork_server.parent()
    assert scheduler is not None
    assert "sglang::scheduler" in "".join(scheduler.cmdline())
    assert top_of_stack(fork_server.pid) == top_of_stack(scheduler.pid)


def top_of_stack(pid: int) -> str:
    """Where the stack of a process ends, which is random in a process that is no fork."""
    (line,) = (
        each for each in Path(f"/proc/{pid}/maps").read_text().splitlines() if "[stack]" in each
    )
    return line.split()[0].partition("-")[2]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one CPU cannot be divided")
def test_target_and_sidecar_have_cores_of_their_own(server: Server, models: DemoModels) -> None:
    everything = os.sched_getaffinity(0)
    sidecar = sidecar_process(server)
    given = set(sidecar.cpu_affinity())
    assert given < everything
    assert sidecar.nice() == 19
    classes = Counter(os.sched_getscheduler(thread.id) for thread in sidecar.threads())
    # The thread that writes the log.
    assert classes.keys() == {os.SCHED_IDLE, os.SCHED_OTHER}
    assert classes[os.SCHED_OTHER] == 1
    text = render(models.target, PROMPTS[:1])[0]

    def divided() -> bool:
        generate(server, text)
        return bool(state(server)["target_cpus"] == len(everything - given))

    until(divided)  # a starved sidecar may be taken for a lost one for a while


def test_complete_joins_the_pieces(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    text = "one two three one two three one two"
    answer = generate(server, text, max_new_tokens=12)
    expected, size = answer["text"], answer["meta_info"]["completion_tokens"]
    for more in ([], ["--show-drafts"]):
        options = ["complete", "--url", server.url, "--max-new-tokens", "12", *more, text]
        assert main(options) == 0
        shown, *counts = capsys.readouterr().out.rstrip("\n").split(f"\n\n{size} tokens in ")
        for source in ("queue", "step", "prompt", "output"):
            shown = shown.replace(f"[{source}:", "")
        assert shown.replace("]", "") == expected.replace("]", "").rstrip("\n")
        assert len(counts) == len(more)


def test_it_leaves_no_process_and_no_socket(server: Server) -> None:
    """Runs last in this file, because it stops the server."""
    process = sidecar_process(server)
    command = process.cmdline()
    (endpoint,) = (part for part in command if part.startswith("--endpoint="))
    socket = Path(endpoint.removeprefix("--endpoint=ipc://"))
    assert socket.exists()
    server.stop()
    assert not process.is_running()
    assert not socket.parent.exists()
