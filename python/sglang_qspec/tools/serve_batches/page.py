"""The page of the service, at its root. It asks the API as any client does.

The key of the tenant stays in the tab of the browser (sessionStorage), and goes to the service in
the header `Authorization` alone. The style and `dom.js` are those of `qspec show`.
"""

from __future__ import annotations

from importlib import resources

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sglang_qspec.tools.show import document
from sglang_qspec.tools.show.server import HEADERS, TYPES

FOLDER = resources.files("sglang_qspec.tools.serve_batches") / "static"


def routes() -> list[Route]:
    """The page, and the files that it loads."""
    own = {name: (FOLDER / name).read_text("utf-8") for name in ("index.html", "batches.js")}
    files = own | {name: document.read(name) for name in ("page.css", "dom.js")}
    return [
        _route("/" if name == "index.html" else f"/{name}", TYPES[name.rpartition(".")[2]], text)
        for name, text in files.items()
    ]


def _route(path: str, kind: str, text: str) -> Route:
    async def send(_request: Request) -> Response:
        return Response(text, headers=HEADERS, media_type=kind)

    return Route(path, send)
