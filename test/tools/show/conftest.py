"""One browser for all tests of the page."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from test.tools.show.browser import Page, chromium


@pytest.fixture(scope="session")
def downloads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that has the browser's profile, and its downloads in `downloads`."""
    return tmp_path_factory.mktemp("chromium")


@pytest.fixture(scope="session")
def page(downloads: Path) -> Iterator[Page]:
    with chromium(downloads) as driver:
        yield Page(driver)
