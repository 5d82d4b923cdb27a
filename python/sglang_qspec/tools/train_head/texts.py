"""Texts that a target has written, kept in a file so that a killed command goes on with them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from sglang_qspec.tools.train_head.target import TargetModel, WrittenText

AT_ONCE = 32
"""Answers that the target writes at once."""


def written(
    target: TargetModel,
    prompts: Sequence[str],
    path: Path,
    *,
    answers: int,
    tokens: int,
    seed: int,
) -> list[WrittenText]:
    """A greedy answer to each prompt, and `answers` - 1 sampled ones, of at most `tokens` tokens.

    The texts that the file at `path` has already are not written again.
    """
    from tqdm import tqdm

    ids = target.encode(prompts)
    jobs = [(number, place) for number in range(answers) for place in range(len(ids))]
    texts = _read(path)
    with path.open("ab") as file, tqdm(total=len(jobs), desc="writing texts") as progress:
        progress.update(len(texts))
        for part in _parts(jobs, len(texts)):
            greedy = part[0][0] == 0
            asked = [ids[place] for _, place in part]
            found = target.answers(asked, tokens, greedy=greedy, seed=seed + len(texts))
            for prompt, answer in zip(asked, found, strict=True):
                texts.append(WrittenText(prompt, answer, greedy))
                file.write(msgspec.json.encode(texts[-1]) + b"\n")
            file.flush()
            progress.update(len(part))
    return texts


def _parts(jobs: Sequence[tuple[int, int]], begin: int) -> Iterator[list[tuple[int, int]]]:
    """The jobs from number `begin` on, AT_ONCE at a time, all greedy or all sampled."""
    while begin < len(jobs):
        part = list(jobs[begin : begin + AT_ONCE])
        part = [job for job in part if (job[0] == 0) == (part[0][0] == 0)]
        yield part
        begin += len(part)


def _read(path: Path) -> list[WrittenText]:
    """The texts of a file; a torn last line is cut off."""
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        path.write_bytes(whole)
    return [msgspec.json.decode(line, type=WrittenText) for line in whole.splitlines()]
