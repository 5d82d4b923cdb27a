"""Checkpoints: the demo models, conversion of GGUF files, and draft models of any local model."""

from sglang_qspec.models.convert import convert
from sglang_qspec.models.demo import DemoModels, demo_models
from sglang_qspec.models.quantize import quantize
from sglang_qspec.models.skip_layers import skip_layers

__all__ = ["DemoModels", "convert", "demo_models", "quantize", "skip_layers"]
