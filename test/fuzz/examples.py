"""Settings and long lists for the fuzz tests."""

from __future__ import annotations

from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st

T = TypeVar("T")


def examples(part: float = 1) -> settings:
    """`part` of the examples of hypothesis's profile, without a time limit for one example.

    The default profile has 100 examples. With `--thorough`, `test/conftest.py` loads a profile that
    has 10,000.
    """
    return settings(max_examples=round(part * settings().max_examples))


def up_to(most: int, drawn: st.SearchStrategy[T]) -> st.SearchStrategy[list[T]]:
    """Lists of all lengths up to `most`; hypothesis prefers lists of about seven items."""
    sizes = st.integers(0, most)
    return sizes.flatmap(lambda size: st.lists(drawn, min_size=size, max_size=size))
