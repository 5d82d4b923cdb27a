"""The HTTP routes of the service."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Message

from sglang_qspec.errors import BatchError
from sglang_qspec.tools.serve_batches import forms
from sglang_qspec.tools.serve_batches.objects import (
    ApiError,
    Batch,
    FileObject,
    FilePurpose,
    encoded,
    page,
)
from sglang_qspec.tools.serve_batches.page import routes as page_routes
from sglang_qspec.tools.serve_batches.service import Service
from sglang_qspec.tools.serve_batches.tenants import Tenant, Tenants
from sglang_qspec.tools.show.server import is_own

logger = logging.getLogger(__name__)

MAX_BODY = 1 << 20
"""Maximum size of a request that is no upload, in bytes."""
FORM_BYTES = 64 << 10
"""Maximum size of what an upload has besides the file, in bytes."""
MOST_FILES, MOST_BATCHES = 10_000, 100
"""Maximum number of objects of a page, as of OpenAI's API."""
USUAL_BATCHES = 20

Handler = Callable[["Api", Request, Tenant], Awaitable[Response]]


class Api:
    """The routes. Each is for one tenant, which the key of the request names."""

    def __init__(self, service: Service, tenants: Tenants) -> None:
        self.service, self.tenants = service, tenants

    def app(self) -> Starlette:
        """The application; its lifespan is that of the service."""
        routes = [
            self._route("/v1/files", "POST", Api.create_file),
            self._route("/v1/files", "GET", Api.list_files),
            self._route("/v1/files/{id}", "GET", Api.get_file),
            self._route("/v1/files/{id}", "DELETE", Api.delete_file),
            self._route("/v1/files/{id}/content", "GET", Api.content),
            self._route("/v1/batches", "POST", Api.create_batch),
            self._route("/v1/batches", "GET", Api.list_batches),
            self._route("/v1/batches/{id}", "GET", Api.get_batch),
            self._route("/v1/batches/{id}/cancel", "POST", Api.cancel),
            Route("/health", self.health),
            Route("/metrics", self.metrics),
            *page_routes(),
        ]
        handlers: dict[Any, Any] = {
            ApiError: _refusal,
            BatchError: _failure,
            HTTPException: _http_error,
        }
        return Starlette(routes=routes, exception_handlers=handlers, lifespan=self._lifespan)

    @contextlib.asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        await self.service.start()
        try:
            yield
        finally:
            await self.service.stop()

    def _route(self, path: str, method: str, handler: Handler) -> Route:
        async def handle(request: Request) -> Response:
            headers = request.headers
            if not self.tenants.have_keys and not is_own(
                headers.get("host", ""), headers.get("origin")
            ):
                raise ApiError(403, "a page of another site asks; without keys it may not")
            tenant = self.tenants.of(headers.get("authorization"))
            return await handler(self, request, tenant)

        return Route(path, handle, methods=[method])

    async def create_file(self, request: Request, tenant: Tenant) -> Response:
        """POST /v1/files: multipart with `file`, `purpose`, and `expires_after` if wanted."""
        limited = Request(request.scope, _limited(request, tenant.file_bytes + FORM_BYTES))
        try:
            form = await limited.form(max_files=1, max_fields=8)
        except (MultiPartException, HTTPException) as error:
            message = getattr(error, "message", None) or getattr(error, "detail", str(error))
            raise ApiError(400, f"the upload is no form: {message}") from None
        except ClientDisconnect:
            raise ApiError(400, "the upload broke") from None
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(form.close)
            upload, purpose = form.get("file"), form.get("purpose")
            if not isinstance(upload, UploadFile):
                raise ApiError(400, "file is not there", param="file", code="invalid_value")
            if purpose != FilePurpose.INPUT.value:
                raise forms.wrong("purpose", purpose, repr(FilePurpose.INPUT.value))
            anchor, seconds = (form.get(f"expires_after[{key}]") for key in ("anchor", "seconds"))
            life = None
            if anchor is not None or seconds is not None:
                life = forms.expires_after("expires_after", anchor, seconds)
            size = upload.size or 0
            name = (upload.filename or "file")[:255]
            file = await self.service.create_file(tenant, upload.file, size, name, life)
        return _json(file)

    async def list_files(self, request: Request, tenant: Tenant) -> Response:
        """GET /v1/files."""
        query = request.query_params
        purposes = [purpose.value for purpose in FilePurpose]
        found, more = await self.service.page(
            FileObject,
            tenant,
            limit=forms.whole(query, "limit", MOST_FILES, MOST_FILES),
            after=query.get("after"),
            label=forms.choice(query, "purpose", *purposes),
            ascending=forms.choice(query, "order", "asc", "desc") == "asc",
        )
        return _json(page(found, more=more))

    async def get_file(self, request: Request, tenant: Tenant) -> Response:
        """GET /v1/files/{id}."""
        return _json(await self.service.get(FileObject, tenant, request.path_params["id"]))

    async def delete_file(self, request: Request, tenant: Tenant) -> Response:
        """DELETE /v1/files/{id}."""
        id = request.path_params["id"]
        await self.service.delete_file(tenant, id)
        return _json({"id": id, "object": "file", "deleted": True})

    async def content(self, request: Request, tenant: Tenant) -> Response:
        """GET /v1/files/{id}/content."""
        path = await self.service.content(tenant, request.path_params["id"])
        if not path.exists():
            raise ApiError(404, "the content of the file is gone", code="not_found")
        return FileResponse(path, media_type="application/jsonl")

    async def create_batch(self, request: Request, tenant: Tenant) -> Response:
        """POST /v1/batches."""
        body = await Request(request.scope, _limited(request, MAX_BODY)).body()
        return _json(await self.service.create_batch(tenant, forms.new_batch(body)))

    async def list_batches(self, request: Request, tenant: Tenant) -> Response:
        """GET /v1/batches."""
        query = request.query_params
        limit = forms.whole(query, "limit", USUAL_BATCHES, MOST_BATCHES)
        found, more = await self.service.page(Batch, tenant, limit=limit, after=query.get("after"))
        return _json(page(found, more=more))

    async def get_batch(self, request: Request, tenant: Tenant) -> Response:
        """GET /v1/batches/{id}."""
        return _json(await self.service.get(Batch, tenant, request.path_params["id"]))

    async def cancel(self, request: Request, tenant: Tenant) -> Response:
        """POST /v1/batches/{id}/cancel."""
        return _json(await self.service.cancel(tenant, request.path_params["id"]))

    async def health(self, _request: Request) -> Response:
        """GET /health: 200 while a server answers, otherwise 503 with the reason."""
        error = self.service.servers_error
        return PlainTextResponse(f"{error or 'ok'}\n", 503 if error else 200)

    async def metrics(self, _request: Request) -> Response:
        """GET /metrics, for Prometheus."""
        return PlainTextResponse(self.service.metrics.text(), media_type=CONTENT_TYPE_LATEST)


def _limited(request: Request, most: int) -> Callable[[], Awaitable[Message]]:
    """The body of a request as it comes; raises ApiError if it has more than `most` bytes."""
    size = 0

    async def receive() -> Message:
        nonlocal size
        message = await request.receive()
        size += len(message.get("body", b""))
        if size > most:
            raise ApiError(413, f"the request has more than {most} bytes", code="too_large")
        return message

    return receive


def _json(value: object, status: int = 200) -> Response:
    return Response(encoded(value), status, media_type="application/json")


async def _refusal(_request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return _json(error.body(), error.status)


async def _failure(request: Request, error: Exception) -> Response:
    """A disk that is full, or another failure of the service itself."""
    return await _refusal(request, ApiError(503, str(error), code="unavailable"))


async def _http_error(request: Request, error: Exception) -> Response:
    """An unknown path or method, as an error of the API."""
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return await _refusal(request, ApiError(error.status_code, message))
