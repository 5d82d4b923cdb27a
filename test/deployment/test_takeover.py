"""What a client can change without the admin key at the documented router and the servers behind.

SECURITY.md has these facts. If a test fails after an upgrade of the router or SGLang, change it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from test.deployment.manifests import Document, compose, container, read_router, read_server
from test.deployment.recording_server import RecordingServer
from test.deployment.router import Router
from test.engine.server.running import until

KEY = "b3c1f0"
BEARER = {"Authorization": f"Bearer {KEY}"}
NOBODY = "00000000-0000-0000-0000-000000000000"
CONTROL = """
POST /workers, GET /workers, GET /workers/{id}, PUT /workers/{id}, DELETE /workers/{id},
POST /wasm, GET /wasm, DELETE /wasm/{id},
POST /v1/tokenizers, GET /v1/tokenizers, GET /v1/tokenizers/{id}, DELETE /v1/tokenizers/{id},
GET /v1/tokenizers/{id}/status, POST /flush_cache, GET /get_loads,
POST /parse/function_call, POST /parse/reasoning
"""
"""The paths of the router that need the key."""
CLUSTER = """
GET /ha/status, GET /ha/health, GET /ha/workers, GET /ha/workers/{id}, GET /ha/policies,
GET /ha/policies/{id}, GET /ha/config/{id}, GET /ha/rate-limit, GET /ha/rate-limit/stats,
POST /ha/shutdown
"""
"""Paths of a cluster of routers, which the key does not protect. They do nothing without one."""
PUBLIC = """
GET /liveness, GET /readiness, GET /health, GET /health_generate, GET /engine_metrics,
GET /v1/models, GET /get_model_info, GET /get_server_info
"""
"""Paths that show something to every client."""
OPEN_AT_SERVER = """
/ /api/chat /api/generate /api/show /api/tags /classify /close_session /detokenize /docs
/docs/oauth2-redirect /encode /generate /get_hicache_l3_cache_layout /get_model_info
/get_server_info /health /health_generate /invocations /is_scaling_elastic_ep /model_info
/open_session /openapi.json /parse_function_call /ping /ready /redoc /scale_elastic_ep
/separate_reasoning /server_info /tokenize /v1/audio/transcriptions /v1/chat/completions
/v1/classify /v1/completions /v1/decisions /v1/detokenize /v1/embeddings /v1/loads /v1/messages
/v1/messages/count_tokens /v1/models /v1/models/{model:path} /v1/rerank /v1/responses
/v1/responses/{response_id} /v1/responses/{response_id}/cancel /v1/score /v1/systemone /v1/tokenize
/vertex_generate
"""
"""SGLang's endpoints that need no admin key. SGLang means to protect the two of elastic_ep."""


def listed(text: str) -> list[tuple[str, str]]:
    """Methods and paths, with an id that nothing has."""
    asked = [entry.split() for entry in text.replace("{id}", NOBODY).split(",")]
    return [(method, path) for method, path in asked]


def filled(arguments: list[str]) -> list[str]:
    """Arguments of a file, with the key that Compose or Kubernetes fills in."""
    return [re.sub(r"\$\{QSPEC_ADMIN_KEY:\?.*\}|\$\(QSPEC_ADMIN_KEY\)", KEY, a) for a in arguments]


FILES: dict[str, Callable[[str], list[str]]] = {
    "compose": lambda name: filled(compose()["services"][name]["command"]),
    "kubernetes": lambda name: filled(container(name.removesuffix("-0"))["args"]),
}
PROTECTION = ("--control-plane-api-keys=", "--history-backend=", "--disable-circuit-breaker")


def protection() -> list[str]:
    """The flags of the router that keep clients off its control plane, which both files have."""
    compose, kubernetes = (
        [flag for flag in arguments("router") if flag.startswith(PROTECTION)]
        for arguments in FILES.values()
    )
    assert sorted(compose) == sorted(kubernetes)
    return compose


@pytest.fixture(scope="module")
def stack() -> Iterator[ExitStack]:
    with ExitStack() as running:
        yield running


@pytest.fixture(scope="module")
def server(stack: ExitStack) -> RecordingServer:
    return stack.enter_context(RecordingServer())


@pytest.fixture(scope="module")
def attacker(stack: ExitStack) -> RecordingServer:
    """A server of the attacker, who wants the prompts of other clients."""
    return stack.enter_context(RecordingServer())


@pytest.fixture(scope="module")
def router(server: RecordingServer) -> Iterator[Router]:
    with Router([server.url], *protection()) as running:
        yield running


