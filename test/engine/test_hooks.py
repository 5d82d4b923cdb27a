"""Each hooked SGLang function has its own hook, with the guard that the hook needs."""

import asyncio
import inspect
import logging
import pkgutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from fastapi import HTTPException
from sglang.srt.plugins.hook_registry import HookRegistry, HookType, _wrap_fn

from sglang_qspec.engine import plugin, speculation
from sglang_qspec.engine.boundary import installed
from sglang_qspec.engine.boundary.guard import guarded_hook
from sglang_qspec.engine.boundary.hook import Hook, OnError
from sglang_qspec.engine.speculator import Speculator
from sglang_qspec.engine.start import hooks
from sglang_qspec.errors import ConfigError, RequestError

ROWS = (*hooks.front(), *hooks.scheduler())
GUARDED = tuple(row for row in ROWS if row.on_error is not OnError.STOP_START)


def name(row: Hook) -> str:
    return f"{row.function.__module__.rpartition('.')[2]}.{row.function.__name__}"


@pytest.mark.parametrize("row", ROWS, ids=name)
def test_a_hooks_docstring_names_its_target_and_its_signature_fits(row: Hook) -> None:
    """This finds rows of the table that are mixed up."""
    first_line = inspect.getdoc(row.function) or ""
    method = row.target.rpartition(".")[2]
    assert first_line.split(",")[0].startswith(row.kind.value.capitalize())
    assert method in first_line.split(":")[0].split(",")[0]
    resolved = pkgutil.resolve_name(row.target)
    target = inspect.unwrap(getattr(resolved, "__func__", resolved))
    given = list(inspect.signature(target).parameters)
    if row.kind is not HookType.BEFORE:
        given.insert(0, "result or target")
    inspect.signature(row.function).bind(*given)
    if row.kind is HookType.AROUND:
        # A hook is a coroutine exactly if its target is one.
        assert inspect.iscoroutinefunction(row.function) == inspect.iscoroutinefunction(target)


def test_no_two_rows_share_a_hook() -> None:
    assert len({row.function for row in ROWS}) == len(ROWS)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's hook registry, empty as in a new process."""
    monkeypatch.setattr(HookRegistry, "_hooks", HookRegistry._hooks.copy())
    monkeypatch.setattr(HookRegistry, "_patched", set())
    HookRegistry._hooks.clear()


@pytest.mark.usefixtures("registry")
def test_the_plugin_registers_each_hook_on_its_target_and_the_start_checks_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(installed, "_tables", {})
    plugin._install("scheduler")
    rows = hooks.scheduler()
    HookRegistry._patched.update(row.target for row in rows)
    installed.check("scheduler")
    first, second = rows[0], rows[1]
    swapped = (replace(first, target=second.target), replace(second, target=first.target))
    for row in swapped:
        monkeypatch.setitem(installed._tables, "scheduler", (row,))
        with pytest.raises(
            ConfigError, match=f"is not wrapped with the hook {row.function.__name__} of"
        ):
            installed.check("scheduler")
    monkeypatch.setitem(installed._tables, "scheduler", rows)
    HookRegistry._patched.discard(first.target)
    with pytest.raises(ConfigError, match=r"_add_request_to_queue is not wrapped"):
        installed.check("scheduler")


class OurError(Exception):
    """A bug of ours."""


class SglangError(Exception):
    """An error of SGLang's."""


@pytest.fixture
def active() -> Iterator[Speculator]:
    """A speculator without attributes; the tests only ask whether it is active."""
    broken = object.__new__(Speculator)
    speculation.activate(broken)
    yield broken
    speculation.deactivate()


def failing(row: Hook, error: Exception, *, calls: int = 0) -> Hook:
    """The row with a hook that raises `error`, an AROUND hook after `calls` calls of its target."""
    if inspect.iscoroutinefunction(row.function):

        async def function(target: Callable[..., Any], *args: Any) -> None:
            for _ in range(calls):
                await target(*args)
            raise error

    else:

        def function(target: Callable[..., Any], *args: Any) -> None:  # type: ignore[misc]
            for _ in range(calls if row.kind is HookType.AROUND else 0):
                target(*args)
            raise error

    return replace(row, function=function)


class Target:
    """A hooked function that counts its calls."""

    def __init__(self, row: Hook, error: Exception | None = None) -> None:
        self.calls = 0
        self._error = error
        self._waits = inspect.iscoroutinefunction(row.function)

    def __call__(self, *args: Any) -> Any:
        self.calls += 1
        if self._waits:
            return self._wait(args)
        return self._answer(args)

    async def _wait(self, args: Any) -> Any:
        await asyncio.sleep(0)
        return self._answer(args)

    def _answer(self, args: Any) -> Any:
        if self._error is not None:
            raise self._error
        return self.calls, args


