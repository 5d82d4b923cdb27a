"""Builds self-contained HTML files from the page's style, its modules and data.

Such a file needs no network and no server. A policy in the file allows only its own style and
script. `data` cannot end the script element that holds it, because each `<` in it is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

from sglang_qspec.draft_source import DESCRIPTIONS, SOURCES
from sglang_qspec.tools.complete.marks import TARGET

FOLDER = resources.files("sglang_qspec.tools.show") / "static"
SOURCES_MODULE = "sources.js"
"""The module of the draft sources, which is no file."""
COLOURS = 8
"""Number of colours for sources in page.css."""
LINES = (
    "underline solid",
    "underline wavy",
    "underline dotted",
    "underline dashed",
    "underline double",
    "underline overline solid",
    "underline overline dotted",
    "underline overline dashed",
)
"""Lines at drafted text, one kind for each source."""
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


def document(title: str, modules: Sequence[str], data: Any) -> str:
    """An HTML page with `data` as JSON in the element `data`.

    `modules` are names of the page's JavaScript files (`read`), each after those that it
    imports. They become one script, so no two of them define the same name. The script fills the
    page.
    """
    style = read("page.css")
    script = "\n".join(_EXPORT.sub("", _IMPORT.sub("", read(name))) for name in modules)
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{html.escape(title)}</title>
<style>{style}</style>
</head>
<body>
<script type="application/json" id="data">{_json(data)}</script>
<script type="module">{script}</script>
</body>
</html>
"""


def read(name: str) -> str:
    """The text of a file of the page: of the folder `static`, or made from the draft sources."""
    if name == SOURCES_MODULE:
        return _module()
    text = (FOLDER / name).read_text(encoding="utf-8")
    return text + _style() if name == "page.css" else text


def _module() -> str:
    """A JavaScript module with the names and the meanings of sources, the target's last."""
    meanings = {source.name.lower(): text for source, text in DESCRIPTIONS.items()}
    meanings[TARGET] = "the target's own token"
    return (
        f"export const SOURCES = {json.dumps(list(meanings))};\n"
        f"export const MEANINGS = {json.dumps(meanings)};\n"
    )


def _style() -> str:
    """The style of each source, which has one of the colours `--source-N` of page.css."""
    rules = []
    for number, name in enumerate(SOURCES):
        line = LINES[number % len(LINES)]
        rules += [
            f":root {{ --{name}: var(--source-{number % COLOURS}); }}",
            f".{name} {{ --own: var(--{name}); }}",
            f".token.{name} {{ text-decoration: {line} 2px var(--own); }}",
        ]
    return "\n".join(["", *rules, ""])


def _json(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")


def _hash(text: str) -> str:
    """The source expression of a policy that allows exactly this text."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
