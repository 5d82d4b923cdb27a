"""A value that an option does not take: the option, the value and what is allowed, status 2."""

from __future__ import annotations

import pytest

from sglang_qspec.__main__ import main
from sglang_qspec.errors import shown

SHARE = "a number from 0 to 1"
TIMES = "milliseconds above 0, or requests:milliseconds pairs such as 1:30,8:45"
SLO = "NAME=SECONDS with a name of mean, p50, p95, p99, ttft and seconds above 0"
WRONG = [
    ("batch", "--in-flight", "0", "a whole number from 1 to 4096"),
    ("complete", "--guesses-from", ",b", "ANSWERS or ANSWERS,REQUESTS: paths of JSONL files"),
    ("doctor", "--port", "0", "a whole number from 1 to 65535"),
    ("doctor", "--device", "gpu", "cpu, cuda or cuda:N"),
    ("models compare", "--in-flight", "49", "a whole number from 1 to 48"),
    ("models compare", "--temperature", "0", "a number from 0.01 to 2"),
    ("models compare", "--cores", "some", "auto, shared or a list of CPU numbers such as 0,2-5"),
    ("models quantize", "--group-size", "row", "128, 64, 32 or channel"),
    ("measure", "--requests", "5000", "a whole number from 1 to 4096"),
    ("plan", "--gpus", "0", "a whole number from 1 to 1000000"),
    ("plan", "--gpus", "9" * 400, "a whole number from 1 to 1000000"),
    ("plan", "--prompt-tokens", "1000000000", "a whole number from 1 to 1048576"),
    ("plan", "--output-tokens", "1000000000", "a whole number from 1 to 131072"),
    ("plan", "--slo", "p95", SLO),
    ("plan", "--slo", "p90=1", SLO),
    ("plan", "--outage", "5:5", "BEGIN:END in seconds, with 0 <= BEGIN < END"),
    ("plan", "--link-ms", "-1", "a number from 0 to 10000"),
    ("plan", "--alpha", "2", SHARE),
    ("show", "--port", "99999", "a whole number from 0 to 65535"),
    ("theory", "--alpha", "1.5", SHARE),
    ("theory", "--alpha", "nan", SHARE),
    ("theory", "--again", "often", SHARE),
    ("theory", "--k", "0", "a whole number of at least 1"),
    ("theory", "--in-flight", "2.5", "a whole number of at least 1"),
    ("theory", "--verify-ms", "1:30,45", TIMES),
    ("theory", "--verify-ms", "0:30", TIMES),
    ("theory", "--draft-ms", "0", TIMES),
    ("theory", "--plain-ms", "inf", TIMES),
    ("top", "--interval", "0", "a number from 0.1 to 3600"),
    ("top", "--interval", "x", "a number from 0.1 to 3600"),
    ("top", "--interval", "nan", "a number from 0.1 to 3600"),
]


@pytest.mark.parametrize(("command", "option", "value", "allowed"), WRONG)
def test_a_wrong_value_is_named_with_its_option_and_what_is_allowed(
    command: str, option: str, value: str, allowed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*command.split(), option, value])
    assert stop.value.code == 2
    words = f"error: argument {option}: is {shown(value)}, but must be {allowed}\n"
    assert capsys.readouterr().err.endswith(words)
