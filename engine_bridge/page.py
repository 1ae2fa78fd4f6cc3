"""The memory-mapped page: what an engine did last, readable while its thread is busy, stuck or stopped.

The engine thread rewrites the page at every step (a few microseconds, no system call). Another process copies it under
a sequence lock, so it needs nothing of the engine: no GIL, no answer. The page is also how a
caller learns for certain whether an operation ever started: the engine thread notes the request id in `started`
before it looks at the deadline, so an id that is absent once the deadline has passed was not and will not be executed.

Layout, little endian, one 4 KiB page: MAGIC, version, sequence, then BODY, then STARTED_SLOTS pairs.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
import uuid
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final

MAGIC: Final = b"KVCTLPG\x01"
PAGE_BYTES: Final = 4096
PAGE_VERSION: Final = 1
STARTED_SLOTS: Final = 16

_HEADER: Final = struct.Struct("<8sII")  # magic, version, size
_SEQUENCE: Final = struct.Struct("<Q")
_SEQUENCE_OFFSET: Final = 16
_BODY_OFFSET: Final = _SEQUENCE_OFFSET + _SEQUENCE.size
_BODY: Final = struct.Struct("<16sIiQIQQQQQQQIIIIIIQQQQIIQQ")
_PHASE_OFFSET: Final = _BODY_OFFSET + struct.calcsize("<16sIiQ")
_PHASE: Final = struct.Struct("<IQ")
_STARTED_OFFSET: Final = 1024
_STARTED: Final = struct.Struct("<16sQ")
_READ_TRIES: Final = 64


class Phase(IntEnum):
    """What the engine thread is doing."""

    STARTING = 0
    IDLE = 1
    """Blocked on its input queue: no work."""
    LOOP = 2
    """Between steps."""
    STEP = 3
    """Inside a step: scheduling or waiting for the model."""
    OPERATION = 4
    """Running a kvctl operation."""
    STOPPING = 5
    STOPPED = 6
    """The busy loop has ended."""


@dataclass(slots=True)
class Counters:
    """The body of the page. Times are CLOCK_MONOTONIC nanoseconds, 0 for never."""

    incarnation: bytes = bytes(16)
    pid: int = 0
    data_parallel_rank: int = 0
    process_start_ticks: int = 0
    phase: int = Phase.STARTING
    phase_since_ns: int = 0
    steps: int = 0
    last_step_ns: int = 0
    """End of the last step."""
    last_progress_ns: int = 0
    """End of the last step that scheduled a token."""
    tokens_scheduled: int = 0
    outputs: int = 0
    """Per-request outputs handed out since start; one carries at least one token or a finish."""
    preemptions: int = 0
    running: int = 0
    waiting: int = 0
    """Waiting, all kinds."""
    deferred: int = 0
    """Waiting in a blocked state: remote KV, grammar, streamed input."""
    holding: int = 0
    """Waiting and holding blocks."""
    paused: int = 0
    """vLLM's PauseState value: 0 running, 1 new requests queue, 2 all."""
    sleeping: int = 0
    blocks_total: int = 0
    blocks_free: int = 0
    blocks_cached: int = 0
    """Hashes in the lookup map: equals cached blocks but for duplicates."""
    last_reset_ns: int = 0
    last_reset_mode: int = 0
    """0 none, 1 fail, 2 preempt, 3 keep, 4 one not made by kvctl."""
    flags: int = 0
    """Bit 0: an update was abandoned. Bit 1: woke without a reset."""
    last_operation_ns: int = 0
    last_pause_us: int = 0


