"""The operation store: what it promises about disks, owners and the past."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest
from kvctl.v1 import fleet_pb2

from sidecar.coordinator import schema
from sidecar.coordinator.journal import StoreJournal
from sidecar.coordinator.port import Aim, JournalError
from sidecar.coordinator.running import Retention
from sidecar.coordinator.schema import StoreError
from sidecar.coordinator.store import Store

SUCCEEDED = fleet_pb2.TARGET_OUTCOME_SUCCEEDED


def operation(operation_id: str = "") -> fleet_pb2.FleetOperation:
    made = fleet_pb2.FleetOperation(operation_id=operation_id or str(uuid.uuid4()), version=1)
    made.spec.reset.reset_connector = True
    made.state = fleet_pb2.OPERATION_STATE_RUNNING
    return made


AIMS = [
    Aim("r0", "10.0.0.1:7700", {"pool": "a"}, "vllm", "uid-0"),
    Aim("r1", "[fd00::1]:7700"),
    Aim("ü", "unix:/run/x"),
]


def row(name: str, outcome: int = SUCCEEDED) -> fleet_pb2.TargetResult:
    made = fleet_pb2.TargetResult(replica=name, outcome=outcome, code="OK", request_id="x", wave=2)  # type: ignore[arg-type]
    made.reset.engines.add(cached_blocks_dropped=7)
    return made


async def test_what_was_written_is_read_back_whole(tmp_path: Path) -> None:
    store = Store(tmp_path / "ops.db")
    made = operation()
    apart = fleet_pb2.TargetResult(replica="r0", address="10.9.9.9:1", outcome=fleet_pb2.TARGET_OUTCOME_SKIPPED)
    await store.create(made, AIMS, [apart], "token:admin")
    await store.intent(made.operation_id, "r0", "id-0", 2)
    await store.intent(made.operation_id, "ü", "id-2", 2)
    await store.result(made.operation_id, row("r0"))
    await store.unhealthy(made.operation_id, "r0", "stalled")
    await store.steer(made.operation_id, held=True, cancelled="because")
    await store.close()

    again = Store(tmp_path / "ops.db")
    found = await again.read(made.operation_id)
    await again.close()
    assert found is not None
    assert found.aims == AIMS
    assert found.operation.spec == made.spec
    assert (found.held, found.cancelled, found.caller, found.ended) == (True, "because", "token:admin", False)
    assert set(found.recorded) == {"r0", "ü"}
    assert found.recorded["r0"].unhealthy == "stalled"
    ended = row("r0")
    ended.health = "stalled"
    assert found.recorded["r0"].result == ended
    assert found.recorded["ü"].result is None
    assert (found.recorded["ü"].request_id, found.recorded["ü"].wave) == ("id-2", 2)
    rows = {(each.replica, each.address): each.outcome for each in found.operation.results}
    assert len(rows) == 4
    assert rows["r0", "10.9.9.9:1"] == fleet_pb2.TARGET_OUTCOME_SKIPPED
    assert rows["ü", "unix:/run/x"] == fleet_pb2.TARGET_OUTCOME_RUNNING
    assert rows["r1", "[fd00::1]:7700"] == fleet_pb2.TARGET_OUTCOME_UNSPECIFIED
    assert found.operation.counts.total == 4


async def test_a_second_owner_is_refused_by_the_first_ones_pid(tmp_path: Path) -> None:
    store = Store(tmp_path / "ops.db")
    with pytest.raises(StoreError, match=rf"in use by pid {os.getpid()} on .*one coordinator"):
        Store(tmp_path / "ops.db")
    await store.close()
    await Store(tmp_path / "ops.db").close()


def test_the_lock_dies_with_a_killed_owner(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from sidecar.coordinator.store import StoreLock\n"
        f"lock = StoreLock(Path({str(tmp_path / 'ops.db')!r})); print('locked', flush=True); time.sleep(60)"
    )
    root = Path(__file__).resolve().parents[2]
    path = os.pathsep.join([str(root), str(root / "proto" / "gen")])
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path}
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "locked\n"
        with pytest.raises(StoreError, match=f"pid {owner.pid}"):
            Store(tmp_path / "ops.db")
        owner.kill()
        owner.wait(10)
    asyncio.run(Store(tmp_path / "ops.db").close())


async def test_a_write_has_returned_only_when_another_connection_sees_it(tmp_path: Path) -> None:
    store = Store(tmp_path / "ops.db")
    made = operation()
    await store.create(made, AIMS, [], "me")
    await store.intent(made.operation_id, "r1", "id-1", 0)
    other = sqlite3.connect(tmp_path / "ops.db")
    assert other.execute("SELECT request_id FROM targets WHERE name = 'r1'").fetchall() == [("id-1",)]
    assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    other.close()
    await store.close()


async def test_writes_are_synced_and_those_that_wait_together_share_a_transaction(tmp_path: Path) -> None:
    store = Store(tmp_path / "ops.db")
    assert store._writer is not None
    assert store._writer.execute("PRAGMA synchronous").fetchone() == (2,), "2 is FULL"
    many = [Aim(f"r{index}", f"10.0.0.{index}:1") for index in range(1000)]
    made = operation()
    await store.create(made, many, [], "me")
    commits = []
    store._writer.set_trace_callback(lambda sql: commits.append(sql) if sql == "COMMIT" else None)
    await asyncio.gather(*(store.intent(made.operation_id, aim.name, "id", 0) for aim in many))
    found = await store.read(made.operation_id)
    await store.close()
    assert found is not None
    assert len(found.recorded) == 1000
    assert len(commits) < 100


async def test_a_backup_put_in_the_place_of_a_store_that_was_closed_is_what_is_read(tmp_path: Path) -> None:
    path, backup = tmp_path / "operations.db", tmp_path / "backup.db"
    store = Store(path)
    with contextlib.closing(sqlite3.connect(path)) as live, contextlib.closing(sqlite3.connect(backup)) as copy:
        live.backup(copy)
    await store.create(operation(), AIMS, [], "me")
    assert len(await store.page(10, 0)) == 1
    await store.close()
    assert not path.with_name("operations.db-wal").exists()
    backup.replace(path)
    restored = Store(path)
    assert not restored.trouble
    assert await restored.page(10, 0) == []
    await restored.close()


async def test_pages_go_from_the_newest_and_meet_each_operation_once(tmp_path: Path) -> None:
    store = Store(tmp_path / "ops.db")
    made = [operation() for _ in range(7)]
    for each in made:
        await store.create(each, [], [], "me")
    seen: list[str] = []
    before = 0
    while page := await store.page(3, before):
        seen += [found.operation_id for _, found in page]
        before = page[-1][0]
        if before == 5:
            await store.create(operation(), [], [], "me")
    await store.close()
    assert seen == [each.operation_id for each in reversed(made)]


async def test_retention_forgets_what_is_old_or_too_much_and_never_what_runs(tmp_path: Path) -> None:
    store = Store(tmp_path / "ops.db")
    made = [operation() for _ in range(6)]
    for each in made:
        await store.create(each, AIMS, [], "me")
    for each in made[1:]:
        await store.update(each, ended=True)
    assert await store.prune(keep=3, max_age_s=3600, most_by_age=10) == 2
    kept = [each.operation_id for each in (made[5], made[4], made[3], made[0])]
    assert [found.operation_id for _, found in await store.page(10, 0)] == kept
    assert store._writer is not None
    assert store._writer.execute("SELECT count(*) FROM targets").fetchone() == (4 * len(AIMS),)
    await store._write(lambda db: db.execute("UPDATE operations SET created_at = ?", (time.time() - 7200,)))
    assert await store.prune(keep=3, max_age_s=3600, most_by_age=10) == 3
    assert [found.operation_id for _, found in await store.page(10, 0)] == [made[0].operation_id]
    await store.close()


async def test_a_clock_that_jumps_takes_only_so_many_operations_along_in_one_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "ops.db")
    made = [operation() for _ in range(30)]
    for each in made:
        await store.create(each, AIMS, [], "me")
        await store.update(each, ended=True)
    year_later = time.time() + 365 * 86400
    monkeypatch.setattr(time, "time", lambda: year_later)
    assert await store.prune(keep=1000, max_age_s=86400, most_by_age=0) == 0
    assert await store.prune(keep=1000, max_age_s=86400, most_by_age=10) == 10
    left = [found.operation_id for _, found in await store.page(100, 0)]
    assert left == [each.operation_id for each in reversed(made[10:])], "the oldest go first"
    await store.close()


def test_an_hour_may_forget_a_small_part_of_what_is_kept_and_a_day_all_of_it() -> None:
    assert Retention(operations=1000).most_by_age == 42
    assert 24 * Retention(operations=1000).most_by_age >= 1000
    assert Retention(operations=1).most_by_age == 10


async def test_a_full_disk_refuses_writes_in_words_and_reads_go_on(tmp_path: Path) -> None:
    store = Store(tmp_path / "ops.db")
    made = operation()
    await store.create(made, AIMS, [], "me")
    many = [Aim(f"r{index}", "10.0.0.1:1", {"why": "x" * 200}) for index in range(50)]
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A file that may not grow fails like a disk that is full: the kernel refuses the write.
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (256 * 1024, before[1]))

    async def fill() -> None:
        for _ in range(200):
            await store.create(operation(), many, [], "me")

    try:
        with pytest.raises(StoreError, match=r"cannot be written \(.*free space"):
            await fill()
        assert store.trouble
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        journal = StoreJournal(store, made.operation_id)
        with pytest.raises(JournalError):
            await journal.result(row("r0"))
        assert await store.read(made.operation_id) is not None
        assert await store.page(10, 0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    await journal.flush()
    assert not store.trouble
    found = await store.read(made.operation_id)
    assert found is not None
    assert found.recorded["r0"].result == row("r0")
    await store.close()


async def test_one_write_that_fails_does_not_take_others_with_it(tmp_path: Path) -> None:
    store = Store(tmp_path / "ops.db")
    made = operation()
    results = await asyncio.gather(
        store.create(made, AIMS, [], "me"),
        store.create(made, AIMS, [], "me"),
        store.create(operation(), AIMS, [], "me"),
        return_exceptions=True,
    )
    assert [isinstance(each, StoreError) for each in results] == [False, True, False]
    assert not store.trouble, "a mistake of one caller is no trouble of the store"
    assert len(await store.page(10, 0)) == 2
    await store.close()


async def test_a_file_that_is_no_database_opens_with_trouble_and_refuses_writes(tmp_path: Path) -> None:
    (tmp_path / "ops.db").write_bytes(b"this was a store once" * 500)
    store = Store(tmp_path / "ops.db")
    assert "corrupt" in store.trouble
    assert "move the file away" in store.trouble
    with pytest.raises(StoreError, match="corrupt"):
        await store.create(operation(), AIMS, [], "me")
    with pytest.raises(StoreError):
        await store.page(10, 0)
    await store.close()


async def test_a_damaged_store_still_reads_what_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "ops.db"
    store = Store(path)
    # Ids in order, so that what belongs together is stored together and the first is far from the last.
    made = [operation(str(uuid.UUID(int=number + 1))) for number in range(40)]
    for each in made:
        await store.create(each, [Aim(f"r{i}", f"10.0.0.{i}:1", {"x": "y" * 200}) for i in range(30)], [], "me")
    await store.close()
    content = path.read_bytes()
    pages = [content[at : at + 4096] for at in range(0, len(content), 4096)]
    leaf_of_an_index, last = 0x0A, made[-1].operation_id.encode()
    damaged = [n for n, page in enumerate(pages) if page[0] == leaf_of_an_index and last in page and b"y" * 200 in page]
    assert damaged
    with path.open("r+b") as file:
        for number in damaged:
            file.seek(number * 4096)
            file.write(b"\xa5" * 4096)
    store = Store(path)
    assert "corrupt" in store.trouble
    with pytest.raises(StoreError, match="corrupt"):
        await store.create(operation(), AIMS, [], "me")
    assert len(await store.page(100, 0)) == 40
    assert await store.read(made[0].operation_id) is not None
    await store.close()


async def test_a_store_damaged_while_it_is_open_has_trouble_and_takes_no_more_writes(tmp_path: Path) -> None:
    path = tmp_path / "ops.db"
    store = Store(path)
    for _ in range(5):
        await store.create(operation(), AIMS, [], "me")
    await store.verify()
    assert store.trouble == ""
    damage(path)
    await store.verify()
    assert "corrupt" in store.trouble
    assert "move the file away" in store.trouble
    with pytest.raises(StoreError, match="corrupt"):
        await store.create(operation(), AIMS, [], "me")
    assert "corrupt" in store.trouble
    await store.close()


async def test_damage_that_a_reader_meets_is_trouble_from_then_on(tmp_path: Path) -> None:
    path = tmp_path / "ops.db"
    store = Store(path)
    await store.create(operation(), AIMS, [], "me")
    damage(path)
    with pytest.raises(StoreError, match="corrupt"):
        await store.page(10, 0)
    assert "corrupt" in store.trouble
    await store.close()


async def test_a_store_that_was_taken_away_is_trouble(tmp_path: Path) -> None:
    path = tmp_path / "ops.db"
    store = Store(path)
    path.rename(tmp_path / "elsewhere")
    await store.verify()
    assert "is not there any more" in store.trouble
    await store.close()


@pytest.mark.parametrize("another", [False, True], ids=["removed", "another coordinator's"])
async def test_nothing_is_written_into_a_file_that_is_not_the_store_any_more(tmp_path: Path, another: bool) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    store = Store(folder / "ops.db")
    await store.create(made := operation(), AIMS, [], "token:admin")
    shutil.rmtree(folder)
    successor = None
    if another:
        folder.mkdir()
        successor = Store(folder / "ops.db")
    with pytest.raises(StoreError, match="another file" if another else "not there any more"):
        await store.intent(made.operation_id, "r0", "id-0", 0)
    assert "restart the coordinator" in store.trouble
    await store.close()
    if successor is not None:
        await successor.close()


def damage(path: Path) -> None:
    """Overwrite the file and its log, as a wrong dd would, under whoever has them open."""
    for each in (path, path.with_name(path.name + "-wal")):
        size = max(each.stat().st_size, 4096)
        with each.open("r+b") as file:
            file.write(b"\xa5" * size)


def test_another_programs_database_and_a_newer_store_are_refused_untouched(tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "other.db")
    other.execute("CREATE TABLE theirs (x)")
    other.close()
    with pytest.raises(StoreError, match="another program"):
        Store(tmp_path / "other.db")
    newer = sqlite3.connect(tmp_path / "newer.db")
    newer.executescript(
        f"CREATE TABLE x (y); PRAGMA application_id = {schema.APPLICATION_ID}; PRAGMA user_version = 99;"
    )
    newer.close()
    with pytest.raises(StoreError, match="schema version 99"):
        Store(tmp_path / "newer.db")


def test_a_store_in_a_folder_that_cannot_be_written_names_the_uid(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=f"uid {os.getuid()}"):
        Store(tmp_path / "absent" / "ops.db")


async def test_the_store_is_for_its_owner_only(tmp_path: Path) -> None:
    store = Store(tmp_path / "ops.db")
    assert (tmp_path / "ops.db").stat().st_mode & 0o077 == 0
    await store.close()
