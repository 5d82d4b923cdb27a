"""Strips `<NGRAMGUESS>` tags from the texts of a request that the setting `guess_tags` selects.

A tag pair lies within one text: a prompt, a message, or a text part of a message. So a tag never
removes text of another field and never makes another field malformed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sglang_qspec import config
from sglang_qspec.engine.frontend import guesses
from sglang_qspec.guess_tags import GUESSES_KEY, GuessLimits, split

_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
"""Types of content parts with a `text`: OpenAI's chat, Anthropic's, and /v1/responses'."""


class TagReader:
    """Strips tags from the texts of one request, and collects the guesses."""

    def __init__(self, where: str, limits: GuessLimits) -> None:
        """`where` is the setting `guess_tags`, but not `off`."""
        self.everywhere = where == "everywhere"
        self.guesses: list[str] = []
        self._limits = limits

    def text(self, text: str) -> str:
        """A text of the user without its tags. Raises GuessError."""
        rest, found = split(text, self._limits)
        self.guesses += found
        return rest

    def other(self, content: Any) -> Any:
        """Content of others than the user, such as a system prompt; stripped if `everywhere`."""
        return self._content(content) if self.everywhere else content

    def messages(self, messages: Iterable[Any]) -> list[Any]:
        """Chat messages, objects or dicts, without tags; a message without tags is not copied."""
        return [self._message(message) for message in messages]

    def _message(self, message: Any) -> Any:
        if not self.everywhere and _field(message, "role") != "user":
            return message
        # Tool results are in `content` in chats and in `output` in /v1/responses.
        for name in ("content", "output"):
            message = self._changed(message, name, self._content)
        return message

    def _content(self, content: Any) -> Any:
        if isinstance(content, str):
            return self.text(content)
        if isinstance(content, list):
            return [self._part(part) for part in content]
        return content

    def _part(self, part: Any) -> Any:
        if _field(part, "type") in _TEXT_PARTS:
            return self._changed(part, "text", self._content)
        # Anthropic's tool and search results are blocks of a user message that others wrote.
        return self._changed(part, "content", self._content) if self.everywhere else part

    def _changed(self, owner: Any, name: str, read: Any) -> Any:
        """`owner`, or a copy without tags if the field `name` has tags."""
        before = len(self.guesses)
        value = read(_field(owner, name))
        if len(self.guesses) == before:
            return owner
        if isinstance(owner, dict):
            return {**owner, name: value}
        return owner.model_copy(update={name: value})


def reader(manager: Any, custom_params: Any) -> TagReader | None:
    """A reader for one request; None if its tags are literal text.

    Tags are literal on a server without QSPEC, with `guess_tags` off, and in a request that has
    `qspec_guesses` in its `custom_params`.
    """
    if not config.is_qspec(manager.server_args) or guesses.settings().guess_tags == "off":
        return None
    if isinstance(custom_params, dict) and custom_params.get(GUESSES_KEY) is not None:
        return None
    return TagReader(guesses.settings().guess_tags, guesses.limits())


def _field(owner: Any, name: str) -> Any:
    return owner.get(name) if isinstance(owner, dict) else getattr(owner, name, None)
