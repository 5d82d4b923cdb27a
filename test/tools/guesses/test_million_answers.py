"""A million earlier answers need bounded memory, and a lookup takes under a millisecond."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

ANSWERS = 1_000_000
LIMIT_MIB = 1024
LIMIT_S = 0.001
LOOKUPS = """
import json, random, resource, statistics, sys, time
from pathlib import Path
from sglang_qspec.tools.guesses.earlier import Earlier, EarlierAnswers

answers, requests, *prompts = sys.argv[1:]
with EarlierAnswers.open([Earlier(Path(answers), Path(requests))]) as earlier:
    right, times = 0, []
    for text in prompts:
        custom_id, prompt, expected = json.loads(text)
        began = time.perf_counter()
        found = earlier.find(custom_id, prompt)
        times.append(time.perf_counter() - began)
        right += [guess.text for guess in found] == [expected]
mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
print(json.dumps({"right": right, "seconds": statistics.median(times), "mib": mib}))
"""


@pytest.mark.thorough
def test_a_million_answers_take_under_a_gb_and_a_lookup_under_a_millisecond(
    tmp_path: Path,
) -> None:
    chance = random.Random(9)
    words = [f"word{number}" for number in range(20_000)]
    asked: list[str] = []
    answers, requests = tmp_path / "answers.jsonl", tmp_path / "requests.jsonl"
    with answers.open("w") as one, requests.open("w") as other:
        for number in range(ANSWERS):
            name, prompt = f"request-{number}", " ".join(chance.choices(words, k=40))
            body = {"choices": [{"text": f"answer {number} " + "x" * 200}]}
            record = {"custom_id": name, "response": {"status_code": 200, "body": body}}
            one.write(json.dumps(record) + "\n")
            other.write(json.dumps({"custom_id": name, "prompt": prompt}) + "\n")
            if number % (ANSWERS // 300) == 0:
                text = body["choices"][0]["text"]
                changed = prompt.split()
                for place in chance.sample(range(40), 4):
                    changed[place] = chance.choice(words)
                asked += [
                    json.dumps(each)
                    for each in (
                        (name, "unknown", text),
                        (None, prompt, text),
                        (None, " ".join(changed), text),
                    )
                ]
    done = subprocess.run(
        [sys.executable, "-c", LOOKUPS, str(answers), str(requests), *asked],
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    assert found["right"] > 0.97 * len(asked)
    assert found["mib"] < LIMIT_MIB
    assert found["seconds"] < LIMIT_S
