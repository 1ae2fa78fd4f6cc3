"""Operations that were stopped while the store took no writes: noted where no more room is needed."""

from __future__ import annotations

import resource
import signal
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from kvctl.v1 import fleet_pb2

from sidecar.coordinator.journal import StoreJournal
from sidecar.coordinator.port import JournalError
from sidecar.coordinator.schema import StoreError
from sidecar.coordinator.stopped import StoppedNotes
from sidecar.coordinator.store import Store


def new_id() -> str:
    return str(uuid.uuid4())


def noted(store: Path) -> set[str]:
    """What a process that starts now finds."""
    notes = StoppedNotes(store)
    found = set(notes.ids())
    notes.close()
    return found


@contextmanager
def files_that_may_not_grow(size: int) -> Iterator[None]:
    """As on a full disk, the kernel refuses to write beyond what is there."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)


def test_what_is_noted_is_found_by_the_next_process_until_it_is_taken_back(tmp_path: Path) -> None:
    store = tmp_path / "ops.db"
    notes = StoppedNotes(store)
    ids = [new_id() for _ in range(3)]
    for each in [*ids, ids[0]]:
        notes.add(each)
    assert noted(store) == set(ids)
    notes.remove(ids[1])
    notes.close()
    assert noted(store) == {ids[0], ids[2]}


def test_a_note_needs_no_room_that_was_not_taken_at_the_start(tmp_path: Path) -> None:
    store = tmp_path / "ops.db"
    notes = StoppedNotes(store)
    ids = [new_id() for _ in range(100)]
    with files_that_may_not_grow(notes.path.stat().st_size):
        for each in ids:
            notes.add(each)
    notes.close()
    assert noted(store) == set(ids)


def test_a_note_that_cannot_be_kept_is_told_in_the_log_and_breaks_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    operation_id = new_id()
    with files_that_may_not_grow(0):
        notes = StoppedNotes(tmp_path / "ops.db")
    notes.add(operation_id)
    notes.close()
    assert operation_id in caplog.text
    assert "will go on with it" in caplog.text
    assert "File too large" in caplog.text


def test_a_file_of_something_else_holds_no_notes_and_takes_some(tmp_path: Path) -> None:
    store = tmp_path / "ops.db"
    notes = StoppedNotes(store)
    notes.path.write_bytes(b"\xa5" * notes.path.stat().st_size)
    notes.close()
    assert noted(store) == set()
    again = StoppedNotes(store)
    operation_id = new_id()
    again.add(operation_id)
    again.close()
    assert noted(store) == {operation_id}


@pytest.mark.parametrize(
    ("write", "is_noted"),
    [
        (lambda journal: journal.intent("r0", "id-0", 0), True),
        (lambda journal: journal.result(fleet_pb2.TargetResult(replica="r0")), True),
        (lambda journal: journal.result(fleet_pb2.TargetResult(replica="r0", request_id="id-0")), False),
        (lambda journal: journal.unhealthy("r0", "stalled"), False),
    ],
    ids=["intent", "not called", "called", "unhealthy"],
)
async def test_an_operation_is_noted_when_a_target_without_a_call_is_told_as_ended_and_not_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: object, is_noted: bool
) -> None:
    async def refuse(*_: object) -> None:
        raise StoreError("the store cannot be written (disk is full)")

    for method in ("intent", "result", "unhealthy"):
        monkeypatch.setattr(Store, method, refuse)
    store = Store(tmp_path / "ops.db")
    operation_id = new_id()
    with pytest.raises(JournalError, match="disk is full"):
        await write(StoreJournal(store, operation_id))  # type: ignore[operator]
    await store.close()
    assert noted(tmp_path / "ops.db") == ({operation_id} if is_noted else set())
