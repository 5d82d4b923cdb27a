"""`sgl.Engine` in a user's program, with QSPEC's settings in environment variables."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from sglang_qspec.tools.models import DemoModels
from test.engine.awaiting import awaiting

pytestmark = pytest.mark.server

PROGRAM = """
import asyncio, os, sys, json
import sglang_qspec  # first: it installs the CPU stand-ins
import sglang as sgl

if __name__ == "__main__":
    target, draft = sys.argv[1:]
    given = dict(
        model_path=target,
        device="cpu",
        dtype="float32",
        max_total_tokens=8192,
        context_length=1024,
        log_level="warning",
        speculative_algorithm="QSPEC",
        speculative_draft_model_path=draft,
    )
    os.environ["SGLANG_QSPEC_COMPLETIONS"] = "none"
    try:
        sgl.Engine(**given)
    except ValueError as error:
        refusal = f"{type(error).__name__}: {error}"
    os.environ["SGLANG_QSPEC_COMPLETIONS"] = "2"
    engine = sgl.Engine(**given)
    sampling = {"temperature": 0, "max_new_tokens": 16}
    text = "The sun is a star because"
    plain = engine.generate(text, sampling)
    guess = f"<NGRAMGUESS>{plain['text']}</NGRAMGUESS>"
    # The sidecar's completions may have the same tokens as the guess.
    alone = {**sampling, "custom_params": {"qspec_sources": ["guess"]}}
    guessed, other = engine.generate([text + guess, "One, two,"], [alone, sampling])
    streamed = [piece["text"] for piece in engine.generate(text + guess, alone, stream=True)]

    async def ask():
        whole, pieces = await asyncio.gather(
            engine.async_generate(text + guess, alone),
            engine.async_generate("One, two,", sampling, stream=True),
        )
        return whole, [piece["text"] async for piece in pieces]

    whole, pieces = asyncio.get_event_loop().run_until_complete(ask())
    settings = engine.get_server_info()["internal_states"][0]["qspec"]
    engine.shutdown()
    answers = {"plain": plain, "guessed": guessed, "other": other, "async": whole}
    streams = {"streamed": streamed, "async_streamed": pieces}
    print(json.dumps({**answers, **streams, "state": settings, "refusal": refusal}))
"""


@pytest.fixture(scope="module")
def result(models: DemoModels, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What the program prints."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(models.target), str(models.draft)],
        env={**os.environ, **awaiting(tmp_path_factory.mktemp("plugin"))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return json.loads(ended.stdout.splitlines()[-1])


def test_an_engine_speculates_with_guesses_in_prompts(result: Any) -> None:
    assert result["guessed"]["output_ids"] == result["plain"]["output_ids"]
    assert result["guessed"]["meta_info"]["qspec"]["accepted_by_source"]["guess"] > 4
    assert result["other"]["meta_info"]["qspec"]["accepted_by_source"]["guess"] == 0
    assert result["async"]["output_ids"] == result["plain"]["output_ids"]
    assert result["async"]["meta_info"]["qspec"]["accepted_by_source"]["guess"] > 4
    assert result["streamed"][-1] == result["plain"]["text"]
    assert result["async_streamed"][-1] == result["other"]["text"]
    assert result["state"]["sidecar"] in ("connecting", "ready")


def test_a_bad_setting_raises_in_the_program(result: Any) -> None:
    assert result["refusal"].startswith("ConfigError: SGLANG_QSPEC_COMPLETIONS is 'none'")
