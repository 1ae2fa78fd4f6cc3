"""The memory-mapped page: whole readings or none."""

from __future__ import annotations

import dataclasses
import errno
import mmap
import multiprocessing
import os
import struct
import time
from pathlib import Path

import pytest

from engine_bridge.page import (
    PAGE_BYTES,
    STARTED_SLOTS,
    Counters,
    PageError,
    PageReader,
    PageWriter,
    Phase,
)
from tests.fake_engine.client import new_id


def test_every_counter_arrives(tmp_path: Path) -> None:
    counters = Counters()
    for number, field in enumerate(dataclasses.fields(Counters), 1):
        setattr(counters, field.name, bytes(range(16)) if field.name == "incarnation" else number)
    writer = PageWriter(tmp_path / "p", counters)
    writer.publish()
    assert PageReader(tmp_path / "p").read().counters == counters


def test_the_phase_alone_can_be_written(tmp_path: Path) -> None:
    writer = PageWriter(tmp_path / "p", Counters(steps=7, pid=9))
    writer.set_phase(Phase.STEP, 12345)
    read = PageReader(tmp_path / "p").read().counters
    assert (read.phase, read.phase_since_ns, read.steps, read.pid) == (Phase.STEP, 12345, 7, 9)
    writer.publish()
    assert PageReader(tmp_path / "p").read().counters.phase == Phase.STEP


def test_the_last_started_ids_are_kept_in_order_and_older_ones_fall_out(tmp_path: Path) -> None:
    writer = PageWriter(tmp_path / "p", Counters())
    ids = [new_id() for _ in range(STARTED_SLOTS + 3)]
    for number, request_id in enumerate(ids, 1):
        writer.note_started(request_id, number)
    snapshot = PageReader(tmp_path / "p").read()
    assert [snapshot.has_started(request_id) for request_id in ids] == [False] * 3 + [True] * STARTED_SLOTS
    assert [at for _, at in snapshot.started] == list(range(4, STARTED_SLOTS + 4))


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "0 bytes"), (b"x" * 100, "100 bytes"), (bytes(PAGE_BYTES), "not an engine page")],
)
def test_what_is_no_page_is_refused_with_what_was_found(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "p").write_bytes(content)
    with pytest.raises(PageError, match=message):
        PageReader(tmp_path / "p").read()


def test_a_page_that_is_not_there_is_an_error_naming_it(tmp_path: Path) -> None:
    with pytest.raises(PageError, match="No such file"):
        PageReader(tmp_path / "absent")


def test_a_pipe_in_the_place_of_a_page_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p")
    with pytest.raises(PageError, match="not a regular file"):
        PageReader(tmp_path / "p")


@pytest.mark.parametrize("size", [0, 100, PAGE_BYTES - 1])
def test_a_page_that_is_cut_short_while_it_is_open_is_an_error_and_no_signal(tmp_path: Path, size: int) -> None:
    PageWriter(tmp_path / "p", Counters())
    reader = PageReader(tmp_path / "p")
    assert reader.read().counters == Counters()
    os.truncate(tmp_path / "p", size)
    with pytest.raises(PageError, match=f"{size} bytes, expected {PAGE_BYTES}"):
        reader.read()
    reader.close()


def test_a_link_in_the_place_of_a_page_is_not_followed(tmp_path: Path) -> None:
    PageWriter(tmp_path / "elsewhere", Counters())
    (tmp_path / "p").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PageError, match="symbolic links"):
        PageReader(tmp_path / "p")


def test_a_closed_reader_reads_no_file_that_took_its_place(tmp_path: Path) -> None:
    PageWriter(tmp_path / "p", Counters())
    reader = PageReader(tmp_path / "p")
    reader.close()
    reader.close()
    other = PageReader(tmp_path / "p")
    with pytest.raises(PageError, match="cannot be read"):
        reader.read()
    other.close()


def test_a_reader_that_is_refused_leaves_no_file_open(tmp_path: Path) -> None:
    (tmp_path / "p").write_bytes(b"short")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        with pytest.raises(PageError):
            PageReader(tmp_path / "p")
    assert len(os.listdir("/proc/self/fd")) < before + 20


def test_a_page_of_another_version_is_refused(tmp_path: Path) -> None:
    PageWriter(tmp_path / "p", Counters())
    with (tmp_path / "p").open("r+b") as file:
        file.seek(8)
        file.write(struct.pack("<I", 9))
    with pytest.raises(PageError, match="page version 9"):
        PageReader(tmp_path / "p").read()


def test_a_page_whose_writer_stopped_in_the_middle_gives_no_reading(tmp_path: Path) -> None:
    PageWriter(tmp_path / "p", Counters())
    with (tmp_path / "p").open("r+b") as file:
        file.seek(16)
        file.write(struct.pack("<Q", 7))
    with pytest.raises(PageError, match="no consistent reading"):
        PageReader(tmp_path / "p").read()


@pytest.mark.parametrize("torn_copies", [1, 2, 5])
def test_a_copy_taken_while_the_body_was_being_written_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn_copies: int
) -> None:
    """Also where it shows the sequence of a whole page."""
    PageWriter(tmp_path / "p", Counters(steps=7))
    copies = 0

    def pread(fd: int, length: int, offset: int) -> bytes:
        nonlocal copies
        copies += 1
        page = copy(fd, length, offset)
        return page[:64] + bytes([copies]) * 64 + page[128:] if copies <= torn_copies else page

    copy = os.pread
    monkeypatch.setattr(os, "pread", pread)
    assert PageReader(tmp_path / "p").read().counters == Counters(steps=7)


def test_a_page_is_never_made_over_an_existing_file(tmp_path: Path) -> None:
    (tmp_path / "p").write_text("somebody's")
    with pytest.raises(FileExistsError):
        PageWriter(tmp_path / "p", Counters())
    assert (tmp_path / "p").read_text() == "somebody's"


def test_a_page_has_its_memory_before_anything_is_stored_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store into a hole kills the engine where the file system is full."""
    taken = []
    map_file = mmap.mmap

    def mapped(fd: int, length: int) -> mmap.mmap:
        taken.append(os.fstat(fd).st_blocks * 512)
        return map_file(fd, length)

    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", mapped)
        PageWriter(tmp_path / "p", Counters()).close()
    assert taken[0] >= PAGE_BYTES


def test_a_page_for_which_there_is_no_room_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        PageWriter(tmp_path / "p", Counters())
    assert list(tmp_path.iterdir()) == []


def _write_for_ever(path: str, ready: object) -> None:
    counters = Counters()
    writer = PageWriter(Path(path), counters)
    ready.set()  # type: ignore[attr-defined]
    number = 0
    while os.getppid() != 1:
        number += 1
        counters.steps = counters.outputs = counters.blocks_free = counters.last_pause_us = number
        writer.publish()


def test_readers_never_see_half_a_page_while_another_process_writes(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=_write_for_ever, args=(str(tmp_path / "p"), ready), daemon=True)
    process.start()
    try:
        assert ready.wait(30)
        reader = PageReader(tmp_path / "p")
        seen = set()
        until = time.monotonic() + 1
        while time.monotonic() < until:
            try:
                counters = reader.read().counters
            except PageError as error:
                assert "no consistent reading" in str(error)  # noqa: PT017 - never half a page; none at all is fine
                continue
            assert counters.steps == counters.outputs == counters.blocks_free == counters.last_pause_us
            seen.add(counters.steps)
        assert len(seen) > 2
    finally:
        process.kill()
        process.join(10)


def test_a_page_is_one_page_of_memory() -> None:
    assert PAGE_BYTES % mmap.PAGESIZE == 0
