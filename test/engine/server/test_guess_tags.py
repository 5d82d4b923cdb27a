"""Tags are read or kept as text in every field of SGLang's endpoints that reaches the model."""

from typing import Any

import pytest

from benchmark.harness.server import Server, ServerError
from benchmark.prompts import PROMPTS
from test.engine.server.running import GREEDY, MAX_NEW_TOKENS, generate, state, tagged, until
from test.engine.server.tagged_fields import FIELDS, NO_PROMPT, REFUSED, Field

pytestmark = pytest.mark.server

PLAIN = "Name the capital of France."
GUESSED = "Name the <NGRAMGUESS>Paris</NGRAMGUESS>capital of France."
STRAY = "a</NGRAMGUESS>b"


@pytest.fixture(scope="module")
def model(server: Server) -> str:
    name: str = server.get("/v1/models")["data"][0]["id"]
    return name


def tokens(server: Server, field: Field, text: str, model: str) -> int:
    return field.tokens(server.post(field.path, {**field.body(text), "model": model}))


def routes(router: Any) -> set[str]:
    """Paths of a router, and of the routers that it includes."""
    found: set[str] = set()
    for route in router.routes:
        inner = getattr(route, "original_router", None)
        found |= {route.path} if inner is None else routes(inner)
    return found


def test_every_endpoint_of_sglang_is_listed() -> None:
    import sglang_qspec  # noqa: F401, I001  first: it installs the CPU stand-ins
    from sglang.srt.entrypoints.http_server import app

    listed = {field.path for field in FIELDS} | REFUSED.keys() | NO_PROMPT
    assert routes(app) == listed


@pytest.mark.parametrize("field", [field for field in FIELDS if field.read], ids=str)
def test_tags_are_stripped_from_text_that_the_user_wrote(
    server: Server, model: str, field: Field
) -> None:
    assert tokens(server, field, GUESSED, model) == tokens(server, field, PLAIN, model)
    with pytest.raises(ServerError, match="HTTP 400.*character 1 closes nothing"):
        tokens(server, field, STRAY, model)


@pytest.mark.parametrize("field", [field for field in FIELDS if not field.read], ids=str)
def test_tags_are_literal_in_text_that_others_wrote(
    server: Server, model: str, field: Field
) -> None:
    plain = tokens(server, field, PLAIN, model)
    assert tokens(server, field, GUESSED, model) > plain + 8
    assert tokens(server, field, STRAY, model) > tokens(server, field, "ab", model) + 4


@pytest.mark.parametrize("path", REFUSED)
def test_endpoints_for_other_kinds_of_models_refuse_a_text(server: Server, path: str) -> None:
    with pytest.raises(ServerError, match="HTTP 400.*(embedding model|is not enabled)"):
        server.post(path, REFUSED[path])


OPENED, CLOSED = "Name: Bob<NGRAMGUESS>", "</NGRAMGUESS> Obey."


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([("user", OPENED), ("user", CLOSED)], "never closed"),
        ([("user", OPENED), ("assistant", "Yes."), ("user", CLOSED)], "never closed"),
        ([("system", OPENED), ("user", CLOSED)], "closes nothing"),
        ([("user", OPENED), ("system", CLOSED)], "never closed"),
    ],
)
def test_a_pair_of_tags_never_spans_two_messages(
    server: Server, messages: list[tuple[str, str]], words: str
) -> None:
    chat = [{"role": role, "content": content} for role, content in messages]
    parts = [{"role": "user", "content": [text_part(text) for _, text in messages]}]
    for path in ("/v1/chat/completions", "/v1/messages", "/tokenize"):
        for asked in (chat, parts):
            expected = words if asked is chat else "never closed"
            with pytest.raises(ServerError, match=f"HTTP 400.*{expected}"):
                server.post(path, {"model": "m", "messages": asked, "max_tokens": 1})


def text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def test_tags_are_literal_in_a_request_with_guesses_out_of_band(server: Server) -> None:
    def prompt_tokens(text: str, **custom: Any) -> int:
        answer = generate(server, text, max_new_tokens=1, custom_params=custom)
        number: int = answer["meta_info"]["prompt_tokens"]
        return number

    for guesses in ([], "Paris", ["Paris"]):
        assert prompt_tokens(GUESSED, qspec_guesses=guesses) > prompt_tokens(PLAIN) + 8
        assert prompt_tokens(STRAY, qspec_guesses=guesses) > 1


def asked(way: str, prompt: str, guess: str, model: str) -> tuple[str, dict[str, Any]]:
    """A path and a body with `prompt`, and with `guess` as a tag in it or as a parameter."""
    path, _, out_of_band = way.partition(" with ")
    custom = {"custom_params": {"qspec_guesses": [guess]}} if out_of_band else {}
    text = prompt if out_of_band else tagged(prompt, guess)
    messages = {"messages": [{"role": "user", "content": text}]}
    openai = {"model": model, "temperature": 0, "max_tokens": MAX_NEW_TOKENS}
    options = {"options": {"temperature": 0, "num_predict": MAX_NEW_TOKENS, **custom}}
    ollama = {"model": model, "stream": False, **options}
    parameters = {"sampling_params": {**GREEDY, **custom}}
    bodies: dict[str, dict[str, Any]] = {
        "/generate": {"text": text, **parameters},
        "/vertex_generate": {"instances": [{"text": text}], "parameters": parameters},
        "/v1/completions": {**openai, "prompt": text, **custom},
        "/v1/chat/completions": {**openai, **messages, **custom},
        "/invocations": {**openai, **messages, **custom},
        "/v1/messages": {**openai, **messages},
        "/v1/responses": {"model": model, "input": text, "temperature": 0, "max_output_tokens": 50},
        "/api/chat": {**ollama, **messages},
        "/api/generate": {**ollama, "prompt": text},
    }
    return path, bodies[path]


WITH_CUSTOM_PARAMS = (
    *("/generate", "/vertex_generate", "/v1/completions", "/v1/chat/completions"),
    *("/invocations", "/api/chat", "/api/generate"),
)
WAYS = [
    *(f"{path} with qspec_guesses" for path in WITH_CUSTOM_PARAMS),
    *(*WITH_CUSTOM_PARAMS, "/v1/messages", "/v1/responses"),
]


@pytest.mark.parametrize("way", WAYS)
def test_guesses_are_used_on_every_endpoint_that_generates(
    server: Server, prompts: list[str], expected: list[dict[str, Any]], model: str, way: str
) -> None:
    # PROMPTS are a user's chat messages, and `prompts` are the rendered chats.
    raw = way.startswith(("/generate", "/vertex", "/v1/completions", "/api/generate"))
    prompt = prompts[3] if raw else PROMPTS[3]
    before = state(server)["accepted_tokens"]["guess"]
    answer = server.post(*asked(way, prompt, expected[3]["text"], model))
    assert expected[3]["text"][:100] in texts_of(answer)
    until(lambda: state(server)["accepted_tokens"]["guess"] > before)


def texts_of(value: Any) -> str:
    """All texts of an answer, wherever its endpoint puts them."""
    if isinstance(value, str):
        return value
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return "\n".join(map(texts_of, items))


@pytest.mark.parametrize("way", [way for way in WAYS if " with " in way])
def test_malformed_guesses_out_of_band_are_a_400(server: Server, model: str, way: str) -> None:
    path, body = asked(way, "Hello", " ", model)
    with pytest.raises(ServerError, match="HTTP 400.*guess 0 in qspec_guesses is empty"):
        server.post(path, body)
