"""Checkpoints: the demo models, conversion of GGUF files, and draft models of any local model."""

from sglang_qspec.tools.models.convert import convert
from sglang_qspec.tools.models.demo import DemoModels, demo_models
from sglang_qspec.tools.models.quantize import quantize
from sglang_qspec.tools.models.skip_layers import skip_layers

__all__ = ["DemoModels", "convert", "demo_models", "quantize", "skip_layers"]
