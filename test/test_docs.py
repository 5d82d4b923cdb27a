"""The pages in *.md agree with the code, with the files and with each other."""

import dataclasses
import re
from pathlib import Path

import pytest

from sglang_qspec import config
from sglang_qspec.controls import PREFIX, Controls
from sglang_qspec.engine.boundary.compat import SGLANG_VERSION
from sglang_qspec.guess_tags import GUESS_KEYS

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("*.md")])


def settings_table() -> str:
    rows = ["| flag | variable | default | meaning |", "|---|---|---|---|"]
    for field in config.fields():
        default = f"`{field.default}`" if field.default != "" else ""
        rows.append(
            f"| `{config.flag(field.name)}` | `{config.variable(field.name)}` | {default} "
            f"| {field.metadata['help']} |"
        )
    return "\n".join(rows)


def test_the_settings_table_matches_the_code() -> None:
    assert settings_table() in (DOCS / "settings.md").read_text(), (
        f"the table in docs/settings.md must be:\n{settings_table()}"
    )


def test_the_page_on_requests_lists_each_option_that_a_request_can_set() -> None:
    page = (DOCS / "request-options.md").read_text()
    first_cells = re.findall(rf"^\| (`{PREFIX}[^|]+)\|", page, re.MULTILINE)
    listed = set(re.findall(r"`(\w+)`", " ".join(first_cells)))
    options = {PREFIX + field.name for field in dataclasses.fields(Controls)}
    assert listed == options | set(GUESS_KEYS)


@pytest.mark.parametrize("page", ["README.md", "docs/upgrading-sglang.md"])
def test_a_page_names_the_release_of_sglang_that_the_code_needs(page: str) -> None:
    assert SGLANG_VERSION in (ROOT / page).read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_to_a_file_and_a_heading(page: Path) -> None:
    broken = [
        link
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())
        if "://" not in link and not leads_somewhere(page, link)
    ]
    assert not broken


def leads_somewhere(page: Path, link: str) -> bool:
    name, _, anchor = link.partition("#")
    target = page.parent / name if name else page
    return target.exists() and (not anchor or anchor in anchors(target))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    # A line in a shell block can begin with "# " too, but those are indented.
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", ["losslessness.md", "hardening.md", "features.md", "design.md"])
def test_the_tests_that_a_page_names_exist(page: str) -> None:
    text = (DOCS / page).read_text()
    named = re.findall(r"(?<![\w/])(?:test|scripts|benchmark)/[\w/]+\.py", text)
    assert not [name for name in named if not (ROOT / name).is_file()]


def test_the_glossary_names_classes_and_messages_of_the_code() -> None:
    glossary = (DOCS / "design.md").read_text().split("## Words\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| .+ \| (.*) \|$", glossary, re.MULTILINE)
    named = set(re.findall(r"`([A-Z]\w+)(?:\.\w+)?`", " ".join(rows))) - {"D", "Req"}
    code = "\n".join(path.read_text() for path in (ROOT / "python" / "sglang_qspec").rglob("*.py"))
    assert len(rows) > 25
    assert not {name for name in named if not re.search(rf"^class {name}\b", code, re.MULTILINE)}


def test_every_section_of_results_names_the_commit_of_its_figures() -> None:
    sections = re.split(r"^#{2,3} ", (DOCS / "results.md").read_text(), flags=re.MULTILINE)[1:]
    assert not [
        section.splitlines()[0]
        for section in sections
        if "\n| " in section and not re.search(r"Recorded at `[0-9a-f]{7}`", section)
    ]


def test_the_page_on_losslessness_names_the_tests_that_hold_it() -> None:
    assert len(set(re.findall(r"test/[\w/]+\.py", (DOCS / "losslessness.md").read_text()))) > 5
