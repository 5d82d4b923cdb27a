"""The parsers of settings accept what they say, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from sglang_qspec import values


def test_a_list_of_cpus_is_parsed() -> None:
    assert values.parse_cores("") == frozenset()
    assert values.parse_cores("1") == {1}
    assert values.parse_cores("0, 2-5,9-9") == {0, 2, 3, 4, 5, 9}


@pytest.mark.parametrize(
    "text", ["", ",", "1-", "-1", "-", "3-1", "1-2-3", "1 - 2", "²", "1-²", "٣", "one"]
)
def test_a_malformed_list_of_cpus_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^auto, shared or a list of CPU numbers such as 0,2-5$"):
        values.cores("auto", "shared")(text)


@pytest.mark.parametrize("text", ["", "cpu", "cuda", "cuda:0", "cuda:12"])
def test_a_device_is_accepted(text: str) -> None:
    assert values.device(text) == text


@pytest.mark.parametrize("text", ["cpu:0", "cuda:", "cuda:²", "cuda:٣", "cuda:-1", "0", "npu"])
def test_another_device_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^cpu, cuda or cuda:N$"):
        values.device(text)


@pytest.mark.parametrize("text", ["", "ipc:///a", "ipc:///a, tcp://b:1", "tcp://a:1,tcp://a:2"])
def test_a_list_of_endpoints_is_accepted(text: str) -> None:
    assert values.endpoints(text) == text


def test_the_endpoints_of_a_list_lose_their_spaces() -> None:
    assert values.parse_endpoints("ipc:///a, tcp://b:1 ") == ("ipc:///a", "tcp://b:1")
    assert values.parse_endpoints("") == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a", r"^ipc://PATH or tcp://HOST:PORT, or a comma-separated list of them$"),
        ("ipc:///a,b", "'b' is neither"),
        ("ipc:///a,", "'' is neither"),
        ("ipc:///a,ipc:///b, ipc:///a", "different addresses; 'ipc:///a' is in it more than once"),
        (",".join(f"ipc:///{n}" for n in range(17)), "a list of at most 16 addresses; it has 17"),
    ],
)
def test_a_wrong_list_of_endpoints_names_the_wrong_one(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        values.endpoints(text)


def test_a_model_is_a_folder_or_a_name_on_a_hub(tmp_path: Path) -> None:
    for path in (str(tmp_path), "Qwen/Qwen3-8B"):
        assert values.model(path) == path
    for path in (str(tmp_path / "none"), "./none", "~/none-of-it", "a/b/c", "", "none"):
        with pytest.raises(ValueError, match="an existing folder, or a name on a hub"):
            values.model(path)
