"""The sidecar's options and its choice of the device, without a start of the sidecar."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_qspec.errors import ConfigError
from sglang_qspec.sidecar import __main__ as program
from sglang_qspec.sidecar import hardware
from sglang_qspec.sidecar.child_process import UNUSABLE

COUNT = "a whole number of at least 1"


def refusal(capsys: pytest.CaptureFixture[str], option: str) -> str:
    """The last line of the message about a command line with `option`."""
    with pytest.raises(SystemExit) as stop:
        program.main(["--model-path=org/m", "--endpoint=ipc:///nowhere", option])
    assert stop.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("flag", "value", "allowed"),
    [
        ("--slots", "-1", "a whole number from 0 to 4096"),
        ("--slots", "4097", "a whole number from 0 to 4096"),
        ("--slots", "many", "a whole number from 0 to 4096"),
        ("--max-completion-tokens", "0", "a whole number from 1 to 65536"),
        ("--max-completion-tokens", "65537", "a whole number from 1 to 65536"),
        ("--mem-fraction", "-0.1", "0 or a number from 0.01 to 0.95"),
        ("--mem-fraction", "1.5", "0 or a number from 0.01 to 0.95"),
        ("--mem-fraction", "nan", "0 or a number from 0.01 to 0.95"),
        ("--context-length", "0", COUNT),
        ("--prefill-tokens", "-1", COUNT),
        ("--max-total-tokens", "0.5", COUNT),
        ("--max-server-tokens", "0", COUNT),
        ("--max-backlog", "0", "a number from 0.1 to 86400"),
        ("--metrics-port", "65536", "a whole number from 0 to 65535"),
        ("--replicas", "0", "a whole number from 1 to 64"),
    ],
)
def test_an_option_out_of_range_is_named_with_its_value_and_what_is_allowed(
    capsys: pytest.CaptureFixture[str], flag: str, value: str, allowed: str
) -> None:
    words = f"error: argument {flag}: is {value!r}, but must be {allowed}"
    assert refusal(capsys, f"{flag}={value}").endswith(words)


@pytest.fixture
def visible(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """Sets CUDA_VISIBLE_DEVICES; the test's own changes of the environment end with it."""
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")

    def set_visible(names: str | None) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names or "")
        if names is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]

    return set_visible


@pytest.mark.parametrize(
    ("names", "device", "left"),
    [
        (None, "cuda:1", "1"),
        (None, "cuda", None),
        ("4,6", "cuda:1", "6"),
        ("4,6", "cuda", "4,6"),
        ("", "cpu", ""),
        ("4,6", "cpu", ""),
    ],
)
def test_the_sidecar_sees_only_its_device(
    visible: Callable[[str | None], None], names: str | None, device: str, left: str | None
) -> None:
    visible(names)
    assert hardware.settle_device(device) == device.partition(":")[0]
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == left


@pytest.mark.parametrize(
    ("names", "device", "words"),
    [
        ("", "cuda:0", "'cuda:0', but CUDA_VISIBLE_DEVICES is '', so no GPU is visible"),
        ("", "cuda", "'cuda', but CUDA_VISIBLE_DEVICES is '', so no GPU is visible"),
        ("-1", "cuda:0", "'cuda:0', but CUDA_VISIBLE_DEVICES is '-1', so no GPU is visible"),
        ("4,6", "cuda:2", "'cuda:2', but CUDA_VISIBLE_DEVICES is '4,6', so N must be at most 1"),
        ("4,6", "gpu", "'gpu', but must be cpu, cuda or cuda:N"),
        ("4,6", "cuda:²", "'cuda:²', but must be cpu, cuda or cuda:N"),
    ],
)
def test_a_device_that_is_not_visible_is_refused(
    visible: Callable[[str | None], None], names: str, device: str, words: str
) -> None:
    visible(names)
    with pytest.raises(ConfigError, match=f"^--device is {words}"):
        hardware.settle_device(device)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == names


def test_a_sidecar_on_a_cpu_finds_kernels_without_the_variable_of_sglang() -> None:
    program = (
        "from sglang_qspec.sidecar.hardware import settle_device\n"
        "settle_device('cpu')\n"
        "import sgl_kernel\n"
        "print(hasattr(sgl_kernel, 'assign_req_to_token_pool_cpu'))\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "SGLANG_USE_CPU_ENGINE"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout == "True\n"


def test_a_folder_that_does_not_exist_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    given = [f"--model-path={tmp_path / 'none'}", "--endpoint=ipc:///nowhere"]
    code = (
        "import sys; from sglang_qspec.sidecar.__main__ import main; "
        "print(main(sys.argv[1:]), 'torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, *given]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout == f"{UNUSABLE} False\n"
    assert re.fullmatch(
        r"\S+ sidecar: --model-path is '.*none', but must be an existing folder, or a name on a "
        r"hub such as ORGANIZATION/MODEL\n",
        ended.stderr,
    )
