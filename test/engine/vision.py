"""A small vision model: the demo target with a vision tower of random weights.

Its answer to an image has no meaning, but depends on the image.
"""

import json
import shutil
from pathlib import Path

import torch
from PIL.Image import Image
from safetensors.torch import load_file, save_file
from transformers import (
    AutoProcessor,
    LlavaForConditionalGeneration,
    PixtralVisionConfig,
    PixtralVisionModel,
)

# Tokens of the demo vocabulary that occur in no text.
IMAGE, IMAGE_BREAK, IMAGE_END = "<gh_stars>", "<file_sep>", "<issue_closed>"
IMAGE_ID = 7
SIDE, PATCH = 64, 16
"""Largest side of an image and side of a patch, in pixels."""
VISION = PixtralVisionConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    image_size=SIDE,
    patch_size=PATCH,
)
PROCESSOR = {
    "processor_class": "PixtralProcessor",
    "image_processor": {
        "image_processor_type": "PixtralImageProcessor",
        "size": {"longest_edge": SIDE},
        "patch_size": {"height": PATCH, "width": PATCH},
    },
    "image_token": IMAGE,
    "image_break_token": IMAGE_BREAK,
    "image_end_token": IMAGE_END,
    "patch_size": PATCH,
}


def write(target: Path, path: Path) -> None:
    """Make `path` a Llava checkpoint of a Pixtral tower and the language model at `target`."""
    path.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(target / name, path / name)
    text = json.loads((target / "config.json").read_text())
    width = text["hidden_size"]
    torch.manual_seed(0)
    projector = {
        "linear_1.weight": 0.05 * torch.randn(width, VISION.hidden_size),
        "linear_1.bias": torch.zeros(width),
        "linear_2.weight": 0.05 * torch.randn(width, width),
        "linear_2.bias": torch.zeros(width),
    }
    weights = {
        "language_model": load_file(target / "model.safetensors"),
        "vision_tower": PixtralVisionModel(VISION).state_dict(),
        "multi_modal_projector": projector,
    }
    flat = {
        f"{part}.{name}": tensor.bfloat16().contiguous()
        for part, tensors in weights.items()
        for name, tensor in tensors.items()
    }
    save_file(flat, path / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "image_token_index": IMAGE_ID,
        "pad_token": "<|im_end|>",
        "text_config": text,
        "vision_config": {**VISION.to_dict(), "torch_dtype": "bfloat16"},
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
        "projector_hidden_act": "gelu",
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": True,
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "processor_config.json").write_text(json.dumps(PROCESSOR))


class Reference:
    """The same model in transformers, in float32."""

    def __init__(self, path: Path) -> None:
        self._model = LlavaForConditionalGeneration.from_pretrained(path, dtype=torch.float32)
        self._processor = AutoProcessor.from_pretrained(path)

    def generate(self, text: str, image: Image | None, tokens: int) -> list[int]:
        """`tokens` greedy output ids; an end-of-text token does not end the output."""
        images = None if image is None else [image]
        prompt = self._processor(text=[text], images=images, return_tensors="pt")
        end = {"do_sample": False, "max_new_tokens": tokens, "eos_token_id": []}
        output = self._model.generate(**prompt, **end)
        ids: list[int] = output[0, prompt["input_ids"].shape[1] :].tolist()
        return ids
