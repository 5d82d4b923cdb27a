"""Requests with images or embeddings are decoded without drafts, beside other requests."""

import base64
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from safetensors import safe_open
from transformers import AutoTokenizer

from sglang_qspec.tools.models import DemoModels
from test.engine import vision
from test.engine.awaiting import awaiting
from test.engine.features.asking import PLAIN, TEXT, ask, guessing
from test.engine.server.running import QSPEC
from test.engine.vision import Reference
from test.preloaded.server import Server

pytestmark = pytest.mark.server

TOKENS = 32
LONG = {"max_new_tokens": TOKENS, "ignore_eos": True}
LOOK = f"{vision.IMAGE} Hello there"
IMAGES = [Image.new("RGB", (64, 48), color) for color in ((200, 20, 20), (20, 20, 200))]


@pytest.fixture(scope="module")
def path(models: DemoModels, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "seeing"
    vision.write(models.target, path)
    return path


@pytest.fixture(scope="module")
def expected(path: Path) -> list[list[int]]:
    """Output ids for each image and for a text, by transformers."""
    reference = Reference(path)
    of_images = [reference.generate(LOOK, image, TOKENS) for image in IMAGES]
    assert of_images[0] != of_images[1]
    return [*of_images, reference.generate(TEXT, None, TOKENS)]


@pytest.fixture(scope="module")
def server(
    path: Path, models: DemoModels, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    arguments = [
        *("--device", "cpu", "--dtype", "float32", "--log-level", "warning"),
        *("--max-running-requests", "4", "--max-total-tokens", "4096"),
        *("--mm-attention-backend", "sdpa", "--sleep-on-idle"),
        *(*QSPEC, "--speculative-draft-model-path", str(models.draft)),
    ]
    with Server(
        path, arguments, environment=awaiting(tmp_path_factory.mktemp("plugin"))
    ) as running:
        yield running


def png(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def embed(target: Path, text: str) -> list[list[float]]:
    """The embeddings of a prompt's tokens."""
    ids = AutoTokenizer.from_pretrained(target)(text)["input_ids"]
    with safe_open(target / "model.safetensors", "pt") as weights:
        rows: list[list[float]] = weights.get_tensor("model.embed_tokens.weight")[ids].tolist()
    return rows


def look(server: Server, image: Image.Image, text: str = LOOK) -> dict[str, Any]:
    answer: dict[str, Any] = ask(server, LONG, text=text, image_data=[png(image)])
    return answer


def test_images_are_answered_as_without_speculation_and_text_beside_them_too(
    server: Server, expected: list[list[int]]
) -> None:
    sampling = {**LONG, "custom_params": guessing(expected[2])}
    with ThreadPoolExecutor(3) as pool:
        seen = [pool.submit(look, server, image) for image in IMAGES]
        read = pool.submit(ask, server, sampling)
    assert [answer.result()["output_ids"] for answer in (*seen, read)] == expected
    assert all("qspec" not in answer.result()["meta_info"] for answer in seen)


def test_text_gets_drafts_when_no_image_is_in_its_batch(
    server: Server, expected: list[list[int]]
) -> None:
    answer = ask(server, {**LONG, "custom_params": guessing(expected[2])})
    assert answer["output_ids"] == expected[2]
    assert answer["meta_info"]["qspec"]["accepted_by_source"]["guess"] > 0


def test_a_guess_is_removed_from_a_prompt_with_an_image(
    server: Server, expected: list[list[int]]
) -> None:
    answer = look(server, IMAGES[0], f"{LOOK}<NGRAMGUESS>and goodbye</NGRAMGUESS>")
    assert answer["output_ids"] == expected[0]


@pytest.mark.thorough
def test_embeddings_are_answered_without_drafts(models: DemoModels, tmp_path: Path) -> None:
    """SGLang takes embeddings only in bfloat16 and without the radix cache.

    They go through the stock layers, which round differently, so only the first token is compared.
    """
    arguments = [
        *("--device", "cpu", "--dtype", "bfloat16", "--log-level", "warning"),
        *("--max-running-requests", "4", "--max-total-tokens", "4096", "--disable-radix-cache"),
        *(*QSPEC, "--speculative-draft-model-path", str(models.draft)),
    ]
    with Server(models.target, arguments, environment=awaiting(tmp_path)) as server:
        plain = ask(server, {**LONG, "custom_params": PLAIN})
        prompt = {"input_embeds": embed(models.target, TEXT)}
        answer = server.post("/generate", {**prompt, "sampling_params": {"temperature": 0, **LONG}})
        drafted = ask(server, {**LONG, "custom_params": guessing(plain["output_ids"])})
    assert answer["output_ids"][0] == plain["output_ids"][0]
    assert answer["meta_info"]["completion_tokens"] == TOKENS
    assert "qspec" not in answer["meta_info"]
    assert drafted["meta_info"]["qspec"]["accepted_by_source"]["guess"] > 0
