"""The time that the plugin adds to a scheduler iteration, on made-up records."""

import json
from typing import Any

import pytest

from benchmark.overhead.iterations import added, plain_decode, read


def line(**changes: Any) -> str:
    """A decode iteration of 20 ms: 12 ms in the model, 5 around it, 1 in a hook, 2 elsewhere."""
    row: dict[str, Any] = {
        "decode": True,
        "running": 4,
        "width": 3,
        "period": 20.0,
        "worker": 17.0,
        "model": 12.0,
        "hooks": {"poll": 1.0},
        "parts": {"propose": 3.0, "sample": 0.5},
    }
    return json.dumps({**row, **changes})


def test_an_iteration_that_decodes_is_split_into_model_plugin_and_scheduler_time() -> None:
    (iteration, other) = read([line(), line(decode=False), line(running=2)])
    assert other.running == 2
    assert iteration.around_model == pytest.approx(5.0)
    assert iteration.ours == pytest.approx(6.0)
    assert iteration.outside_model == pytest.approx(8.0)


def test_added_time_is_the_plugins_time_minus_a_plain_steps_time_around_the_model() -> None:
    plain = plain_decode(read([line(worker=13.5, period=15.0, hooks={}, parts={})] * 3))
    assert plain.step_ms == pytest.approx(13.5)
    found = added(read([line(), line(), line(hooks={"poll": 31.0})]), plain)
    assert found.added_ms_median == pytest.approx(6.0 - 1.5)
    assert found.added_share == pytest.approx(4.5 / 13.5)
    assert found.added_ms_p99 == pytest.approx(36.0 - 1.5)
    assert found.whole_ms_median == pytest.approx(8.0 - 3.0)
    assert (found.iterations, found.width) == (3, 3.0)
    with pytest.raises(ValueError, match="no iteration"):
        plain_decode([])


def test_the_parts_add_up_to_the_mean_plugin_time() -> None:
    iterations = read([line(), line(parts={"propose": 1.0}, worker=14.0)])
    found = added(iterations, plain_decode(iterations))
    assert sum(found.parts_ms.values()) == pytest.approx(sum(i.ours for i in iterations) / 2)
    assert found.parts_ms["propose"] == pytest.approx(2.0)
    assert found.parts_ms["hook: poll"] == pytest.approx(1.0)
    assert list(found.parts_ms.values()) == sorted(found.parts_ms.values(), reverse=True)
