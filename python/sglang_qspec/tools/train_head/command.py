"""The task `qspec models train-head`: its options, and the way from a target to a head."""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sglang_qspec import values
from sglang_qspec.errors import ConfigError
from sglang_qspec.heads.config import HeadConfig
from sglang_qspec.heads.new_config import (
    eagle2_for_target,
    for_target,
    hydra_for_target,
    medusa_for_target,
)
from sglang_qspec.tools import declare
from sglang_qspec.tools.models.cache import build_folder
from sglang_qspec.tools.models.files import check_new, read_config, write_json
from sglang_qspec.tools.models.intact import check_intact
from sglang_qspec.tools.models.prompts import texts_of
from sglang_qspec.tools.train_head.prompts import PROMPTS

logger = logging.getLogger(__name__)

DESCRIPTION = """Train a head for a target, on texts that the target writes itself, and
print its folder. EAGLE heads are in the format that SGLang and vLLM read, Medusa heads in that of
vLLM, Hydra heads in this project's own. A killed command goes on where it was."""
HELD_OUT = 16
"""One prompt of this number is kept to judge the head with."""
LEAST_PROMPTS = 2
RECIPE = "recipe.json"
DTYPES = ("auto", "float32", "bfloat16")
KINDS = ("eagle3", "eagle2", "medusa", "hydra")
OWN_IDS = {"eagle3": 4, "hydra": 12}
"""Kinds with an LM head of their own, for one of this number of the target's ids by default."""


