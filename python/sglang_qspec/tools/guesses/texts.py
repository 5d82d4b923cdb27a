"""The text of a prompt, and the texts of an answer, in the formats of OpenAI's endpoints."""

from __future__ import annotations

from typing import Any

from sglang_qspec.tools.guesses.guess import Guess, guess_of


def prompt_in(body: Any) -> str:
    """The text of a request's prompt or messages; empty if there is none.

    Token ids become words, and the parts of a message that are no texts are left out.
    """
    if not isinstance(body, dict):
        return ""
    messages = body.get("messages")
    if isinstance(messages, list):
        contents = (each.get("content") for each in messages if isinstance(each, dict))
        return "\n".join(filter(None, map(_content, contents)))
    return _content(body.get("prompt"))


def _content(value: Any) -> str:
    """The text of a prompt, or of the content of a message."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict):
        return _content(value.get("text"))
    if isinstance(value, list):
        return " ".join(map(_content, value))
    return str(value) if isinstance(value, int) else ""


def answers_in(body: Any) -> list[Guess]:
    """The texts of a decoded answer as guesses, those of each choice; blank ones are left out.

    The output tokens of all choices are divided by the lengths of the texts.
    """
    choices = body.get("choices") if isinstance(body, dict) else None
    texts: list[str] = []
    for choice in choices if isinstance(choices, list) else ():
        if isinstance(choice, dict):
            message = choice.get("message")
            fields = message if isinstance(message, dict) else choice
            values = (fields.get(name) for name in ("text", "reasoning_content", "content"))
            texts += [value for value in values if isinstance(value, str) and value.strip()]
    usage = body.get("usage") if isinstance(body, dict) else None
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else 0
    length = sum(map(len, texts))
    if not isinstance(tokens, int) or not 0 < tokens <= length:
        return [guess_of(text) for text in texts]
    return [guess_of(text, -(-tokens * len(text) // length)) for text in texts]
