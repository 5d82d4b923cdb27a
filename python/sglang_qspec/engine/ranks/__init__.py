"""Keeps the ranks of one target in step."""

from sglang_qspec.engine.ranks.group import RankGroup
from sglang_qspec.engine.ranks.order import PassOrder

__all__ = ["PassOrder", "RankGroup"]
