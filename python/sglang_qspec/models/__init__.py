"""Checkpoints: the demo models, and quantized draft models of any local model."""

from sglang_qspec.models.demo import DemoModels, demo_models
from sglang_qspec.models.quantize import quantize

__all__ = ["DemoModels", "demo_models", "quantize"]