FLAG_ABANDONED_UPDATE: Final = 1
FLAG_WOKE_WITHOUT_RESET: Final = 2


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One consistent reading of a page."""

    counters: Counters
    started: tuple[tuple[bytes, int], ...]
    """The last STARTED_SLOTS request ids the engine thread took up, with the time; newest last."""

    def has_started(self, request_id: str) -> bool:
        """Whether the engine thread took up this request id. Reliable while at most STARTED_SLOTS followed it."""
        wanted = uuid.UUID(request_id).bytes
        return any(slot == wanted for slot, _ in self.started)


def _sequence_word(page: mmap.mmap) -> memoryview:
    """The sequence as one aligned machine word, written whole. `struct` writes zeros first and then byte by byte: a
    reader that meets those zeros twice would take half a body for a whole one.
    """
    return memoryview(page)[_SEQUENCE_OFFSET : _SEQUENCE_OFFSET + _SEQUENCE.size].cast("Q")


class PageError(Exception):
    """A page file that cannot be read: absent, cut short, of another version, or never consistent."""


class PageWriter:
    """The engine's end. One thread writes; a failed write never reaches the engine loop as anything but an error."""

    def __init__(self, path: Path, counters: Counters) -> None:
        """Create the file (0600, or what the caller's umask and chmod make of it) and write the first body."""
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            # Not ftruncate: a hole gets its memory at the first store into it, and a file system that has none left
            # kills the process with SIGBUS then.
            os.pwrite(fd, bytes(PAGE_BYTES), 0)
            self._map = mmap.mmap(fd, PAGE_BYTES)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        self.path = path
        self.counters = counters
        self._sequence_word = _sequence_word(self._map)
        self._sequence = 0
        self._next_slot = 0
        self.publish()
        # The magic comes last: a reader that opens the file before this line sees "not ready", not zeros.
        _HEADER.pack_into(self._map, 0, MAGIC, PAGE_VERSION, PAGE_BYTES)

    def publish(self) -> None:
        """Write the counters."""
        c = self.counters
        sequence = self._sequence + 2
        self._sequence_word[0] = sequence - 1
        _BODY.pack_into(
            self._map,
            _BODY_OFFSET,
            c.incarnation,
            c.pid,
            c.data_parallel_rank,
            c.process_start_ticks,
            c.phase,
            c.phase_since_ns,
            c.steps,
            c.last_step_ns,
            c.last_progress_ns,
            c.tokens_scheduled,
            c.outputs,
            c.preemptions,
            c.running,
            c.waiting,
            c.deferred,
            c.holding,
            c.paused,
            c.sleeping,
            c.blocks_total,
            c.blocks_free,
            c.blocks_cached,
            c.last_reset_ns,
            c.last_reset_mode,
            c.flags,
            c.last_operation_ns,
            c.last_pause_us,
        )
        self._sequence_word[0] = sequence
        self._sequence = sequence

    def set_phase(self, phase: Phase, now_ns: int) -> None:
        """Write the phase alone: what a step boundary can afford twice."""
        self.counters.phase = phase
        self.counters.phase_since_ns = now_ns
        sequence = self._sequence + 2
        self._sequence_word[0] = sequence - 1
        _PHASE.pack_into(self._map, _PHASE_OFFSET, phase, now_ns)
        self._sequence_word[0] = sequence
        self._sequence = sequence

    def note_started(self, request_id: str, now_ns: int) -> None:
        """Put a request id on the record of operations taken up, before its deadline is looked at."""
        offset = _STARTED_OFFSET + self._next_slot * _STARTED.size
        sequence = self._sequence + 2
        self._sequence_word[0] = sequence - 1
        _STARTED.pack_into(self._map, offset, uuid.UUID(request_id).bytes, now_ns)
        self._sequence_word[0] = sequence
        self._sequence = sequence
        self._next_slot = (self._next_slot + 1) % STARTED_SLOTS

    def close(self) -> None:
        """Unmap. The file stays until its owner removes it."""
        self._sequence_word.release()
        self._map.close()


class PageReader:
    """The sidecar's end."""

    def __init__(self, path: Path) -> None:
        """Open the file; PageError says what is wrong with it."""
        self.path = path
        self._fd = -1
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)  # a pipe would wait
        except OSError as error:
            raise PageError(f"{path}: {error.strerror}") from error
        self._fd = fd
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode):
                raise PageError(f"{path}: not a regular file")
            if found.st_size < PAGE_BYTES:
                raise self._short(found.st_size)
        except BaseException:
            self.close()
            raise

    def read(self) -> Snapshot:
        """One consistent snapshot; PageError when there is none within a few tries or the page is not ours."""
        for _ in range(_READ_TRIES):
            page = self._copy()
            magic, version, _ = _HEADER.unpack_from(page, 0)
            if magic != MAGIC:
                raise PageError(f"{self.path}: not an engine page")
            if version != PAGE_VERSION:
                raise PageError(f"{self.path}: page version {version}, this sidecar reads {PAGE_VERSION}")
            (sequence,) = _SEQUENCE.unpack_from(page, _SEQUENCE_OFFSET)
            # Twice the same bytes: in whatever order the kernel copies and a processor shows what was stored, half a
            # body with the sequence of a whole one does not come twice.
            if sequence % 2 or page != self._copy():
                continue
            slots = [_STARTED.unpack_from(page, _STARTED_OFFSET + i * _STARTED.size) for i in range(STARTED_SLOTS)]
            taken = sorted((slot for slot in slots if slot[1]), key=lambda slot: slot[1])
            return Snapshot(Counters(*_BODY.unpack_from(page, _BODY_OFFSET)), tuple(taken))
        # The writer may have been stopped between its two sequence writes; the reading is then torn for good.
        raise PageError(f"{self.path}: no consistent reading; the engine was stopped while writing it")

    def _copy(self) -> bytes:
        """The page as it is now. Copied by the kernel and not mapped: a mapped file that somebody cuts short kills
        its reader with SIGBUS.
        """
        try:
            page = os.pread(self._fd, PAGE_BYTES, 0)
        except OSError as error:
            raise PageError(f"{self.path}: cannot be read: {error.strerror}") from error
        if len(page) < PAGE_BYTES:
            raise self._short(len(page))
        return page

    def _short(self, size: int) -> PageError:
        return PageError(f"{self.path}: {size} bytes, expected {PAGE_BYTES}")

    def close(self) -> None:
        """Close the file; harmless when it is closed."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
