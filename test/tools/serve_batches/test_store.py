"""The state of files and batches, in SQLite and in PostgreSQL: the same tests for both."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from sglang_qspec.errors import BatchError, ClaimLostError, ConfigError
from sglang_qspec.tools.serve_batches import store as stores
from sglang_qspec.tools.serve_batches.database import PostgresDatabase, SqliteDatabase
from sglang_qspec.tools.serve_batches.objects import Batch, BatchStatus, FileObject, FilePurpose
from sglang_qspec.tools.serve_batches.store import Store
from test.tools.serve_batches.postgres import PASSWORD, Postgres, postgres

BATCH = Batch(
    id="batch_1",
    endpoint="/v1/completions",
    input_file_id="file-1",
    completion_window="24h",
    created_at=0,
    expires_at=1,
)
Opened = Callable[[], Store]


def file(number: int, purpose: FilePurpose = FilePurpose.INPUT) -> FileObject:
    return FileObject(id=f"file-{number}", bytes=10, created_at=0, filename="name", purpose=purpose)


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    with postgres() as found:
        yield found


@pytest.fixture
def url(server: Postgres, request: pytest.FixtureRequest) -> str:
    name = "".join(each if each.isalnum() else "_" for each in request.node.name.lower())
    return server.new_url(f"n_{name[:50]}")


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as found:
        yield found


@pytest.fixture(params=["sqlite", "postgresql"])
def opened(request: pytest.FixtureRequest, tmp_path: Path, stack: contextlib.ExitStack) -> Opened:
    """Opens the same database again and again."""
    given: Any = (
        (SqliteDatabase, tmp_path / "state.db")
        if request.param == "sqlite"
        else (PostgresDatabase, request.getfixturevalue("url"))
    )

    def open_one() -> Store:
        found = Store(given[0](given[1]))
        stack.callback(found.close)
        return found

    return open_one


@pytest.fixture
def gateways(url: str, stack: contextlib.ExitStack) -> Callable[[], Store]:
    def open_one() -> Store:
        found = Store(PostgresDatabase(url))
        stack.callback(found.close)
        return found

    return open_one


def ended(batch: Batch) -> Batch:
    return replace(batch, status=BatchStatus.COMPLETED)


def cancelling(batch: Batch) -> Batch:
    return replace(batch, status=BatchStatus.CANCELLING)


def test_objects_are_kept_for_their_tenants_alone(opened: Opened) -> None:
    store = opened()
    store.add("red", file(1), BATCH)
    store.add("red", file(2, FilePurpose.OUTPUT))
    for tenant, kept in (("red", True), ("blue", False)):
        assert (store.get(FileObject, "file-1", tenant) == file(1)) is kept
        assert (store.get(Batch, "batch_1", tenant) == BATCH) is kept
        assert store.totals(FileObject, tenant) == ((2, 20) if kept else (0, 0))
        assert store.totals(Batch, tenant) == ((1, 0) if kept else (0, 0))
    assert store.get(Batch, "file-1", "red") is None
    assert store.running() == [BATCH]
    assert opened().files() == [("red", file(1)), ("red", file(2, FilePurpose.OUTPUT))]
    store.remove("file-1")
    assert store.get(FileObject, "file-1", "red") is None


def test_pages_follow_each_other_in_both_orders(opened: Opened) -> None:
    store = opened()
    store.add("red", *(file(number) for number in range(5)))
    store.add("red", file(9, FilePurpose.OUTPUT))
    label = FilePurpose.INPUT.value
    for ascending in (True, False):
        found: list[str] = []
        more = True
        while more:
            page, more = store.page(
                FileObject,
                "red",
                limit=2,
                after=found[-1] if found else None,
                label=label,
                ascending=ascending,
            )
            found += [each.id for each in page]
        numbers = range(5) if ascending else range(4, -1, -1)
        assert found == [f"file-{number}" for number in numbers]


def test_a_change_is_whole_or_not_at_all(opened: Opened) -> None:
    store = opened()
    store.add("red", BATCH)
    store.beat()

    def fail(batch: Batch) -> Batch:
        raise ValueError

    with pytest.raises(ValueError):
        store.change("red", BATCH.id, fail)
    with pytest.raises(BatchError, match="database cannot be used"):
        store.change("red", BATCH.id, ended, replace(file(1), id=None))
    assert store.get(Batch, BATCH.id, "red") == BATCH
    assert store.messages() == []
    store.change("red", BATCH.id, ended, file(1))
    assert store.running() == []
    assert opened().get(FileObject, "file-1", "red") == file(1)


def test_the_end_of_a_batch_has_one_message_until_it_is_taken(opened: Opened) -> None:
    store = opened()
    store.add("red", BATCH, replace(BATCH, id="batch_2"))
    store.beat()
    for id in ("batch_1", "batch_2"):
        store.change("red", id, ended)
    (message,) = store.messages("batch_1")
    store.note_attempt(message.id)
    store.close()
    store = opened()
    waiting = message._replace(tried=1)
    assert store.messages("batch_1") == [waiting]
    store.forget(message.id)
    assert [each.batch for each in store.messages()] == ["batch_2"]


def test_a_batch_that_has_ended_is_no_longer_changed(opened: Opened) -> None:
    store = opened()
    store.add("red", BATCH)
    store.beat()
    assert [batch for _, batch in store.beat().batches] == [BATCH]
    store.change("red", BATCH.id, ended)
    with pytest.raises(ClaimLostError):
        store.change("red", BATCH.id, cancelling)
    assert store.beat().batches == []


def test_a_service_that_starts_again_has_the_batches_of_the_one_before(tmp_path: Path) -> None:
    store = Store(SqliteDatabase(tmp_path / "state.db"))
    store.beat()
    store.add("red", BATCH)
    store.close()
    store = Store(SqliteDatabase(tmp_path / "state.db"))
    assert [batch for _, batch in store.beat().batches] == [BATCH]
    store.change("red", BATCH.id, ended)
    store.close()


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.db"
    database = SqliteDatabase(path)
    Store(database)
    with pytest.raises(ConfigError, match="version 1, but this is version 2"):
        database.create((), 2)
    database.close()
    with pytest.raises(ConfigError, match="cannot be used as a database"):
        SqliteDatabase(tmp_path)


# Several gateways


def test_a_batch_has_one_gateway_until_its_lease_is_over(
    gateways: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = gateways(), gateways()
    first.beat()
    first.add("red", BATCH)
    assert second.beat() == ([], [], [], False)
    with pytest.raises(ClaimLostError):
        second.change("red", BATCH.id, ended)
    second.change("red", BATCH.id, cancelling, anyone=True)
    ((_, seen),) = first.beat().batches
    assert seen.status is BatchStatus.CANCELLING
    monkeypatch.setattr(stores, "LEASE_S", -1)
    first.beat()
    monkeypatch.undo()
    taken = second.beat()
    assert [batch.id for _, batch in taken.batches] == [BATCH.id]
    assert taken.ended == [first.gateway]
    assert taken.is_alone
    with pytest.raises(ClaimLostError):  # as if it had only been stopped for a while
        first.change("red", BATCH.id, ended)
    assert first.beat().batches == []
    second.change("red", BATCH.id, ended)
    (message,) = second.beat().messages
    assert first.beat().messages == []
    second.leave()
    assert first.beat().messages == [message]


def test_gateways_that_beat_at_once_take_each_batch_once(gateways: Opened) -> None:
    found = [gateways() for _ in range(4)]
    found[0].add("red", *(replace(BATCH, id=f"batch_{number}") for number in range(50)))
    barrier = threading.Barrier(len(found))

    def beat(store: Store, taken: list[int]) -> None:
        barrier.wait()
        taken.append(len(store.beat().batches))

    for _ in range(10):
        taken: list[int] = []
        threads = [threading.Thread(target=beat, args=(each, taken)) for each in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(taken) == [0, 0, 0, 50]
        assert sorted(len(each.beat().batches) for each in found) == [0, 0, 0, 50]
        for each in found:
            each.leave()


def test_gateways_create_the_tables_at_once(url: str) -> None:
    failed: list[Exception] = []

    def start() -> None:
        try:
            Store(PostgresDatabase(url)).close()
        except ConfigError as error:
            failed.append(error)

    threads = [threading.Thread(target=start) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


def test_a_database_belongs_to_one_folder(gateways: Opened) -> None:
    gateways().bind("red", is_empty=True)
    gateways().bind("red", is_empty=False)
    with pytest.raises(ConfigError, match="another --folder"):
        gateways().bind("blue", is_empty=True)


def test_a_new_database_is_refused_if_the_folder_has_files(gateways: Opened) -> None:
    with pytest.raises(ConfigError, match="another --folder"):
        gateways().bind("red", is_empty=False)


def test_a_connection_that_breaks_is_made_again(url: str, server: Postgres) -> None:
    store = Store(PostgresDatabase(url))
    store.add("red", BATCH)
    server.stop()
    with pytest.raises(BatchError, match="database cannot be used"):
        store.running()
    server.start()
    assert store.running() == [BATCH]
    server.stop()
    server.start()
    assert store.running() == [BATCH]
    store.close()


def test_a_url_that_cannot_be_used_is_named_without_its_password(server: Postgres) -> None:
    wrong = {
        "mysql://user:mis%3Atake@host/name": "must be a URL postgresql://",
        "postgresql://user:mis%3Atake@host/name?mis%3Atake=1": "no valid URL",
        server.url().replace("take", "taken"): "password authentication failed",
        server.url("absent"): "does not exist",
    }
    for url, message in wrong.items():
        with pytest.raises(ConfigError, match=message) as error:
            PostgresDatabase(url)
        assert PASSWORD not in str(error.value)
        assert "mis%3Atake" not in str(error.value)


def test_postgresql_needs_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'sglang-qspec\[postgres\]'"):
        PostgresDatabase("postgresql://host/name")


def test_another_version_of_the_tables_is_refused(url: str) -> None:
    database = PostgresDatabase(url)
    Store(database)
    with pytest.raises(ConfigError, match="version 1, but this is version 2"):
        database.create((), 2)
    database.close()
