"""The prompts of the demo and the tests, which the package ships."""

from sglang_qspec.tools.models.prompts import PROMPTS

__all__ = ["PROMPTS"]
