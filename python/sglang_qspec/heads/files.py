"""Which files of a checkpoint's folder are its weights."""

from __future__ import annotations

from pathlib import Path

SAFETENSORS = ".safetensors"
SUFFIXES = (SAFETENSORS, ".bin", ".pt")
"""The weights of a folder are its files with the first suffix that any file has, as in SGLang."""
OF_TRAINING = frozenset({"training_args", "optimizer", "scheduler", "scaler"})
"""Names of files in torch's format that a training leaves beside the weights, without suffix."""


def weight_files(folder: Path) -> list[Path]:
    """The weight files in a folder, in the order of their names; empty without any."""
    for suffix in SUFFIXES:
        found = sorted(path for path in folder.glob(f"*{suffix}") if path.stem not in OF_TRAINING)
        if found:
            return found
    return []