def urls(router: Router) -> set[str]:
    """The addresses of the servers that the router knows."""
    workers: list[Document] = router.ask("GET", "/workers", headers=BEARER).json()["workers"]
    return {worker["url"] for worker in workers}


def take_over(router: Router, attacker: RecordingServer, **options: Any) -> None:
    """Try to replace the servers of the router by the attacker's."""
    router.ask("POST", "/workers", json={"url": attacker.url}, **options)
    listing = router.ask("GET", "/workers", **options)
    for worker in listing.json()["workers"] if listing.status_code == 200 else ():
        if worker["url"] != attacker.url:
            router.ask("DELETE", f"/workers/{worker['id']}", **options)


def test_without_the_flags_a_client_gets_the_prompts_of_all_others(
    server: RecordingServer, attacker: RecordingServer
) -> None:
    with Router([server.url], "--disable-circuit-breaker") as router:
        take_over(router, attacker)
        until(lambda: urls(router) == {attacker.url})
        attacker.bodies.clear()
        assert router.post("/generate", {"text": "a secret"}).status_code == 200
        assert [body["text"] for body in attacker.bodies] == ["a secret"]


@pytest.mark.parametrize("options", [{}, {"headers": {"Authorization": f"Bearer {KEY[:-1]}"}}])
def test_a_client_without_the_key_takes_over_nothing(
    router: Router, server: RecordingServer, attacker: RecordingServer, options: dict[str, Any]
) -> None:
    attacker.asked.clear()
    take_over(router, attacker, **options)
    for method, path in listed(CONTROL):
        assert router.ask(method, path, json={}, **options).status_code == 401, path
    assert urls(router) == {server.url}
    server.bodies.clear()
    assert router.post("/generate", {"text": "a secret"}).status_code == 200
    assert [body["text"] for body in server.bodies] == ["a secret"]
    assert not attacker.asked


def test_the_operator_has_the_key(router: Router, server: RecordingServer) -> None:
    assert urls(router) == {server.url}
    assert router.ask("POST", "/flush_cache", headers=BEARER).status_code == 200


def test_what_a_client_without_the_key_sees_is_documented(router: Router) -> None:
    assert {router.ask(*asked).status_code for asked in listed(PUBLIC)} == {200}
    assert {router.ask(*asked).status_code for asked in listed(CLUSTER)} == {503}


def test_the_router_keeps_no_conversation(router: Router) -> None:
    """By default it keeps all of them in its memory, for ever."""
    made = router.post("/v1/conversations", {"metadata": {"a": "b"}}).json()["id"]
    assert router.get(f"/v1/conversations/{made}").status_code == 404


def test_a_client_reaches_paths_of_the_server_that_the_router_does_not_have(
    router: Router, server: RecordingServer
) -> None:
    """The router does not quote the number of an answer, so servers need a key of their own."""
    for method, end in (("GET", ""), ("POST", "%23/cancel")):
        server.asked.clear()
        router.ask(method, f"/v1/responses/..%2F..%2Fpause_generation{end}")
        assert f"{method} /pause_generation" in server.asked


@pytest.mark.parametrize("file", FILES)
def test_servers_and_router_have_the_key(file: str) -> None:
    (entry,) = read_router(FILES[file]("router")).control_plane_api_keys
    assert entry == f"operator:operator:admin:{KEY}"
    assert read_server(FILES[file]("server-0")).admin_api_key == KEY


def test_the_key_protects_every_endpoint_of_a_server_that_changes_it() -> None:
    from sglang.srt.entrypoints.http_server import app
    from sglang.srt.utils.auth import _get_auth_level_from_app_and_scope, decide_request_auth

    def is_open(method: str, path: str) -> bool:
        scope = {"type": "http", "method": method, "path": path, "root_path": "", "headers": []}
        return decide_request_auth(
            method=method,
            path=path,
            authorization_header=None,
            api_key=None,
            admin_api_key=KEY,
            auth_level=_get_auth_level_from_app_and_scope(app, scope),
        ).allowed

    asked = {
        (method, route.path)
        for router in (app, *(found.original_router for found in included(app)))
        for route in router.routes
        for method in getattr(route, "methods", None) or ()
        if method != "HEAD"
    }
    assert len(asked) > 100
    opened = {path for method, path in asked if is_open(method, path)}
    assert opened == set(OPEN_AT_SERVER.split())


def included(app: Any) -> list[Any]:
    """The routers that are a part of an app."""
    return [route for route in app.routes if hasattr(route, "original_router")]
