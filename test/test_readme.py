"""The README says what the code does, where that can be compared."""

import re
from pathlib import Path

from sglang_qspec import config

README = Path(__file__).parents[1] / "README.md"


def settings_table() -> str:
    rows = ["| flag | variable | default | meaning |", "|---|---|---|---|"]
    for field in config.fields():
        default = f"`{field.default}`" if field.default != "" else ""
        rows.append(
            f"| `{config.flag(field.name)}` | `{config.variable(field.name)}` | {default} "
            f"| {field.metadata['help']} |"
        )
    return "\n".join(rows)


def test_the_settings_table_is_that_of_the_code() -> None:
    assert settings_table() in README.read_text()


def test_the_tests_that_are_to_hold_losslessness_exist() -> None:
    page = README.with_name("docs") / "losslessness.md"
    named = set(re.findall(r"test/[\w/]+\.py", page.read_text()))
    assert len(named) > 5
    assert all((README.parent / name).is_file() for name in named)
