"""Checks of the two checkpoints, and whether they fit each other."""

from __future__ import annotations

from pathlib import Path

from sglang_qspec import values
from sglang_qspec.errors import ConfigError, first_line
from sglang_qspec.heads import config as heads
from sglang_qspec.heads.config import is_head_folder
from sglang_qspec.tools.doctor.case import Case
from sglang_qspec.tools.doctor.finding import Finding, Status, failure, ok
from sglang_qspec.tools.models.files import WEIGHTS, read_config
from sglang_qspec.tools.models.intact import check_files

HUB_TIMEOUT_S = 5.0
"""Longest wait for an answer of a model hub, in seconds."""


def target(case: Case) -> Finding:
    """Whether the target's checkpoint is complete, and SGLang can read its configuration."""
    assert case.model is not None
    return _checkpoint(case, case.model, "target")


def draft(case: Case) -> Finding:
    """The same for the draft model, or whether a head fits the target."""
    assert case.draft_model is not None
    folder = Path(case.draft_model).expanduser()
    if is_head_folder(folder):
        assert case.model is not None
        finding = _head(folder, case.model, "target")
        case.tokenizers_fit = finding.status is Status.OK  # a head has the target's tokenizer
        return finding
    return _checkpoint(case, case.draft_model, "draft")


def head(case: Case) -> Finding:
    """Whether the head beside the draft model is complete and fits the target."""
    assert case.settings is not None
    assert case.model is not None
    return _head(Path(case.settings.head_path).expanduser(), case.model, "target")


def draft_head(case: Case) -> Finding:
    """Whether the draft model's own head is complete and fits it."""
    assert case.settings is not None
    assert case.draft_model is not None
    folder = Path(case.settings.draft_model_head).expanduser()
    return _head(folder, case.draft_model, "draft model", " --kind hydra")


def _head(folder: Path, path: str, role: str, more: str = "") -> Finding:
    """Check the checkpoint of a head of the model at `path`, which is the `role`."""
    try:
        found = heads.read(folder)
        found.check_target(read_config(Path(path).expanduser()), role)
    except ConfigError as error:
        return failure(
            f"the head {folder} does not fit: {error}",
            f"Take a head of this {role}, or train one: qspec models train-head "
            f"--model {path}{more} --output HEAD",
        )
    if damage := damaged(folder):
        return failure(damage, "Copy or train the head again.")
    return ok(f"a head that drafts {found.draft_vocab_size} of {found.vocab_size} token ids")


def _checkpoint(case: Case, path: str, role: str) -> Finding:
    """Check a checkpoint, and store its description in the field `role` of `case`."""
    from sglang_qspec.engine.placement.memory import weight_bytes
    from sglang_qspec.engine.sidecar import model_pair
    from sglang_qspec.engine.start import preflight
    from sglang_qspec.sidecar.memory import gib

    folder = Path(path).expanduser()
    if values.is_local(path) or folder.is_dir():
        if not folder.is_dir():
            return failure(f"{path} is no folder", "Give the folder of a checkpoint.")
        damage = damaged(folder)
        if damage:
            return failure(damage, "Copy or download the checkpoint again.")
    elif objection := _hub_objection(path):
        return failure(
            f"{path} is no local folder, and the hub does not give it: {objection}",
            "Give the folder of a checkpoint; or HF_HUB_OFFLINE=1, if the model is in the cache.",
        )
    try:
        found = model_pair.describe_model(path, path, False, None)
    except OSError as error:
        return failure(
            f"{path} cannot be loaded: {first_line(error)}",
            "Give the folder of a checkpoint, or the name of a model that this machine can reach.",
        )
    preflight.check_family("--model" if role == "target" else "--draft-model", path)
    setattr(case, role, found)
    size = weight_bytes(path)
    text = f"{found.architecture}, {found.vocab_size} token ids"
    if size is None:
        return ok(f"{text}; the weights are not in a local folder")
    return ok(f"{text}, {gib(size)} of weights")


def _hub_objection(path: str) -> str | None:
    """Why the hub does not give a model; None if it does, or if the hub may not be asked.

    Without this question transformers would try to reach an unreachable hub for minutes.
    """
    import httpx
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return None
    try:
        HfApi().model_info(path, timeout=HUB_TIMEOUT_S)
    except (OSError, httpx.HTTPError) as error:
        return first_line(error)
    return None


def damaged(folder: Path) -> str | None:
    """What a local checkpoint lacks; None if its configuration and weights are complete.

    Weights of other formats than safetensors are not checked.
    """
    try:
        read_config(folder)
        if any(folder.glob("*.safetensors")) or not any(
            path.suffix in WEIGHTS for path in folder.iterdir()
        ):
            check_files(folder)
    except ConfigError as error:
        return str(error)
    return None


def tokenizers(case: Case) -> Finding:
    """Whether each token id has the same text in both models."""
    from sglang_qspec.engine.sidecar import model_pair

    assert case.target is not None
    assert case.draft is not None
    if case.target.fingerprint != case.draft.fingerprint:
        objection = model_pair.tokenizer_objection(case.target, case.draft)
        return failure(
            f"the draft model does not fit: {objection}",
            "Take a draft model of the same family, or a quantized copy of the target: "
            f"qspec models quantize --model {case.model} --bits 4",
        )
    case.tokenizers_fit = True
    ids = case.target.vocab_size, case.draft.vocab_size
    if ids[0] != ids[1]:
        return ok(
            f"equal on all tokens; the vocabularies are padded to {ids[0]} and {ids[1]} ids, and "
            f"the sidecar drafts only ids below {min(ids)}"
        )
    return ok(f"equal on all tokens, with {ids[0]} ids in both models")
