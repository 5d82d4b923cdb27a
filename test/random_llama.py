"""Small checkpoints of random weights with every part of a real one."""

import shutil
from pathlib import Path
from typing import Any

import torch

from sglang_qspec.tools.models import DemoModels


def write_random_llama(folder: Path, models: DemoModels, **config: Any) -> Path:
    """Two Llama layers in bfloat16 with the demo model's tokenizer, at `folder`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = LlamaConfig(vocab_size=49152, num_hidden_layers=2, tie_word_embeddings=True, **config)
    LlamaForCausalLM(shape).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(models.target / name, folder / name)
    return folder


def pad_vocabulary(source: Path, folder: Path, vocab_size: int, *, scale: float) -> Path:
    """Copy a checkpoint of `write_random_llama` to `folder`, with another number of token ids.

    The row of each further id is `scale` times the row of an ordinary token. With the scale 0 the
    model never chooses such an id; with a large scale it chooses nearly always one.
    """
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    before = model.config.vocab_size
    model.resize_token_embeddings(vocab_size, mean_resizing=False)
    rows = model.get_input_embeddings().weight.data
    rows[before:] = scale * rows[1000 : 1000 + max(0, vocab_size - before)]
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(source / name, folder / name)
    return folder
