"""The README says what the code does, where that can be compared."""

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
