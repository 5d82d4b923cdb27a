"""What holds on every server with a sidecar, as a class of tests.

The tests of a server derive `TestContract` from `ServerContract`. The module, or its folder,
provides these fixtures:

- `server`: the running server, started with `awaiting`;
- `bodies`: at least six requests to /generate, which are greedy by default (`running.ask`) and get
  drafts of the sidecar. The first ones reach every scheduler and have every adapter;
- `expected`: their answers without drafts, and perhaps those to further requests.

Each test leaves the server as it was, and waits for the sidecar where it disturbs it.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar, Protocol

import pytest

from benchmark.harness.server import Server, ServerError
from benchmark.harness.speculation import states_of
from test.engine.awaiting import Held, held
from test.engine.frequencies import SAMPLED, SAMPLES, check_equally_frequent, sample
from test.engine.load import drafts_are_accepted, from_sidecar, loaded
from test.engine.server.running import (
    GREEDY,
    PLAIN,
    ask,
    ask_all,
    connected,
    generate,
    ids,
    of_sidecar,
    sidecar_process,
    sidecar_processes,
    turn,
    until,
)

Bodies = list[dict[str, Any]]
Answers = list[dict[str, Any]]

MALFORMED = (
    ("a <NGRAMGUESS>b", "never closed"),
    ("a </NGRAMGUESS>b", "closes nothing"),
    ("a <NGRAMGUESS> </NGRAMGUESS>b", "empty"),
    ("a <NGRAM<NGRAMGUESS>x</NGRAMGUESS>GUESS>b", "no tag may remain"),
    ("a <NGRAMGUESS>" + "x " * 200_000 + "</NGRAMGUESS>b", "at most"),
)
"""Prompts with tags that are refused, and words of the refusal."""


class Sidecar(Protocol):
    """A sidecar that a test stops and kills."""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""

    def kill(self) -> None:
        """Kill the process. Returns once the server has noticed, and another one starts."""


class OwnSidecar:
    """The sidecar that the server's first scheduler has started, and starts again."""

    def __init__(self, server: Server) -> None:
        self._server = server

    def signal(self, number: signal.Signals) -> None:
        sidecar_process(self._server).send_signal(number)

    def kill(self) -> None:
        killed, (first, *others) = sidecar_process(self._server), self._restarts()
        killed.kill()
        until(lambda: self._restarts() == [first + 1, *others])
        until(lambda: [p.pid for p in sidecar_processes(self._server)] not in ([], [killed.pid]))

    def _restarts(self) -> list[int]:
        return [state["sidecar_restarts"] for state in states_of(self._server)]


@contextlib.contextmanager
def stopped(sidecar: Sidecar) -> Iterator[None]:
    """A context in which the sidecar is stopped."""
    sidecar.signal(signal.SIGSTOP)
    try:
        yield
    finally:
        sidecar.signal(signal.SIGCONT)


def seeded(number: int) -> dict[str, Any]:
    """Parameters of a sampled request: a seed, and by its number a filter or a penalty."""
    return {
        "temperature": 0.5 + number % 3 / 2,
        "top_p": 0.9 if number % 2 else 1.0,
        "frequency_penalty": 0.4 if number % 4 == 2 else 0.0,
        "repetition_penalty": 1.3 if number % 4 == 3 else 1.0,
        "sampling_seed": number,
        "max_new_tokens": 24,
    }


def changed(body: dict[str, Any], **sampling: Any) -> dict[str, Any]:
    """The request with other sampling parameters."""
    return {**body, "sampling_params": {**body.get("sampling_params", {}), **sampling}}


def live(server: Server) -> int:
    """Number of requests that the schedulers know."""
    return sum(state["live_requests"] for state in states_of(server))


def used_tokens(server: Server) -> int:
    """Number of KV slots that are neither free nor evictable from the radix cache."""
    return sum(load["num_used_tokens"] for load in server.get("/v1/loads")["loads"])


def leaves_nothing_behind(server: Server) -> None:
    """Wait until nothing of a request is left, neither in the schedulers nor in the sidecar."""
    work = ("live_requests", "trie_tokens", "requests_in_flight")
    drafts = ("drafting_requests", "drafting_rows")
    until(lambda: not any(one[name] for one in states_of(server) for name in (*work, *drafts)))
    # Slots that the radix cache keeps are not in use; leaked ones would be, also after a flush.
    until(lambda: used_tokens(server) == 0)
    server.post("/flush_cache?timeout=60", {})
    assert used_tokens(server) == 0


