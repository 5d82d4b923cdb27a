"""The server captures the right widths and batch sizes, and estimates their memory."""

import pytest

from sglang_qspec import config
from sglang_qspec.config import QSpecConfig
from sglang_qspec.engine.cuda import widths
from sglang_qspec.errors import ConfigError
from sglang_qspec.policy import PASS_ROWS


@pytest.mark.parametrize(
    ("setting", "widest", "captured"),
    [
        ("auto", 8, (1, 2, 4, 8)),
        ("auto", 12, (1, 3, 6, 12)),
        ("auto", 64, (1, 8, 16, 32, 64)),
        ("auto", 2, (1, 2)),
        ("3, 6", 8, (1, 3, 6, 8)),
        ("1", 8, (1, 8)),
        ("4,16", 8, (1, 4, 8)),
    ],
)
def test_plain_passes_and_the_widest_trees_are_always_captured(
    setting: str, widest: int, captured: tuple[int, ...]
) -> None:
    assert widths.to_capture(setting, widest) == captured


def test_the_widths_are_auto_or_whole_numbers() -> None:
    assert QSpecConfig().graph_widths == widths.AUTO
    for text in ("0", "2;4", "65", "2,", "-1", ""):
        with pytest.raises(ConfigError, match="auto or a list of whole numbers from 1 to 64"):
            config.parse("graph_widths", text, given_as="--x")


def test_a_captured_pass_has_a_bounded_number_of_rows() -> None:
    sizes = [1, 2, 8, 32, 96, 256]
    assert widths.batch_sizes(sizes, 1) == sizes
    assert widths.batch_sizes(sizes, 8) == [1, 2, 8, 32, 96]
    assert widths.batch_sizes(sizes, 64) == [1, 2, 8]
    assert widths.batch_sizes([200, 256], 64) == [200]  # SGLang captures at least one
    assert PASS_ROWS == 768


def test_buffers_for_long_texts_count() -> None:
    shape = widths.Shape(requests=48, context_len=131072, heads=32, head_dim=128)
    mib = {
        (backend, width): widths.buffer_bytes(backend, shape, width) >> 20
        for backend in ("fa3", "flashinfer", "triton", "unknown")
        for width in (1, 2, 8)
    }
    table = 48 * 131072 * 4 >> 20
    assert mib["fa3", 1] == mib["fa3", 2] == 4 * table
    assert mib["fa3", 8] == 6 * table + 48  # a mask of a byte for each node and token
    assert mib["flashinfer", 8] == 8 * mib["flashinfer", 1] == 8 * 30
    assert mib["triton", 1] == 54
    assert mib["triton", 8] == 480
    assert mib["unknown", 8] == mib["triton", 8]


def test_a_graph_of_flashinfer_also_keeps_a_plan() -> None:
    assert widths.graph_bytes("fa3") == 2 << 20
    assert widths.graph_bytes("flashinfer") == 10 << 20
