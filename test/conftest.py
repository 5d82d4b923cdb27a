"""Supplies all tests with SGLang on a CPU and the demo models, and selects the tests to run."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

if shutil.which("nvidia-smi") is None:
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

from sglang_qspec.tools.models import DemoModels, demo_models

WORKER = os.environ.get("PYTEST_XDIST_WORKER")
"""Name of this worker of pytest-xdist: gw0, gw1, ..."""
ROOT = Path(__file__).parents[1]
SHARING = {ROOT / "test" / "engine" / name for name in ("server", "features", "external", "reject")}
"""Folders whose tests share a server."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="no test with a server or a model")
    parser.addoption("--thorough", action="store_true", help="also tests that take minutes each")
    parser.addoption("--device", default="cpu", help="cuda: compare it with the CPU (gpu-check)")
    parser.addoption("--slow", metavar="WHO=FACTOR", help="target=5: slower passes; sidecar=5")


def pytest_configure(config: pytest.Config) -> None:
    pytest.register_assert_rewrite("test.engine.contract", "test.engine.load")
    # An example takes as long as the machine's other work lets it.
    examples = settings().max_examples * (100 if config.getoption("--thorough") else 1)
    settings.register_profile("untimed", settings(), max_examples=examples, deadline=None)
    settings.load_profile("untimed")
    if config.getoption("--slow"):
        os.environ["QSPEC_TEST_SLOW"] = config.getoption("--slow")
        paths = [str(Path(__file__).with_name("slow")), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write the reason of a skipped test to the file that `scripts/test` shows at its end."""
    path = None if WORKER else os.environ.get("QSPEC_TEST_SKIPPED")
    if path and report.skipped and isinstance(report.longrepr, tuple):
        with Path(path).open("a") as skipped:
            skipped.write(report.longrepr[2].removeprefix("Skipped: ") + "\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    left_out = {item for item in items if _is_left_out(config, item)}
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    # Servers first: the short files of the others fill the time until both workers end.
    items[:] = sorted(items, key=lambda item: not item.get_closest_marker("server"))
    items[:] = [item for item in items if item not in left_out]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Let the tests of one server, or of one file, run in one worker."""
    from xdist.scheduler import LoadScopeScheduling

    scheduler = LoadScopeScheduling(config, log)
    scheduler._split_scope = group
    return scheduler


def group(nodeid: str) -> str:
    """The tests with the same group run one after the other in one worker, and share fixtures."""
    path = Path(nodeid.partition("::")[0])
    return str(path.parent if ROOT / path.parent in SHARING else path)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """In a worker a test has one thread; a server has as many as it has cores."""
    if WORKER and item.get_closest_marker("server"):
        os.environ.pop("OMP_NUM_THREADS", None)
    elif WORKER:
        os.environ["OMP_NUM_THREADS"] = "1"


def _is_left_out(config: pytest.Config, item: pytest.Item) -> bool:
    if item.get_closest_marker("thorough") and not config.getoption("--thorough"):
        return True
    heavy = item.get_closest_marker("server") or "models" in getattr(item, "fixturenames", ())
    return bool(heavy) and bool(config.getoption("--fast"))


@pytest.fixture
def device(pytestconfig: pytest.Config) -> Any:
    """The torch device that a test compares with the CPU; the CPU itself by default."""
    import torch

    return torch.device(pytestconfig.getoption("--device"))


@pytest.fixture(scope="session")
def models() -> DemoModels:
    """SmolLM2-135M-Instruct and its 8-bit draft for this machine's device, converted once."""
    return demo_models(on_cuda=shutil.which("nvidia-smi") is not None)