def begin(
    server: Server, target: Held, pool: ThreadPoolExecutor, bodies: Bodies
) -> list[Future[dict[str, Any]]]:
    """Send requests, one after the other, and let the target run a few passes."""
    asked: list[Future[dict[str, Any]]] = []
    for body in bodies:
        asked.append(pool.submit(ask, server, body))
        until(lambda: live(server) == len(asked))
    target.run(3)
    return asked


class ServerContract:
    """The tests. A server changes the class attributes and the fixtures of the class."""

    drafted_share: ClassVar[float] = 0.0
    """The sidecar drafts more than this share of the greedy tokens."""
    sampled: ClassVar[dict[str, Any]] = SAMPLED
    samples: ClassVar[int] = SAMPLES
    """Sampling parameters of the test of frequencies, and its number of samples."""
    refused: ClassVar[tuple[tuple[str, int, str], ...]] = (
        ("completions", 9, "from 1 to 8"),
        ("mode", 9, "qspec_mode is 9, but must be a whole number from 0 to 4"),
        ("enabled", 2, "from 0 to 1"),
        ("source_luck", 1, "qspec_source_queue"),
        ("sped", 1, "qspec_sped is not a runtime setting"),
    )
    """Runtime settings that are refused: name, value and words of the refusal."""

    @pytest.fixture
    def sidecar(self, server: Server) -> Sidecar:
        return OwnSidecar(server)

    @pytest.fixture
    def plainly_sampled(self, server: Server, bodies: Bodies) -> Answers:
        """Samples of the target alone."""
        return self.sample(server, bodies[-1], PLAIN)

    @pytest.fixture(autouse=True)
    def _speculates(self, server: Server) -> Iterator[None]:
        yield
        assert not any(state["failed"] for state in states_of(server)), server.log[-4000:]

    def sample(self, server: Server, body: dict[str, Any], sampling: dict[str, Any]) -> Answers:
        """Samples with the scheduler, the adapter and the draft sources of `body`."""
        custom = {**body.get("sampling_params", {}), **sampling}.get("custom_params", {})
        own = {key: body[key] for key in body.keys() - {"text", "sampling_params"}}
        return sample(server, self.sampled, custom, self.samples, **own)

    def check_frequencies(self, server: Server, bodies: Bodies, plainly_sampled: Answers) -> None:
        check_equally_frequent(self.sample(server, bodies[-1], {}), plainly_sampled)

    def test_answers_are_the_targets_own_with_drafts_of_the_sidecar(
        self, server: Server, bodies: Bodies, expected: Answers
    ) -> None:
        before = from_sidecar(server)
        answers = ask_all(server, bodies)
        assert ids(answers) == ids(expected[: len(bodies)])
        for new, old in zip(from_sidecar(server), before, strict=True):
            assert new > old
        accepted = Counter[tuple[Any, ...]]()
        for body, answer in zip(bodies, answers, strict=True):
            count = of_sidecar(answer["meta_info"]["qspec"]["accepted_by_source"])
            accepted[body.get("routed_dp_rank"), body.get("lora_path")] += count
        assert all(accepted.values()), accepted
        tokens = sum(answer["meta_info"]["completion_tokens"] for answer in answers)
        passes = sum(answer["meta_info"]["qspec"]["passes"] for answer in answers)
        assert accepted.total() > self.drafted_share * tokens
        assert passes < (1 - self.drafted_share) * tokens
        leaves_nothing_behind(server)

    def test_a_seed_gives_the_same_text_with_drafts_and_without(
        self, server: Server, bodies: Bodies
    ) -> None:
        """Equal prompts have equal seeds, also with different adapters."""
        texts = list(dict.fromkeys(body["text"] for body in bodies))
        asked = [changed(body, **seeded(texts.index(body["text"]))) for body in bodies]
        plain = ids(ask_all(server, asked, **PLAIN))
        before = sum(from_sidecar(server))
        assert ids(ask_all(server, asked)) == plain
        assert sum(from_sidecar(server)) > before

    def test_texts_of_other_seeds_and_of_none_differ(self, server: Server, bodies: Bodies) -> None:
        free = changed(bodies[0], temperature=1.5, max_new_tokens=24)
        asked = [changed(free, sampling_seed=7), changed(free, sampling_seed=99), free, free, free]
        texts = ids(ask_all(server, asked))
        assert len(set(map(tuple, texts))) == len(texts)

    @pytest.mark.thorough  # by default the seeds find a wrong draw
    def test_sampled_texts_are_as_frequent_as_without_speculation(
        self, server: Server, bodies: Bodies, plainly_sampled: Answers
    ) -> None:
        self.check_frequencies(server, bodies, plainly_sampled)

    @pytest.mark.parametrize(("text", "words"), MALFORMED, ids=[words for _, words in MALFORMED])
    def test_a_malformed_guess_is_a_400_and_harms_nothing_else(
        self, server: Server, text: str, words: str
    ) -> None:
        messages = [{"role": "user", "content": text}]
        requests: list[tuple[str, dict[str, Any]]] = [
            ("/generate", {"text": text, "sampling_params": GREEDY}),
            ("/generate", {"text": text, "sampling_params": GREEDY, "stream": True}),
            ("/v1/completions", {"model": "m", "prompt": text, "max_tokens": 4}),
            ("/v1/chat/completions", {"model": "m", "messages": messages, "max_tokens": 4}),
        ]
        for path, body in requests:
            with pytest.raises(ServerError, match=f"HTTP 400.*{words}"):
                server.post(path, body)
        answer = generate(server, "Hello", max_new_tokens=4, ignore_eos=True)
        assert answer["meta_info"]["completion_tokens"] == 4

    @pytest.mark.parametrize("value", [[], [1.5], ["a"], [99999999], [[1], []]])
    def test_malformed_guess_ids_are_a_400(self, server: Server, value: Any) -> None:
        with pytest.raises(ServerError, match="HTTP 400.*qspec_guess_ids"):
            generate(server, "Hello", custom_params={"qspec_guess_ids": value})

    def test_aborted_requests_leave_nothing_behind_and_change_no_other_answer(
        self, server: Server, bodies: Bodies, expected: Answers
    ) -> None:
        """Some run, others wait."""
        victims = [
            {**changed(body, max_new_tokens=600, ignore_eos=True), "rid": f"victim-{number}"}
            for number, body in enumerate(bodies[2:6])
        ]
        others = bodies[:2]
        with ThreadPoolExecutor(len(victims) + len(others)) as pool:
            with held(server) as target:
                mixed = [victims[0], *others, *victims[1:]]
                first, *rest = begin(server, target, pool, mixed)
                for victim in victims:
                    server.post("/abort_request", {"rid": victim["rid"]})
            answers = [asked.result() for asked in rest[: len(others)]]
            assert ids(answers) == ids(expected[: len(others)])
            for aborted in [first, *rest[len(others) :]]:
                with contextlib.suppress(ServerError):  # for one that had to wait
                    assert aborted.result()["meta_info"]["finish_reason"]["type"] == "abort"
        leaves_nothing_behind(server)

    def test_retracted_requests_give_the_same_answers(
        self, server: Server, bodies: Bodies, expected: Answers
    ) -> None:
        with ThreadPoolExecutor(4) as pool:
            with held(server) as target:
                asked = begin(server, target, pool, bodies[:4])
                server.post("/pause_generation", {"mode": "retract"})
            server.post("/continue_generation", {})
            answers = [each.result() for each in asked]
        assert ids(answers) == ids(expected[:4])

    def test_a_setting_changes_on_all_schedulers(self, server: Server) -> None:
        for value in (0, 1):
            turn(server, enabled=value)
            assert {state["settings"]["enabled"] for state in states_of(server)} == {value}

    def test_a_wrong_setting_is_a_400_and_changes_nothing(self, server: Server) -> None:
        before = [state["settings"] for state in states_of(server)]
        most = server.get("/server_info")["speculative_num_draft_tokens"]
        wide = f"qspec_draft_token_num is {most + 1}, but must be .* from 1 to {most}"
        for name, value, words in (*self.refused, ("draft_token_num", most + 1, wide)):
            given = {"qspec_step_tokens": 3, f"qspec_{name}": value}
            with pytest.raises(ServerError, match=f"HTTP 400.*{words}") as refusal:
                server.post("/set_internal_state", {"server_args": given})
            assert f"qspec_{name}" in str(refusal.value)
        assert [state["settings"] for state in states_of(server)] == before

    def test_a_stopped_sidecar_changes_no_answer_and_drafts_again(
        self, server: Server, bodies: Bodies, expected: Answers, sidecar: Sidecar
    ) -> None:
        with loaded(server, bodies, expected):
            drafts_are_accepted(server)
            for seconds in (0.1, 0.5):
                with stopped(sidecar):
                    time.sleep(seconds)
            with stopped(sidecar):  # after 3 s of silence it is lost
                until(lambda: all(state["sidecar"] == "lost" for state in states_of(server)))
            connected(server)
            drafts_are_accepted(server)

    def test_a_killed_sidecar_changes_no_answer_and_another_one_drafts(
        self, server: Server, bodies: Bodies, expected: Answers, sidecar: Sidecar
    ) -> None:
        with loaded(server, bodies, expected):
            drafts_are_accepted(server)
            sidecar.kill()
        connected(server)
        # Of a slow sidecar not every answer gets drafts in time.
        with loaded(server, bodies, expected):
            drafts_are_accepted(server)