@dataclass(frozen=True)
class Training:
    """How a head is trained."""

    kind: str = KINDS[0]
    """eagle3 reads layers of the target and has an LM head of its own; eagle2 reads what the
    target's LM head reads, and drafts with that one; medusa has a head for each token of a draft,
    which reads the same; hydra reads the same and the newest token, without attention."""
    answers: int = 2
    """Answers to a prompt: a greedy one, and sampled ones."""
    tokens: int = 128
    """Maximum number of tokens of an answer."""
    epochs: int = 4
    """Times that each text is read."""
    depth: int = 4
    """Tokens that are drafted in a row; the number of Medusa heads."""
    draft_vocab: int | None = None
    """Number of token ids that an EAGLE-3 or Hydra head drafts; None means as OWN_IDS says."""
    layers: tuple[int, ...] | None = None
    """Layers whose outputs an EAGLE-3 head reads; None means `heads.config.default_layers`."""
    batch_tokens: int = 2048
    """Maximum number of tokens of a step."""
    dtype: str = DTYPES[0]
    """How the target computes; auto means bfloat16 where that is faster."""
    seed: int = 1


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the task."""
    default = Training()
    add = partial(declare.value, parser)
    add("--model", "folder of the target", Path, required=True)
    add("--output", "folder to create", Path, required=True)
    add(
        "--prompts",
        "file with a `prompt` in each line, or in Spec-Bench's format; take prompts like your own "
        f"(default: {len(PROMPTS)} of mixed kinds)",
        Path,
        "JSONL",
    )
    add("--num-prompts", "number of prompts to take", values.positive, "N", default=192)
    add(
        "--kind",
        "eagle3 reads layers of the target and has an LM head of its own; eagle2 drafts with the "
        "target's LM head, and reads what that one reads; medusa reads the same, and has a head "
        "for each token of a draft; hydra reads the same and the newest token, without attention: "
        "it is small, and may also speed up a draft model",
        choices=KINDS,
        default=default.kind,
    )
    text = "answers to each prompt: a greedy one, and sampled ones"
    add("--answers", text, values.positive, "N", default=default.answers)
    text = "maximum length of an answer, in tokens"
    add("--tokens", text, values.positive, "N", default=default.tokens)
    add("--epochs", "times that each text is read", values.positive, "N", default=default.epochs)
    text = "tokens that the head learns to draft in a row; the number of Medusa heads"
    add("--depth", text, values.whole(1, 16), "N", default=default.depth)
    text = (
        "number of token ids that an eagle3 or hydra head drafts (default: a quarter of the "
        "target's, for hydra a twelfth)"
    )
    add("--draft-vocab", text, values.positive, "N")
    parser.add_argument(
        "--layers",
        type=values.option(values.whole(0, 1000)),
        nargs="+",
        metavar="N",
        help="layers of the target whose outputs an eagle3 head reads, from 0 on (default: those "
        "that SGLang captures by default)",
    )
    text = "maximum number of tokens of a step"
    add("--batch-tokens", text, values.positive, "N", default=default.batch_tokens)
    text = "how target and head compute; auto means bfloat16 where that is faster"
    add("--dtype", text, choices=DTYPES, default=default.dtype)
    text = "seed of the sampled answers and of the training"
    add("--seed", text, values.whole(0, 2**31 - 1), "N", default=default.seed)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> str:
    """Train the head; return its folder, after how well it drafts. Raises QSpecError."""
    training = Training(
        options.kind,
        options.answers,
        options.tokens,
        options.epochs,
        options.depth,
        options.draft_vocab,
        None if options.layers is None else tuple(options.layers),
        options.batch_tokens,
        options.dtype,
        options.seed,
    )
    prompts = texts_of(options.prompts, PROMPTS)[: options.num_prompts]
    return str(train_head(options.model, options.output, prompts, training))


def train_head(model: Path, output: Path, prompts: Sequence[str], training: Training) -> Path:
    """Train a head for the checkpoint `model`, and write it to the new folder `output`.

    One of HELD_OUT prompts judges the head. Texts and training are kept in a folder beside
    `output`, which the next call with the same arguments goes on with.

    Raises ConfigError if an argument is not allowed for the model, or the checkpoint is not intact.
    Raises QSpecError if `output` exists and is not empty.
    """
    from sglang_qspec.heads import checkpoint  # torch takes seconds
    from sglang_qspec.tools.train_head.new_head import frequent_ids, new_head
    from sglang_qspec.tools.train_head.target import TargetModel
    from sglang_qspec.tools.train_head.texts import written
    from sglang_qspec.tools.train_head.trainer import Trainer, mixed_precision
    from sglang_qspec.tools.train_head.training import fit

    check_new(output)
    if len(prompts) < LEAST_PROMPTS:
        raise ConfigError(f"there are {len(prompts)} prompts, but at least {LEAST_PROMPTS} needed")
    head_config = _head_config(read_config(model), training)
    check_intact(model)
    folder = _kept(model, output, prompts, training)
    target = TargetModel(model, training.dtype)
    given = {"answers": training.answers, "tokens": training.tokens, "seed": training.seed}
    texts = written(target, prompts, folder / "texts.jsonl", **given)
    held = [texts[place] for place in range(0, len(prompts), HELD_OUT)]
    judges = {tuple(text.prompt) for text in held}
    learnt = [text for text in texts if tuple(text.prompt) not in judges]
    layers = head_config.layers or ()
    trainer = Trainer(
        new_head(head_config, frequent_ids(learnt, head_config.draft_vocab_size), target),
        target,
        learnt,
        layers=layers,
        epochs=training.epochs,
        depth=training.depth,
        batch_tokens=training.batch_tokens,
        seed=training.seed,
    )
    trainer.run(folder / "state.pt")
    with mixed_precision(target):
        found = fit(trainer.head, target, held, layers, training.depth)
    logger.info(
        "on %d answers to other prompts %.1f %% of the first draft tokens are the target's, and a "
        "draft of %d tokens gives %.2f tokens a pass",
        len(held),
        100 * found.right[0],
        training.depth,
        found.accept_length,
    )

    def build(content: Path) -> None:
        checkpoint.save(trainer.head, content)

    build_folder(output, build)
    shutil.rmtree(folder)
    return output


def _head_config(target: Mapping[str, Any], training: Training) -> HeadConfig:
    """The head to train for a target with this `config.json`. Raises ConfigError."""
    kind, layers, number = training.kind, training.layers, training.draft_vocab
    if layers is not None and kind != "eagle3":
        raise ConfigError(f"--layers is {layers}, but only an eagle3 head has this option")
    if number is not None and kind not in OWN_IDS:
        raise ConfigError(
            f"--draft-vocab is {number}, but only {' and '.join(OWN_IDS)} heads have this option"
        )
    if kind == "medusa":
        return medusa_for_target(target, training.depth)
    if kind == "eagle2":
        return eagle2_for_target(target)
    vocab = target.get("vocab_size", 0)
    number = number or max(1, vocab // OWN_IDS[kind])
    if number > vocab:
        raise ConfigError(f"draft vocab is {number}, but the target has {vocab} token ids")
    if kind == "hydra":
        return hydra_for_target(target, number)
    return for_target(target, number, layers)


def _kept(model: Path, output: Path, prompts: Sequence[str], training: Training) -> Path:
    """The folder with what a killed command has done; a new one if the arguments are others."""
    digest = hashlib.sha256("\0".join(prompts).encode()).hexdigest()
    recipe = {"model": str(model.absolute()), "prompts": digest, **asdict(training)}
    recipe = json.loads(json.dumps(recipe))
    folder = output.absolute().parent / f".{output.name}.training"
    path = folder / RECIPE
    if path.exists() and json.loads(path.read_text(encoding="utf-8")) == recipe:
        logger.info("going on with the training in %s", folder)
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_json(path, recipe)
    return folder
