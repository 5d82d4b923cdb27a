"""What a request asks of speculation. It was checked when the request came in; here it is read."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from sglang_qspec import controls
from sglang_qspec.config import QSpecConfig
from sglang_qspec.controls import Controls
from sglang_qspec.errors import GuessError, RequestError
from sglang_qspec.guess import GUESS_IDS_KEY, read_guess_ids

logger = logging.getLogger(__name__)


def read_controls(custom_params: Mapping[str, Any] | None, settings: QSpecConfig) -> Controls:
    """Its controls; those of the server where they are malformed all the same."""
    try:
        return controls.read(custom_params, settings)
    except RequestError as error:
        logger.warning("Ignored the controls of a request: %s", error)
        return controls.of_server(settings)


def read_guesses(custom_params: Mapping[str, Any] | None, vocab_size: int) -> list[list[int]]:
    """Its guesses as token ids; none where they are malformed all the same.

    They are not counted here: a text guess comes in two spacings, and the caps are on what the
    client sent.
    """
    value = (custom_params or {}).get(GUESS_IDS_KEY)
    if value is None:
        return []
    try:
        return read_guess_ids(value, vocab_size)
    except GuessError as error:
        logger.warning("Ignored the guesses of a request: %s", error)
        return []
