"""Gets the right answer to each template from a target that verifies no drafts."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmark.harness.server import Server, ServerError
from benchmark.soak.answers import Answer, whole
from benchmark.soak.asking import ask
from benchmark.soak.templates import Template

AT_ONCE = 2
"""Requests in flight. With so few, SGLang retracts none, even with a small KV pool.

Requests with penalties run alone, because SGLang's penalties may depend on the batch.
"""
PLAINLY = {"qspec_enabled": False}
"""`custom_params` of a request that QSPEC decodes without drafts."""


def gather(
    server: Server, templates: Iterable[Template], custom: dict[str, Any] | None = None
) -> dict[int, Answer]:
    """The answers to the templates, by number. Raises ServerError if an answer is missing."""

    def answer(template: Template) -> Answer:
        body = template.body(template.text, custom or {})
        response = ask(server, template.path, body)
        if response.error is not None or response.status != 200:
            told = f"{response.status}, {response.error or response.data}"
            raise ServerError(f"no reference for template {template.number}: {told}")
        return whole(template.path, response.data)

    asked = sorted(templates, key=lambda template: template.penalised)
    together = [template for template in asked if not template.penalised]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = list(pool.map(answer, together))
    found += map(answer, asked[len(together) :])
    return {t.number: own for t, own in zip(asked, found, strict=True) if t.number is not None}
