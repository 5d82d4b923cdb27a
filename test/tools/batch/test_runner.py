"""The run of a batch over scripted servers: depth, order, retries, lost servers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace

import pytest

from sglang_qspec.errors import BatchError, ClientError, ServerLostError
from sglang_qspec.tools.batch import pool, runner
from sglang_qspec.tools.batch.line import Line
from sglang_qspec.tools.batch.line_guesses import LineGuesses
from sglang_qspec.tools.batch.partial import Partials
from sglang_qspec.tools.batch.pool import LINES_AHEAD
from sglang_qspec.tools.batch.runner import Runner
from sglang_qspec.tools.batch.server import Reply, ReplyKind
from test.tools.batch.scripted import ANSWERED, Input, Kept, ScriptedServer, line_of

PROMPTS = [f"prompt {i}" for i in range(1000)]


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "PAUSE_S", 0.001)
    monkeypatch.setattr(runner, "LONGEST_PAUSE_S", 0.004)
    monkeypatch.setattr(runner, "LONGEST_ABSENCE_S", 0.004)


def ran(servers: list[ScriptedServer], prompts: list[str], *, permanent: int | None = None) -> Kept:
    kept = Kept()
    run = Runner(servers, kept, permanent=permanent)
    asyncio.run(asyncio.wait_for(run.run(aiter(Input(prompts))), 60))
    kept.assert_once(prompts)
    assert all(server.closed and not server.now for server in servers)
    return kept


def test_a_line_that_is_asked_again_gets_its_text_as_a_guess_until_it_is_settled() -> None:
    failed = Reply(ReplyKind.FAILED, reason="no")
    fails = iter((failed, ANSWERED, failed, failed, failed))
    server = ScriptedServer(depth=1, reply=lambda _line: next(fails))
    partials = Partials(None)
    kept = Kept()
    run = Runner([server], kept, LineGuesses(partials))
    asyncio.run(asyncio.wait_for(run.run(aiter(Input(["a", "b"]))), 60))
    assert server.guesses == {
        "a": [[], ["text 1 of a"]],
        "b": [[], ["text 1 of b"], ["text 2 of b"]],
    }
    assert kept.failed == {"b": "no"}
    assert [partials.find(line_of(n, name)) for n, name in ((1, "a"), (2, "b"))] == [None, None]


@pytest.mark.parametrize("count", [0, 1, 3, 1000])
def test_every_line_is_answered_once(count: int) -> None:
    server = ScriptedServer()
    assert sorted(ran([server], PROMPTS[:count]).answered) == sorted(PROMPTS[:count])


def test_one_server_is_asked_in_the_order_of_the_input_at_its_depth() -> None:
    server = ScriptedServer(depth=7, seconds=0.0005)
    ran([server], PROMPTS)
    assert server.asked == PROMPTS
    assert server.most == 7


def test_a_server_gets_no_more_lines_than_it_has_room_for() -> None:
    server = ScriptedServer(depth=8, seconds=0.0005)
    kept = Kept()
    run = Runner([server], kept)
    run.limit(server.name, 2)

    async def grow() -> None:
        task = asyncio.create_task(run.run(aiter(Input(PROMPTS))))
        while len(server.asked) < 100:
            await asyncio.sleep(0)
        assert server.most == 2
        run.limit(server.name, 5)
        await asyncio.wait_for(task, 60)

    asyncio.run(grow())
    kept.assert_once(PROMPTS)
    assert server.most == 5


def test_a_line_that_makes_room_is_asked_again_however_often() -> None:
    left = Counter(dict.fromkeys(PROMPTS[:9], 2 * runner.ATTEMPTS))

    def reply(line: Line) -> Reply:
        left[line.custom_id] -= 1
        return Reply(ReplyKind.YIELDED) if left[line.custom_id] >= 0 else ANSWERED

    assert sorted(ran([ScriptedServer(reply=reply)], PROMPTS[:9]).answered) == PROMPTS[:9]


def test_lines_are_read_only_a_bounded_number_ahead() -> None:
    async def most_ahead() -> int:
        lines = Input(PROMPTS * 2)
        server = ScriptedServer(depth=3, seconds=0.0002)
        task = asyncio.create_task(Runner([server], Kept()).run(aiter(lines)))
        most = 0
        while not task.done():
            most = max(most, lines.read - len(server.asked))
            await asyncio.sleep(0)
        return most

    assert 0 < asyncio.run(most_ahead()) <= LINES_AHEAD + 1


def test_large_lines_are_read_only_a_bounded_size_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "BYTES_AHEAD", 10_000)

    async def read() -> int:
        lines = Input([f"{i} " * 1000 for i in range(100)])
        found = pool.Pool()
        found.join("a", 1)
        task = asyncio.create_task(found.fill(aiter(lines)))
        await asyncio.sleep(0.01)
        task.cancel()
        return lines.read

    assert 2 <= asyncio.run(read()) <= 6


def test_two_servers_share_the_lines_and_keep_equal_beginnings_together() -> None:
    one, two = (ScriptedServer(name, depth=4, seconds=0.001) for name in ("one", "two"))
    groups = [f"{group} " * 300 for group in "abcdefghijklmnop"]
    prompts = [f"{groups[i % 16]}{i}" for i in range(800)]
    ran([one, two], prompts)
    assert min(len(one.asked), len(two.asked)) > 250

    def group_of(prompt: str) -> str:
        return prompt[0]

    at_home = 0
    for group in "abcdefghijklmnop":
        counts = [sum(group_of(p) == group for p in server.asked) for server in (one, two)]
        at_home += max(counts)
    assert at_home > 0.75 * len(prompts)


def test_no_server_waits_while_all_lines_begin_like_those_of_another() -> None:
    servers = [ScriptedServer(name, depth=4, seconds=0.001) for name in ("one", "two", "three")]
    ran(servers, ["same " * 300 + str(i) for i in range(600)])
    assert min(len(server.asked) for server in servers) > 120


def test_a_slow_input_gives_its_lines_to_any_server_at_once() -> None:
    async def slow() -> AsyncIterator[Line]:
        for number in range(1, 9):
            yield line_of(number, "same " * 300 + str(number))
        await asyncio.sleep(0.2)
        yield line_of(9, "last")

    servers = [ScriptedServer(name, depth=4, seconds=0.05) for name in ("one", "two")]
    asyncio.run(Runner(servers, Kept()).run(slow()))
    assert min(len(server.asked) for server in servers) == 4


def test_a_refused_line_fails_at_once() -> None:
    def reply(line: Line) -> Reply:
        refused = Reply(ReplyKind.REFUSED, 400, b"{}", "HTTP 400")
        return refused if line.custom_id == "prompt 3" else ANSWERED

    server = ScriptedServer(reply=reply)
    assert ran([server], PROMPTS[:9]).failed == {"prompt 3": "HTTP 400"}
    assert server.asked.count("prompt 3") == 1


def test_a_line_fails_after_three_attempts_with_the_last_reason() -> None:
    server = ScriptedServer(reply=lambda _line: Reply(ReplyKind.FAILED, 500, b"{}", "HTTP 500"))
    assert ran([server], ["a"]).failed == {"a": "HTTP 500"}
    assert server.asked == ["a"] * 3


def test_a_line_that_succeeds_the_third_time_is_answered() -> None:
    replies = iter([Reply(ReplyKind.FAILED, 500)] * 2 + [ANSWERED])
    assert ran([ScriptedServer(reply=lambda _line: next(replies))], ["a"]).answered == ["a"]


def test_a_busy_server_costs_a_line_no_attempt() -> None:
    replies = iter([Reply(ReplyKind.BUSY, 503)] * 10 + [ANSWERED])
    assert ran([ScriptedServer(reply=lambda _line: next(replies))], ["a"]).answered == ["a"]


def test_a_server_that_stays_busy_fails_a_line_in_the_end() -> None:
    server = ScriptedServer(reply=lambda _line: Reply(ReplyKind.BUSY, 503, b"{}", "HTTP 503"))
    assert ran([server], ["a"]).failed == {"a": "HTTP 503"}


def refusing(
    server: ScriptedServer, refuses: Callable[[], bool], error: ClientError | None = None
) -> None:
    """Let `open` raise `error`, by default that the server is lost, where `refuses` says so."""
    original = server.open

    async def open_() -> None:
        if refuses():
            raise error or ServerLostError(f"no server answers at {server.name}")
        await original()

    server.open = open_  # type: ignore[method-assign]


def lost_after(counts: set[int]) -> ScriptedServer:
    """A server whose connections break when it has got these numbers of lines."""
    server = ScriptedServer(depth=5, seconds=0.0005)

    def reply(line: Line) -> Reply:
        if len(server.asked) in counts:
            server.lose()
        return ANSWERED

    server._reply = reply
    return server


def test_the_lines_of_a_lost_server_are_asked_again_when_it_is_back() -> None:
    server = lost_after({20, 60})
    kept = ran([server], PROMPTS[:200])
    assert not kept.failed
    assert server.opened == 3


def test_the_lines_of_a_lost_server_go_to_the_others() -> None:
    lost = lost_after({10})
    other = ScriptedServer("other", seconds=0.0005)
    refusing(lost, lambda: lost.opened > 0)
    assert not ran([lost, other], PROMPTS).failed
    assert lost.opened == 1


def test_a_strange_answer_of_a_lost_server_does_not_end_the_batch_of_the_others() -> None:
    """A proxy may answer with a page of its own while a server restarts."""
    lost, other = lost_after({10}), ScriptedServer("other", seconds=0.0005)
    answers = iter((False, True, True, False))
    strange = ClientError("its /server_info is not that of an SGLang server")
    refusing(lost, lambda: next(answers), strange)
    ran([lost, other], PROMPTS)
    assert lost.opened == 2


def test_a_server_that_does_not_answer_at_first_joins_later() -> None:
    late, other = ScriptedServer("late", seconds=0.001), ScriptedServer("other", seconds=0.001)
    late.refuses_to_open = 3
    ran([late, other], PROMPTS)
    assert len(late.asked) > 100


def test_more_servers_open_only_while_too_many_lines_wait() -> None:
    few, many = LINES_AHEAD // 2, 4 * LINES_AHEAD
    for count, opened in ((few, 0), (many, 1)):
        servers = [ScriptedServer(name, depth=8, seconds=0.001) for name in ("one", "two")]
        ran(servers, [f"line {i}" for i in range(count)], permanent=1)
        assert servers[0].opened == 1
        assert servers[1].opened == opened
        assert bool(servers[1].asked) == bool(opened)


def test_a_further_server_ends_when_no_line_waits() -> None:
    first, second = ScriptedServer("first", depth=1), ScriptedServer("second", depth=64)

    async def ask(line: Line, *_: object) -> Reply:
        """The second server has to answer all other lines, and to end, before the first one."""
        first.asked.append(line.custom_id)
        while not second.closed:
            await asyncio.sleep(0.001)
        return ANSWERED

    first.ask = ask  # type: ignore[method-assign,assignment]
    ran([first, second], PROMPTS, permanent=1)
    assert len(first.asked) == 1


def test_a_server_that_is_still_starting_does_not_keep_a_batch_from_its_end() -> None:
    first, second = ScriptedServer("first", depth=8), ScriptedServer("second")

    async def never() -> None:
        second.opened += 1
        await asyncio.sleep(3600)

    second.open = never  # type: ignore[method-assign]
    ran([first, second], [f"line {i}" for i in range(2 * LINES_AHEAD)], permanent=1)
    assert second.opened == 1
    assert not second.asked


def test_a_server_that_cannot_start_does_not_keep_a_batch_from_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "LONGEST_PAUSE_S", 3600.0)  # so it pauses when the batch ends
    first, second = ScriptedServer("first", depth=8, seconds=0.0005), ScriptedServer("second")
    second.refuses_to_open = 1000
    ran([first, second], PROMPTS, permanent=1)
    assert second.refuses_to_open < 1000


def test_a_batch_without_any_server_ends_at_once() -> None:
    servers = [ScriptedServer(name) for name in ("one", "two")]
    for server in servers:
        server.refuses_to_open = 1
    with pytest.raises(ServerLostError, match="no server answers at one"):
        asyncio.run(Runner(servers, Kept()).run(aiter(Input(["a"]))))
    assert all(server.closed for server in servers)


def test_a_batch_ends_some_time_after_the_last_server_was_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "GIVE_UP_S", 0.02)
    server = lost_after({10})
    refusing(server, lambda: server.opened > 0)
    with pytest.raises(ClientError, match="no server has answered for 0.02 s"):
        ran([server], PROMPTS)
    assert server.closed


def test_times_without_a_server_do_not_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    hours = iter(range(100))
    monkeypatch.setattr(runner, "time", SimpleNamespace(monotonic=lambda: 3600 * next(hours)))
    server = lost_after({20, 60})
    answers = iter((False, True, False, True, False))
    refusing(server, lambda: next(answers))
    ran([server], PROMPTS[:200])
    assert server.opened == 3


def test_only_the_line_that_ends_servers_fails() -> None:
    server = ScriptedServer(depth=6, seconds=0.001)

    def reply(line: Line) -> Reply:
        if line.custom_id == "prompt 50":
            server.lose()
        return ANSWERED

    server._reply = reply
    kept = ran([server], PROMPTS[:200])
    assert list(kept.failed) == ["prompt 50"]
    assert kept.failed["prompt 50"] in ("server was lost", "server: the connection broke")
    assert server.asked.count("prompt 50") == 3


def test_an_error_in_the_input_ends_the_batch_after_the_lines_before_it() -> None:
    async def broken() -> AsyncIterator[Line]:
        yield line_of(1, "a")
        yield line_of(2, "b")
        raise BatchError("standard input has a bad line")

    kept = Kept()
    with pytest.raises(BatchError, match="bad line"):
        asyncio.run(Runner([ScriptedServer(seconds=0.01)], kept).run(broken()))
    kept.assert_once(["a", "b"])


def test_a_cancelled_batch_settles_no_line_that_has_no_reply() -> None:
    server = ScriptedServer(depth=3, seconds=60)
    kept = Kept()

    async def run() -> None:
        task = asyncio.create_task(Runner([server], kept).run(aiter(Input(PROMPTS))))
        while server.now < 3:
            await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(run())
    assert server.closed
    kept.assert_once([])
