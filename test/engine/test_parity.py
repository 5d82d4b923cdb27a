"""Greedy answers equal the target's, token for token, however requests are scheduled.

100 prompts of 5 to 400 tokens, answers of up to 128 tokens, float32. One server answers without
speculation. The other speculates, prefills in chunks of 64 tokens, and reuses prefixes from the
radix cache. Meanwhile other requests are aborted. Its KV pool is small, so it retracts some of 16
longer answers. The tests run on a server of a CPU and on one that passes as a GPU server does.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmark.harness.server import ServerError
from benchmark.harness.speculation import update_settings, wait_for_sidecar
from benchmark.soak.templates import PREFACE, QUESTIONS, WORDS
from sglang_qspec.tools.models import DemoModels
from test.engine.awaiting import awaiting
from test.engine.gpu_shape import GPU_SHAPE
from test.engine.server.running import QSPEC, cores, state
from test.preloaded.server import Server

pytestmark = [pytest.mark.server, pytest.mark.thorough, pytest.mark.timeout(3600)]

PROMPTS = 100
MAX_NEW_TOKENS = 128
SHORTEST, LONGEST = 5, 400
GREEDY = {"temperature": 0, "max_new_tokens": MAX_NEW_TOKENS}
"""`ignore_eos` is not set: with it SGLang reserves all KV slots of a request and never retracts it.
"""
COMMON = [
    *("--device", "cpu", "--dtype", "float32", "--max-running-requests", "16"),
    *("--context-length", "2048", "--log-level", "warning", "--enable-metrics"),
]
POOL = 2400
"""KV slots, fewer than LONG need."""
LONG = slice(16)
"""Prompts with longer answers."""
LONGER = {"temperature": 0, "max_new_tokens": 300}


def prompts() -> list[str]:
    """Some share a long prefix; some repeat words, which makes drafts likely to be accepted."""
    rng = random.Random(11)
    texts = []
    for number in range(PROMPTS):
        question = QUESTIONS[number % 6]  # those of the recorded runs
        kind = number % 5
        if kind == 0:
            texts.append(question)
        elif kind == 1:
            texts.append(PREFACE * 3 + f"Note {number}. " + question)
        elif kind == 2:
            texts.append(" ".join(rng.choices(WORDS, k=rng.randint(10, 120))) + ". " + question)
        elif kind == 3:
            texts.append(
                f"{number}, {number + 1}, {number + 2}," + f" {number}," * rng.randint(2, 40)
            )
        else:
            texts.append(PREFACE * rng.randint(1, 10) + question)
    return texts


class Expected(NamedTuple):
    """Output ids of a server without speculation, with KV slots for all requests."""

    answers: list[list[int]]
    longer: list[list[int]]
    """Those of LONG, with LONGER."""


@pytest.fixture(scope="module")
def expected(models: DemoModels) -> Expected:
    with Server(models.target, [*COMMON, "--max-total-tokens", "16384"], cores=cores(0)) as server:
        answers = ask_all(server, prompts(), GREEDY)
        longer = ask_all(server, prompts()[LONG], LONGER)
    lengths = [answer["meta_info"]["prompt_tokens"] for answer in answers]
    assert min(lengths) <= SHORTEST
    assert LONGEST / 2 < max(lengths) <= LONGEST
    return Expected(*([each["output_ids"] for each in given] for given in (answers, longer)))


def ask_all(server: Server, texts: list[str], params: dict[str, Any]) -> list[dict[str, Any]]:
    """Answers to prompts that are all asked at once."""
    found: list[dict[str, Any]] = server.post(
        "/generate", {"text": texts, "sampling_params": params}
    )
    return found


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest,
    models: DemoModels,
    expected: Expected,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    arguments = [
        *COMMON,
        *("--chunked-prefill-size", "64", "--max-total-tokens", str(POOL)),
        *("--schedule-conservativeness", "0.1"),  # admits more than there is room for
        *QSPEC,
        *("--speculative-draft-model-path", str(models.draft)),
        *("--speculative-qspec-cores", str(cores(1)[0])),
    ]
    as_gpu = request.param == "gpu"
    environment = awaiting(tmp_path_factory.mktemp("plugin"), GPU_SHAPE if as_gpu else "")
    with Server(models.target, arguments, cores=cores(0), environment=environment) as running:
        assert running.get("/server_info")["disable_overlap_schedule"] is not as_gpu
        wait_for_sidecar(running)
        yield running
        assert not state(running)["failed"], running.log[-4000:]


def total(server: Server, name: str) -> float:
    """Value of one of SGLang's counters."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(server.get("/metrics/"))
        for sample in family.samples
        if sample.name == name
    )


@contextmanager
def chaos(server: Server) -> Iterator[None]:
    """Send other requests, each aborted or left by its client after a random time."""
    over = threading.Event()
    rng = random.Random(3)

    def send() -> None:
        for number in itertools.count():
            if over.is_set():
                return
            rid = f"aborted-{number}"
            body = {"text": f"Note {number} {PREFACE}", "rid": rid, "sampling_params": GREEDY}
            seconds = rng.uniform(0.05, 2.0)
            if number % 2:
                threading.Timer(seconds, abort, [server, rid]).start()
            with contextlib.suppress(ServerError, OSError):
                server.post("/generate", body, timeout=60.0 if number % 2 else seconds)
            time.sleep(rng.uniform(0.0, 0.5))

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def abort(server: Server, rid: str) -> None:
    server.post("/abort_request", {"rid": rid})


def ask(server: Server, text: str) -> dict[str, Any]:
    answer: dict[str, Any] = server.post("/generate", {"text": text, "sampling_params": GREEDY})
    return answer


@pytest.mark.parametrize(
    ("server", "concurrency", "ragged"),
    [
        *(("normal", 16, True), ("normal", 16, False), ("normal", 4, True), ("normal", 1, True)),
        *(("gpu", 16, False), ("gpu", 4, False), ("gpu", 1, False)),
    ],
    indirect=["server"],
)
def test_every_answer_is_the_targets(
    server: Server,
    expected: Expected,
    concurrency: int,
    ragged: bool,
    record_property: Callable[[str, object], None],
) -> None:
    server.post("/flush_cache?timeout=60", {})
    update_settings(server, {"qspec_ragged": int(ragged)})
    with chaos(server), ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(lambda text: ask(server, text), prompts()))
    different = [
        number
        for number, (answer, own) in enumerate(zip(answers, expected.answers, strict=True))
        if answer["output_ids"] != own
    ]
    records = [answer["meta_info"]["qspec"] for answer in answers]
    cached = sum(answer["meta_info"]["cached_tokens"] for answer in answers)
    accepted = sum(record["accepted_tokens"] for record in records)
    tokens = sum(len(own) for own in expected.answers)
    line = (
        f"concurrency {concurrency}, ragged {ragged}: {len(different)} of {PROMPTS} differ, "
        f"{accepted} of {tokens} tokens accepted, {cached} prompt tokens cached"
    )
    record_property("parity", line)
    print(line)  # noqa: T201 (for -rP)
    assert not different
    assert accepted > tokens / 4
    assert cached > 0


@pytest.mark.parametrize("server", ["normal", "gpu"], indirect=True)
def test_a_retracted_request_has_the_targets_answer(server: Server, expected: Expected) -> None:
    before = total(server, "sglang:num_retracted_requests_total")
    answers = ask_all(server, prompts()[LONG], LONGER)
    assert total(server, "sglang:num_retracted_requests_total") > before
    assert [answer["output_ids"] for answer in answers] == expected.longer