def run(row: Hook, target: Target) -> Any:
    """Call the target with the row's hook installed, as SGLang does."""
    wrapped = _wrap_fn(target.__call__, guarded_hook(row), row.kind)
    answer = wrapped(5, "a")
    return asyncio.run(answer) if inspect.iscoroutine(answer) else answer


@pytest.mark.usefixtures("active")
@pytest.mark.parametrize("row", GUARDED, ids=name)
def test_an_error_in_a_hook_leaves_sglangs_own_result(
    row: Hook, caplog: pytest.LogCaptureFixture
) -> None:
    for calls in (0, 1, 2) if row.kind is HookType.AROUND else (0,):
        target = Target(row)
        broken = failing(row, OurError("a fault"), calls=calls)
        assert run(broken, target) == (1, (5, "a"))
        assert target.calls == max(calls, 1)
    ends = row.on_error is OnError.END_SPECULATION
    assert (speculation.active() is None) == ends
    assert row.target.rpartition(".")[2] in caplog.messages[0]
    assert row.on_error is not OnError.SKIP or row.on_error.value in caplog.messages[0]
    info = caplog.records[0].exc_info
    assert info is not None
    assert isinstance(info[1], OurError)


@pytest.mark.parametrize("row", GUARDED, ids=name)
def test_an_error_of_sglang_passes_through_a_hook_unchanged(row: Hook) -> None:
    error = SglangError("its own")
    target = Target(row, error)
    if row.kind is HookType.AROUND:
        broken = failing(row, OurError("never reached"), calls=1)
    else:
        broken = replace(row, function=lambda *_: None)
    with pytest.raises(SglangError) as raised:
        run(broken, target)
    assert raised.value is error
    assert target.calls == 1


@pytest.mark.parametrize("row", [row for row in ROWS if row.kind is HookType.AROUND], ids=name)
def test_an_error_of_ours_does_not_hide_one_of_sglang(row: Hook) -> None:
    row = replace(row, on_error=OnError.SKIP)
    error = SglangError("its own")

    def function(target: Callable[..., Any], *args: Any) -> None:
        try:
            target(*args)
        finally:
            raise OurError("while the other is handled")

    async def waiting(target: Callable[..., Any], *args: Any) -> None:
        try:
            await target(*args)
        finally:
            raise OurError("while the other is handled")

    target = Target(row, error)
    waits = inspect.iscoroutinefunction(row.function)
    with pytest.raises(SglangError) as raised:
        run(replace(row, function=waiting if waits else function), target)
    assert raised.value is error
    assert target.calls == 1


@pytest.mark.parametrize("row", [row for row in ROWS if row.deliberate], ids=name)
def test_a_refusal_of_a_request_passes_through_its_guard(row: Hook) -> None:
    (kind,) = row.deliberate
    error = HTTPException(400, "a wrong value") if kind is HTTPException else kind("a wrong value")
    with pytest.raises(kind) as raised:
        run(failing(row, error), Target(row))
    assert raised.value is error


def test_the_hooks_that_refuse_requests_are_those_that_read_them() -> None:
    refusing = {name(row): row.deliberate for row in ROWS if row.deliberate}
    assert refusing == {
        "prompts.engine_generate": (RequestError,),
        "prompts.engine_async_generate": (RequestError,),
        "prompts.convert_completion": (RequestError,),
        "prompts.generate": (RequestError,),
        "prompts.tokenized": (RequestError,),
        "chats.process_messages": (RequestError,),
        "chats.convert_chat": (RequestError,),
        "chats.convert_anthropic": (RequestError,),
        "internal_state.check_update": (HTTPException,),
    }


@pytest.mark.parametrize("row", [r for r in ROWS if r.on_error is OnError.STOP_START], ids=name)
def test_an_error_at_the_start_stops_it(row: Hook) -> None:
    for error in (ConfigError("a wrong setting"), OurError("a fault"), SystemExit(2)):
        with pytest.raises(type(error)) as raised:
            run(failing(row, error), Target(row))  # type: ignore[arg-type]
        assert raised.value is error


def test_a_hook_that_fails_at_each_request_is_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    row = next(row for row in ROWS if row.function.__name__ == "correct_rates")
    guarded = guarded_hook(failing(row, OurError("a fault")))
    with caplog.at_level(logging.INFO):
        for _ in range(3):
            assert guarded("its result") is None
    (record,) = caplog.records
    assert record.levelno == logging.ERROR
    assert "_calculate_spec_decoding_metrics" in record.message


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, asyncio.CancelledError])
def test_exceptions_that_end_a_program_or_a_task_pass_through_the_guard(
    kind: type[BaseException],
) -> None:
    def ended(*_: Any) -> None:
        raise kind

    row = next(row for row in ROWS if row.function.__name__ == "correct_rates")
    with pytest.raises(kind):
        guarded_hook(replace(row, function=ended))()
