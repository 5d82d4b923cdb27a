"""The sidecar's options and its choice of the device, without a start of the sidecar."""

from __future__ import annotations

import pytest

from sglang_qspec.sidecar import __main__ as program

COUNT = "a whole number of at least 1"


def refusal(capsys: pytest.CaptureFixture[str], option: str) -> str:
    """The last line of the message about a command line with `option`."""
    with pytest.raises(SystemExit) as stop:
        program.main(["--model-path=/m", "--endpoint=ipc:///nowhere", option])
    assert stop.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("flag", "value", "allowed"),
    [
        ("--slots", "0", "a whole number from 1 to 4096"),
        ("--slots", "4097", "a whole number from 1 to 4096"),
        ("--slots", "many", "a whole number from 1 to 4096"),
        ("--max-completion-tokens", "0", "a whole number from 1 to 65536"),
        ("--max-completion-tokens", "65537", "a whole number from 1 to 65536"),
        ("--mem-fraction", "-0.1", "0 or a number from 0.01 to 0.95"),
        ("--mem-fraction", "1.5", "0 or a number from 0.01 to 0.95"),
        ("--mem-fraction", "nan", "0 or a number from 0.01 to 0.95"),
        ("--context-length", "0", COUNT),
        ("--prefill-tokens", "-1", COUNT),
        ("--max-total-tokens", "0.5", COUNT),
        ("--max-server-tokens", "0", COUNT),
    ],
)
def test_an_option_out_of_range_is_named_with_its_value_and_what_is_allowed(
    capsys: pytest.CaptureFixture[str], flag: str, value: str, allowed: str
) -> None:
    words = f"error: argument {flag}: is {value!r}, but must be {allowed}"
    assert refusal(capsys, f"{flag}={value}").endswith(words)
