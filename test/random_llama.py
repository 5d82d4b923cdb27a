"""A small checkpoint of random weights with every part of a real one."""

import shutil
from pathlib import Path
from typing import Any

import torch

from sglang_qspec.models import DemoModels


def write_random_llama(folder: Path, models: DemoModels, **config: Any) -> Path:
    """Two Llama layers in bfloat16 with the demo model's tokenizer, at `folder`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(vocab_size=49152, num_hidden_layers=2, tie_word_embeddings=True, **config)
    LlamaForCausalLM(shape).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(models.target / name, folder / name)
    return folder
