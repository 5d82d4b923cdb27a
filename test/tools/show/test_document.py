"""Self-contained pages: no text of the data can become markup or script."""

from __future__ import annotations

import json
import re

from sglang_qspec.draft_source import SOURCES
from sglang_qspec.tools.complete.marks import TARGET
from sglang_qspec.tools.show.document import COLOURS, FOLDER, document, read
from sglang_qspec.tools.show.server import PAGE, SAVED
from test.tools.show.answers import EVIL


def test_data_cannot_end_its_element() -> None:
    text = document(f"T{EVIL}", SAVED, {"text": EVIL})
    assert text.count("</script>") == 2
    held = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert held is not None
    assert json.loads(held[1]) == {"text": EVIL}
    assert "<img" not in text


def test_the_script_is_whole_and_imports_nothing() -> None:
    text = document("T", SAVED, 0)
    assert not re.search(r"^(import|export) ", text, re.MULTILINE)
    # Modules become one script, so no two of them define the same name.
    names = re.findall(r"^(?:async )?(?:function\*?|class|const|let) (\w+)", text, re.MULTILINE) + [
        name.strip()
        for group in re.findall(r"^const [\[{]([^\]}]+)[\]}] =", text, re.MULTILINE)
        for name in group.split(",")
    ]
    assert len(names) == len(set(names)) > 50


def test_every_module_follows_those_that_it_imports() -> None:
    for order in (PAGE, SAVED):
        for place, name in enumerate(order):
            imported = re.findall(r'from "\./([\w.]+)"', read(name))
            assert set(imported) <= set(order[:place])


def test_no_file_loads_anything_from_elsewhere() -> None:
    texts = [(FOLDER / path.name).read_text() for path in FOLDER.iterdir()]
    assert texts
    found = {url for text in texts for url in re.findall(r"https?://[^\s\"'`)]*", text)}
    assert found == {"http://www.w3.org/2000/svg"}
    assert not any("innerHTML" in text or "eval(" in text for text in texts)


def test_each_draft_source_has_a_name_a_meaning_and_a_style() -> None:
    script, style = read("sources.js"), read("page.css")
    named = re.search(r"SOURCES = \[(.*?)\]", script)
    assert named is not None
    assert re.findall(r'"(\w+)"', named[1]) == [*SOURCES, TARGET]
    for source in (*SOURCES, TARGET):
        assert f'"{source}": "' in script
        assert f".{source} {{ --own: " in style
    defined = set(re.findall(r"(--source-\d+):", style))
    assert set(re.findall(r"var\((--source-\d+)\)", style)) <= defined
    assert len(defined) == COLOURS
