"""The batches of `bench_resume` against a fake server, and a batch that is killed."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmark.resume import kills
from benchmark.resume.batches import cut_all, edited, run, swapped, write_lines
from benchmark.resume.bound import fewest_passes, largest_accept_length
from benchmark.resume.kills import KilledBatch
from test.tools.batch.fake_server import ACCEPTED, PASSES, TOKENS, FakeServer, text_of
from test.tools.batch.fakes import records_of, serving

PROMPTS = ["one", "two", "three", "four"]


def test_a_cut_a_swapped_and_an_earlier_run_give_the_guesses_that_the_benchmark_means(
    tmp_path: Path,
) -> None:
    path = write_lines(tmp_path / "in.jsonl", PROMPTS, 8)
    fake, answers = FakeServer(), tmp_path / "first.jsonl"
    texts = {prompt: text_of(prompt) for prompt in PROMPTS}
    with serving(fake) as url:
        first = run(url, path, answers)
        cut_all(path, answers, tmp_path / "replay.jsonl")
        again = [
            run(url, path, tmp_path / "replay.jsonl", "--resume"),
            run(url, path, tmp_path / "rerun.jsonl", "--guesses-from", answers),
            run(
                url, path, tmp_path / "x.jsonl", "--guesses-from", swapped(answers, tmp_path / "s")
            ),
        ]
    assert (first.tokens, first.passes) == (4 * TOKENS, 4 * PASSES)
    assert first.accept_length == 1 + ACCEPTED / PASSES
    assert first.texts == {str(n): texts[prompt] for n, prompt in enumerate(PROMPTS, 1)}
    assert all(each.texts == first.texts for each in again)
    wrong = dict(zip(PROMPTS, ("three", "four", "one", "two"), strict=True))
    for prompt in PROMPTS:
        others = [[texts[prompt]], [texts[prompt]], [texts[wrong[prompt]]]]
        assert fake.guesses[prompt] == [[], *others]


def test_a_tenth_of_the_words_is_replaced() -> None:
    prompt = " ".join(f"w{number}" for number in range(30))
    words = edited(prompt, ["other words"], random.Random(1)).split()
    assert sum(word in ("other", "words") for word in words) == 3
    assert sum(word == f"w{number}" for number, word in enumerate(words)) == 27


@pytest.mark.parametrize(
    ("answer", "other", "passes"),
    [
        ("abcd", "abcdef", 1),  # all of it is a part, and no token follows
        ("abcxef", "abcdef", 2),
        ("abcxabc", "", 5),  # the last three are a part of the answer itself
        ("wxyz", "abcd", 4),
        ("abcXdefXghi", "ghidefabc", 3),
        ("", "abc", 0),
    ],
)
def test_no_drafter_needs_fewer_passes_than_one_that_knows_the_answer(
    answer: str, other: str, passes: int
) -> None:
    assert fewest_passes([*map(ord, answer)], [*map(ord, other)]) == passes


def test_the_largest_accept_length_counts_the_passes_of_all_answers_after_their_first_token() -> (
    None
):
    def encode(text: str) -> list[int]:
        return [*map(ord, text)]

    assert largest_accept_length([("abcd", "bcd"), ("xyz", "abc")], encode) == 5 / 3
    assert largest_accept_length([("a", "b")], encode) == 0.0


@pytest.mark.parametrize(
    ("victim", "acts"),
    [("client", []), ("server", ["launched", "started"]), ("sidecar", ["sidecar"])],
)
def test_a_batch_ends_with_all_answers_when_one_is_killed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str, acts: list[str]
) -> None:
    prompts = [f"prompt {number}" for number in range(40)]
    path, output = write_lines(tmp_path / "in.jsonl", prompts, 8), tmp_path / "out.jsonl"
    done: list[str] = []
    with serving(FakeServer(delay=0.4, slots=1)) as url:
        server: Any = SimpleNamespace(
            url=url,
            processes=[],
            exit_code=lambda _seconds=0.0: None,
            launch=lambda: done.append("launched"),
            start=lambda: done.append("started"),
        )
        sidecar = SimpleNamespace(kill=lambda: done.append("sidecar"))
        monkeypatch.setattr(kills, "sidecar_of", lambda _server: sidecar)
        monkeypatch.setattr(kills, "state_of", lambda _server: {"sidecar": "ready"})
        batch = KilledBatch(server, path, output, "--in-flight", "2")
        killed = batch.run(victim, kills=2, interval=3.0)
    assert done == 2 * acts
    assert killed.kills == 2
    # A sidecar is looked for 2 s after its kill, and that of a server that has started too.
    assert (killed.sidecar_s > 0) == (victim != "client")
    assert (killed.server_s > 0) == (victim == "server")
    assert killed.answers.texts == {str(n): text_of(text) for n, text in enumerate(prompts, 1)}
    assert len(records_of(output)) == len(prompts)
