"""Runs `qspec batch` as a process against a running server, and reads its output."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_qspec.tools.batch.line import parse
from sglang_qspec.tools.batch.partial import Partials
from sglang_qspec.tools.guesses.texts import answers_in

SECONDS = re.compile(r"failed.* in ([\d.]+) s: ")


@dataclass(frozen=True)
class Answers:
    """The answers of a batch."""

    seconds: float
    """Time from the first open server to the last answer."""
    texts: dict[str, str]
    """Texts of the answers by custom_id."""
    tokens: int
    passes: int
    """Passes after prefill that the answers took in their last attempts."""
    accepted: int
    """Output tokens that were drafts."""

    @property
    def rate(self) -> float:
        """Output tokens per second."""
        return self.tokens / self.seconds

    @property
    def accept_length(self) -> float:
        """Output tokens of a pass."""
        return (self.passes + self.accepted) / self.passes

    def row(self, name: str) -> dict[str, Any]:
        """The figures for a table."""
        return {
            "batch": name,
            "tokens_per_s": round(self.rate, 1),
            "accept_length": round(self.accept_length, 2),
            "passes": self.passes,
            "tokens": self.tokens,
        }


def write_lines(path: Path, prompts: Sequence[str], max_tokens: int, names: str = "") -> Path:
    """Write an input with greedy chats; `names` begins their custom_ids."""
    sampling = {"temperature": 0, "max_tokens": max_tokens, "return_spec_tokens_details": True}
    with path.open("w") as file:
        for number, prompt in enumerate(prompts, 1):
            chat = [{"role": "user", "content": prompt}]
            line = {"custom_id": f"{names}{number}", "messages": chat, **sampling}
            file.write(json.dumps(line) + "\n")
    return path


def edited(prompt: str, others: Sequence[str], chance: random.Random) -> str:
    """The prompt with a tenth of its words replaced by words of other prompts."""
    words, pool = prompt.split(), " ".join(others).split()
    for place in chance.sample(range(len(words)), max(1, round(0.1 * len(words)))):
        words[place] = chance.choice(pool)
    return " ".join(words)


def command_of(url: str, path: Path, output: Path, *more: str | Path) -> list[str]:
    """The command of a batch against a running server."""
    given = [path, "--output", output, "--url", url, *more]
    return [sys.executable, "-m", "sglang_qspec", "batch", *map(str, given)]


def run(url: str, path: Path, output: Path, *more: str | Path) -> Answers:
    """Run a batch to its end. Raises CalledProcessError if a line fails."""
    command = command_of(url, path, output, *more)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = SECONDS.search(done.stdout)
    if found is None:
        raise RuntimeError(f"the batch printed {done.stdout!r}")
    return answers_of(output, float(found[1]))


def records_of(output: Path) -> list[dict[str, Any]]:
    """The records of an output."""
    return [json.loads(line) for line in output.read_text().splitlines()]


def answers_of(output: Path, seconds: float) -> Answers:
    """The figures of an output that took some seconds."""
    texts: dict[str, str] = {}
    tokens = passes = accepted = 0
    for record in records_of(output):
        body = record["response"]["body"]
        texts[record["custom_id"]] = body["choices"][0]["message"]["content"]
        details = body["sglext"]["spec_tokens_details"]
        tokens += body["usage"]["completion_tokens"]
        passes += details["spec_verify_ct"]
        accepted += details["spec_num_correct_drafts"]
    return Answers(seconds, texts, tokens, passes, accepted)


def cut_all(path: Path, answers: Path, output: Path) -> None:
    """Leave beside `output` the texts of all answers, as if each was cut just before its end."""
    found = {each["custom_id"]: each["response"]["body"] for each in records_of(answers)}
    with Partials.open(output.with_suffix(".partial.jsonl"), resume=False) as partials:
        for number, text in enumerate(path.read_bytes().splitlines(), 1):
            line = parse(number, text)
            (guess,) = answers_in(found[line.custom_id])
            partials.note(line, guess)


def swapped(answers: Path, path: Path) -> Path:
    """Write the answers with the custom_ids of other lines."""
    records = records_of(answers)
    others = records[len(records) // 2 :] + records[: len(records) // 2]
    with path.open("w") as file:
        for record, other in zip(records, others, strict=True):
            file.write(json.dumps({**record, "custom_id": other["custom_id"]}) + "\n")
    return path
