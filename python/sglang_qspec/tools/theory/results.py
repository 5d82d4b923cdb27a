"""The results.json that `benchmark.bench_peers --pipelines` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec

from sglang_qspec.errors import TheoryError

PLAIN = ("none", "plain")
"""Names of the pipeline without drafts."""

Count = Annotated[int, msgspec.Meta(ge=1)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class Result(msgspec.Struct, frozen=True):
    """A measurement of one pipeline with one k and one number of requests in flight."""

    pipeline: str
    k: Count | None
    """Maximum number of draft tokens of a request in a pass; None, or ignored, without drafts."""
    in_flight: Count
    tokens_per_s: Annotated[float, msgspec.Meta(gt=0)]
    """Throughput of all requests together."""
    accept_len: NotNegative | None = None
    """Accept length: tokens of one request per pass; None or 0 if not measured."""
    verify_s: NotNegative | None = None
    """V: seconds of a pass without waits; None or 0 if not measured."""
    draft_s: NotNegative | None = None
    """D: seconds of drafting for one pass; None or 0 if not measured."""
    step_tokens: Annotated[int, msgspec.Meta(ge=0)] | None = None
    """Maximum length of a draft after the committed tokens; None or 0 means 2k + 1."""

    @property
    def draft_tokens(self) -> int:
        """`k`, or 0 without drafts."""
        return 0 if self.pipeline in PLAIN else self.k or 0


class _File(msgspec.Struct):
    rows: Annotated[list[Result], msgspec.Meta(min_length=1)]


def read_results(path: Path) -> list[Result]:
    """Read a results.json. Raises TheoryError that names the file, the field and what is wrong."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=_File).rows
    except OSError as error:
        raise TheoryError(f"{path} cannot be read: {error}") from None
    except ValueError as error:  # msgspec's errors too
        raise TheoryError(f"{path} has no results: {error}") from None
