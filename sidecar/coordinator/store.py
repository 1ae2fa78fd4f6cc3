"""The operation store: SQLite on one disk, written by one thread, owned by one coordinator.

A write has returned only when it is on the disk (WAL, synchronous=FULL). Writes that wait together share one
transaction, so that a thousand targets starting at once cost a few fsyncs and not a thousand. Reads use a connection
of their own: a store that cannot be written any more can still be read.

Ownership is an fcntl lock on a file beside the database, which the kernel drops with the process, also after a
kill -9. A full disk, a failing one or a corrupt file make writes fail with StoreError; whether to go on is the
caller's decision.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import queue
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from kvctl.v1 import fleet_pb2

from sidecar.coordinator import schema
from sidecar.coordinator.port import Aim
from sidecar.coordinator.schema import StoredOperation, StoreError
from sidecar.coordinator.stopped import StoppedNotes

T = TypeVar("T")

_MOST_IN_ONE_TRANSACTION: Final = 512
_BUSY_MS: Final = 5000
_CHECKED_BYTES: Final = 256 * 1024 * 1024
"""A larger store is not checked at the start: that would take longer than operations may wait to be resumed."""
_VERIFIED_BYTES: Final = 32 * 1024 * 1024
"""Up to here `verify` looks at every page, again and again."""
_CORRUPT: Final = "the store is corrupt"


@dataclass(slots=True)
class _Job:
    work: Callable[[sqlite3.Connection], object]
    done: Future[Any]


class StoreLock:
    """That no other process uses the store. Held until `release` or the end of the process."""

    def __init__(self, store: Path) -> None:
        """StoreError names the process that holds it."""
        self._path = store.with_name(store.name + ".lock")
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StoreError(
                f"the store's lock {self._path} cannot be opened by uid {os.getuid()}: {error.strerror}; "
                "its directory must exist and be writable"
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(self._fd, 200).decode("utf-8", "replace").strip() or "another process"
            os.close(self._fd)
            raise StoreError(
                f"{store} is in use by {holder}; one coordinator may use a store: "
                "stop that one, or give another --store"
            ) from error
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        """Give it up. The file stays: removing it would let two processes lock two files of one name."""
        os.close(self._fd)


class Store:
    """See the module. Methods are for the asyncio loop; StoreError is the only error they raise."""

    def __init__(self, path: Path) -> None:
        """Take the lock and open the file. StoreError when another coordinator has it, it cannot be opened, or it was
        written by something newer or other. A corrupt file is opened as far as it goes: see `trouble`.
        """
        self.path = path
        self.trouble = ""
        """Why nothing can be written; empty while the last write went well."""
        self._lock = StoreLock(path)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        try:
            self._writer = self._open()
        except StoreError:
            self._lock.release()
            raise
        self._file = self._identity()
        self.stopped = StoppedNotes(path)
        """Operations that have ended although this store could not take their end."""
        self._reader = self._open_reader()
        self._read_lock = threading.Lock()
        self._thread = threading.Thread(target=self._write_loop, name="store", daemon=True)
        self._thread.start()

    async def close(self) -> None:
        """Finish what was queued, close, release the lock."""
        self._jobs.put(None)
        await asyncio.to_thread(self._thread.join)
        # The writer last: only it can empty the -wal into the file. Left behind, it would be taken for the newest part
        # of a backup that is put in the file's place.
        for connection in (self._reader, self._writer):
            if connection is not None:
                connection.close()
        self.stopped.close()
        self._lock.release()

    # --- writing -------------------------------------------------------------------------------------------------

    async def create(
        self,
        operation: fleet_pb2.FleetOperation,
        aims: Sequence[Aim],
        apart: Sequence[fleet_pb2.TargetResult],
        caller: str,
    ) -> None:
        """Put a new operation on record: what to call, and the rows of what is not called."""
        recorded = fleet_pb2.FleetOperation()
        recorded.CopyFrom(operation)
        await self._write(lambda db: schema.insert(db, recorded, aims, apart, caller, time.time()))

    async def intent(self, operation_id: str, target: str, request_id: str, wave: int) -> None:
        """A target is about to be called."""
        await self._write(
            lambda db: db.execute(
                "UPDATE targets SET request_id = ?, wave = ? WHERE operation = ? AND apart = 0 AND name = ?",
                (request_id, wave, operation_id, target),
            )
        )

    async def result(self, operation_id: str, result: fleet_pb2.TargetResult) -> None:
        """A target has ended."""
        blob = result.SerializeToString()
        await self._write(
            lambda db: db.execute(
                "UPDATE targets SET result = ?, wave = ? WHERE operation = ? AND apart = 0 AND name = ?",
                (blob, result.wave, operation_id, result.replica),
            )
        )

    async def unhealthy(self, operation_id: str, target: str, why: str) -> None:
        """A target ended well and did not become healthy."""
        await self._write(
            lambda db: db.execute(
                "UPDATE targets SET unhealthy = ? WHERE operation = ? AND apart = 0 AND name = ?",
                (why, operation_id, target),
            )
        )

    async def steer(self, operation_id: str, *, held: bool, cancelled: str) -> None:
        """Hold, release or cancel: what a restarted coordinator must go on obeying."""
        await self._write(
            lambda db: db.execute(
                "UPDATE operations SET held = ?, cancelled = ? WHERE id = ?", (held, cancelled, operation_id)
            )
        )

    async def update(self, operation: fleet_pb2.FleetOperation, *, ended: bool) -> None:
        """The operation's own fields: state, version, warnings, time taken."""
        recorded = fleet_pb2.FleetOperation()
        recorded.CopyFrom(operation)
        await self._write(lambda db: schema.update(db, recorded, ended=ended))

    async def prune(self, keep: int, max_age_s: float, most_by_age: int) -> int:
        """Forget ended operations beyond the newest `keep`, and the oldest `most_by_age` of those that are older than
        `max_age_s` by the wall clock; returns how many.
        """
        oldest = time.time() - max_age_s

        def work(db: sqlite3.Connection) -> int:
            return db.execute(
                "DELETE FROM operations WHERE ended = 1 AND (sequence NOT IN "
                "(SELECT sequence FROM operations ORDER BY sequence DESC LIMIT ?) OR sequence IN "
                "(SELECT sequence FROM operations WHERE ended = 1 AND created_at < ? ORDER BY sequence LIMIT ?))",
                (keep, oldest, most_by_age),
            ).rowcount

        return await self._write(work)

    # --- reading -------------------------------------------------------------------------------------------------

    async def read(self, operation_id: str) -> StoredOperation | None:
        """One operation, None when it is not on record."""
        return await self._read(lambda db: schema.read(db, operation_id))

    async def unfinished(self) -> list[StoredOperation]:
        """Every operation that has not ended, oldest first."""

        def work(db: sqlite3.Connection) -> list[StoredOperation]:
            ids = [row[0] for row in db.execute("SELECT id FROM operations WHERE ended = 0 ORDER BY sequence")]
            return [stored for each in ids if (stored := schema.read(db, each)) is not None]

        return await self._read(work)

    async def page(self, size: int, before: int) -> list[tuple[int, fleet_pb2.FleetOperation]]:
        """(sequence, operation without rows), newest first, of those before a sequence number; 0 starts at the end."""

        def work(db: sqlite3.Connection) -> list[tuple[int, fleet_pb2.FleetOperation]]:
            found = db.execute(
                "SELECT sequence, operation FROM operations WHERE ? = 0 OR sequence < ? ORDER BY sequence DESC LIMIT ?",
                (before, before, size),
            )
            return [(sequence, fleet_pb2.FleetOperation.FromString(blob)) for sequence, blob in found]

        return await self._read(work)

    async def verify(self) -> None:
        """Look at the file itself, and set `trouble` when it was damaged or taken away while it was open."""
        await asyncio.to_thread(self._verify_now)

    # --- inside --------------------------------------------------------------------------------------------------

    def _open(self) -> sqlite3.Connection | None:
        fresh = not self.path.exists()
        try:
            connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        except sqlite3.Error as error:
            raise StoreError(f"the store {self.path} cannot be opened by uid {os.getuid()}: {error}") from error
        try:
            if fresh:
                self.path.chmod(0o600)
            connection.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = FULL")
            connection.execute("PRAGMA foreign_keys = ON")
            schema.prepare(connection, str(self.path))
            if self.path.stat().st_size <= _CHECKED_BYTES:
                found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
                if found != "ok":
                    self.trouble = self._corrupt(found)
        except sqlite3.DatabaseError as error:
            self.trouble = self._explain(error)
            connection.close()
            return None
        except StoreError:
            connection.close()
            raise
        return connection

    def _identity(self) -> tuple[int, int]:
        """Which file the path leads to now. OSError when to none."""
        found = self.path.stat()
        return found.st_dev, found.st_ino

    def _taken_away(self) -> str:
        """Why what is written now would be lost, or be another coordinator's; empty while the file is in its place.
        SQLite goes on writing into a file that was removed, and the lock was removed with it.
        """
        try:
            if self._identity() == self._file:
                return ""
        except OSError as error:
            return f"the store {self.path} is not there any more ({error.strerror}); restart the coordinator"
        return f"the store {self.path} is another file than the one that was opened; restart the coordinator"

    def _open_reader(self) -> sqlite3.Connection | None:
        try:
            uri = f"{self.path.absolute().as_uri()}?mode=ro"
            connection = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
            connection.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
        except sqlite3.Error:
            return None
        return connection

    async def _write(self, work: Callable[[sqlite3.Connection], T]) -> T:
        if self._writer is None or self.trouble.startswith(_CORRUPT):
            raise StoreError(self.trouble)
        done: Future[Any] = Future()
        self._jobs.put(_Job(work, done))
        result: T = await asyncio.wrap_future(done)
        return result

    async def _read(self, work: Callable[[sqlite3.Connection], T]) -> T:
        return await asyncio.to_thread(self._read_now, work)

    def _read_now(self, work: Callable[[sqlite3.Connection], T]) -> T:
        if self._reader is None:
            raise StoreError(self.trouble or f"the store {self.path} cannot be read")
        with self._read_lock:
            try:
                self._reader.execute("BEGIN")
                try:
                    return work(self._reader)
                finally:
                    self._reader.execute("COMMIT")
            except sqlite3.Error as error:
                raise self._failed_read(error) from error

    def _failed_read(self, error: sqlite3.Error) -> StoreError:
        """Corruption counts for writing too: what is built on damaged pages is lost with them."""
        failure = StoreError(self._explain(error))
        if str(failure).startswith(_CORRUPT):
            self.trouble = str(failure)
        return failure

    def _verify_now(self) -> None:
        if gone := self._taken_away():
            self.trouble = gone
            return
        try:
            whole = self.path.stat().st_size <= _VERIFIED_BYTES
            # A connection of its own: the others have pages in memory that may not be on the disk any more.
            connection = sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)
            try:
                connection.execute(f"PRAGMA busy_timeout = {_BUSY_MS}")
                connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
                found = connection.execute("PRAGMA quick_check(1)").fetchone()[0] if whole else "ok"
            finally:
                connection.close()
        except sqlite3.Error as error:
            self.trouble = str(self._failed_read(error))
        except OSError:
            self.trouble = self._taken_away()
        else:
            if found != "ok":
                self.trouble = self._corrupt(found)

    def _write_loop(self) -> None:
        while (job := self._jobs.get()) is not None:
            jobs = [job]
            last = False
            while len(jobs) < _MOST_IN_ONE_TRANSACTION and not self._jobs.empty():
                more = self._jobs.get()
                if more is None:
                    last = True
                    break
                jobs.append(more)
            self._commit([each for each in jobs if each.done.set_running_or_notify_cancel()])
            if last:
                return

    def _commit(self, jobs: list[_Job]) -> None:
        """All of them in one transaction; when that fails none is on record, and each is told."""
        connection = self._writer
        assert connection is not None
        if gone := self._taken_away():
            self.trouble = gone
            for job in jobs:
                job.done.set_exception(StoreError(gone))
            return
        try:
            connection.execute("BEGIN IMMEDIATE")
            results = [job.work(connection) for job in jobs]
            connection.execute("COMMIT")
        except Exception as error:  # noqa: BLE001 - whatever it is, those who wait must be told
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            if len(jobs) > 1:
                # One bad write must not take the others with it.
                for job in jobs:
                    self._commit([job])
                return
            failure = StoreError(self._explain(error))
            if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.IntegrityError):
                self.trouble = str(failure)
            for job in jobs:
                job.done.set_exception(failure)
            return
        if not self.trouble.startswith(_CORRUPT):
            self.trouble = ""
        for job, result in zip(jobs, results, strict=True):
            job.done.set_result(result)

    def _explain(self, error: Exception) -> str:
        text = str(error)
        if "malformed" in text or "not a database" in text:
            return self._corrupt(text)
        if "full" in text or "I/O error" in text:
            return f"the store {self.path} cannot be written ({text}); free space on that disk, then try again"
        return f"the store {self.path} failed: {text}"

    def _corrupt(self, found: str) -> str:
        return (
            f"{_CORRUPT}: {self.path}: {found}; stop the coordinator, move the file away with its -wal and -shm "
            "(a backup may take its place) and start it again"
        )
