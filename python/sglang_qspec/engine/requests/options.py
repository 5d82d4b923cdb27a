"""Reads the options of a request in the scheduler. The frontend has checked them before."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from sglang_qspec import controls
from sglang_qspec.config import QSpecConfig
from sglang_qspec.controls import Controls
from sglang_qspec.errors import RequestError
from sglang_qspec.guess_tags import GUESS_IDS_KEY, read_guess_ids

logger = logging.getLogger(__name__)


def read_controls(custom_params: Mapping[str, Any] | None, settings: QSpecConfig) -> Controls:
    """The controls of a request. Malformed ones are logged, and the server's controls apply."""
    try:
        return controls.read(controls.as_object(custom_params), settings)
    except RequestError as error:
        logger.warning("Ignored the controls of a request: %s", error)
        return controls.of_server(settings)


def read_guesses(custom_params: Mapping[str, Any] | None, vocab_size: int) -> list[list[int]]:
    """The guesses of a request as token ids. Malformed ones are logged and dropped.

    The caps are not checked here: they apply to what the client sent, and the frontend turns each
    text guess into two lists of token ids.
    """
    try:
        value = controls.as_object(custom_params).get(GUESS_IDS_KEY)
        return [] if value is None else read_guess_ids(value, vocab_size)
    except RequestError as error:
        logger.warning("Ignored the guesses of a request: %s", error)
        return []
