"""The engines of one replica: files that appear in a directory and outlive the processes that made them.

Sockets and pages survive a SIGKILL, a container that restarts keeps its volume, and a sidecar may come before or after
its engine. So nothing is assumed about order: the directory is read twice a second (about 20 microseconds), each pair
of files is one engine process, and a dead one stays listed, as dead, until a successor of its rank shows up. Listing
it keeps a lost rank from being read as a smaller replica. A rank that never came is listed too, when the ranks beside
it say that there is one.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from engine_bridge import note
from sidecar.backends.bridge import ownership
from sidecar.backends.bridge.backend import BridgeEngine
from sidecar.backends.bridge.failed import FailedEngine, MissingEngine
from sidecar.backends.engine import EngineBackend, Unreachable

LOG: Final = logging.getLogger(__name__)

_POLL_S: Final = 0.5
_FILE: Final = re.compile(r"(engine-(\d{1,5})-[0-9a-f]{8})\.(sock|page|failed)")


class EngineDirectory:
    """Implements `sidecar.backends.engine.EngineSet` over a directory."""

    def __init__(self, directory: Path, client: str = "kvctl-sidecar", *, expected: int = 0) -> None:
        """`client` names this process in the engine's log. `expected`: ranks that are listed whether they attached or
        not; 0 for as many as the others know of. The directory need not exist yet.
        """
        self._expected = expected
        self._directory = directory
        self._client = client
        self._engines: dict[str, BridgeEngine] = {}
        self._failed: dict[str, FailedEngine] = {}
        self._missing: dict[int, MissingEngine] = {}
        self._left: set[int] = set()
        """Ranks that were here and stopped properly: a deployment that became smaller, not one with a rank missing."""
        self._born: dict[str, int] = {}
        self._callbacks: list[Callable[[], None]] = []
        self._problem = ""
        self._task: asyncio.Task[None] | None = None

    @property
    def place(self) -> str:
        """The directory."""
        return str(self._directory)

    def on_change(self, callback: Callable[[], None]) -> None:
        """See EngineSet."""
        self._callbacks.append(callback)

    async def start(self) -> None:
        """See EngineSet."""
        await self._scan()
        self._task = asyncio.create_task(self._poll(), name=f"watch {self._directory}")

    async def close(self) -> None:
        """See EngineSet."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.gather(*(engine.close() for engine in self._engines.values()))
        self._engines.clear()

    def engines(self) -> Sequence[EngineBackend]:
        """Live ones, per rank without a live one its latest dead or failed one, and ranks that never attached."""
        every: list[BridgeEngine | FailedEngine] = [*self._engines.values(), *self._failed.values()]
        alive_ranks = {engine.rank for engine in every if not engine.dead}
        shown = [engine for engine in every if not engine.dead]
        latest: dict[int, BridgeEngine | FailedEngine] = {}
        for engine in every:
            if not engine.dead or engine.rank in alive_ranks:
                continue
            known = latest.get(engine.rank)
            if known is None or self._born.get(engine.key, 0) > self._born.get(known.key, 0):
                latest[engine.rank] = engine
        listed: list[EngineBackend] = [*shown, *latest.values()]
        listed += self._never_attached({engine.rank for engine in listed})
        return sorted(listed, key=lambda engine: (engine.rank, engine.key))

    def _never_attached(self, listed: set[int]) -> list[MissingEngine]:
        """Ranks that are expected beside the others, and of which there is nothing here."""
        missing = self._known_to_others() - listed - self._left
        if self._expected:
            # Which ones is a guess, how many is not: on the second of two machines with four ranks each, 4 to 7.
            first = min(listed, default=0) // self._expected * self._expected
            lacking = max(0, self._expected - len(listed)) if listed else 0
            missing = set(sorted(set(range(first, first + 2 * self._expected)) - listed)[:lacking])
        for rank in self._missing.keys() - missing:
            del self._missing[rank]
        for rank in missing:
            self._missing.setdefault(rank, MissingEngine(rank, self.place, expected=self._expected))
        return list(self._missing.values())

    def _known_to_others(self) -> set[int]:
        """Ranks that those connected now know beside them."""
        return {
            rank
            for engine in self._engines.values()
            if not engine.dead and engine.facts is not None
            for rank in engine.facts.local_ranks
        }

    def trouble(self) -> Unreachable | None:
        """See EngineSet."""
        if self._engines or self._failed:
            return None
        if self._problem:
            return Unreachable("NO_ENGINE", self._problem)
        return Unreachable(
            "NO_ENGINE",
            f"no engine has appeared in {self._directory}; check that vLLM runs with kvctl installed, "
            f"KVCTL_ENGINE_DIR={self._directory} and without KVCTL_BRIDGE=0",
        )

    # --- looking -------------------------------------------------------------------------------------------------

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(_POLL_S)
            try:
                await self._scan()
            except Exception:
                LOG.exception("reading the engine directory failed directory=%s", self._directory)

    async def _scan(self) -> None:
        found: dict[str, dict[str, int]] = {}
        ranks: dict[str, int] = {}
        try:
            with os.scandir(self._directory) as entries:
                for entry in entries:
                    match = _FILE.fullmatch(entry.name)
                    if match is None:
                        continue
                    key, rank, kind = match.groups()
                    try:
                        found.setdefault(key, {})[kind] = entry.stat(follow_symlinks=False).st_mtime_ns
                    except FileNotFoundError:
                        continue  # removed since it was listed
                    ranks[key] = int(rank)
            self._set_problem("")
        except OSError as error:
            self._set_problem(_why_unreadable(self._directory, error))
        changed = self._take(found, ranks)
        changed |= await self._let_go(found)
        if changed:
            self._tell()

    def _take(self, found: dict[str, dict[str, int]], ranks: dict[str, int]) -> bool:
        changed = False
        for key, kinds in found.items():
            if key in self._engines or key in self._failed:
                continue
            if not self._trusted():
                return changed
            self._born[key] = max(kinds.values())
            if "sock" in kinds or "page" in kinds:
                self._left.clear()  # another start, of which nothing is known but what its engines say
                self._engines[key] = BridgeEngine(self._directory, key, ranks[key], self._client, self._tell)
            else:
                self._failed[key] = _read_failed(self._directory / f"{key}.failed", key, ranks[key])
                LOG.warning("bridge not attached engine=%s reason=%r", key, self._failed[key].trouble.message)
            changed = True
        return changed

    def _trusted(self) -> bool:
        try:
            ownership.check_directory(self._directory)
        except ownership.NotTrusted as error:
            self._set_problem(str(error))
            return False
        except OSError as error:
            self._set_problem(_why_unreadable(self._directory, error))
            return False
        return True

    async def _let_go(self, found: dict[str, dict[str, int]]) -> bool:
        """Forget engines whose files are gone: at once when they said that they were stopping, or when a successor
        of the rank is there; otherwise they stay, as dead.
        """
        alive_ranks = {engine.rank for engine in self._engines.values() if not engine.dead}
        gone = []
        for key, engine in self._engines.items():
            if not engine.dead:
                continue
            if engine.rank in alive_ranks or (key not in found and engine.stopped_properly):
                gone.append(key)
        for key in gone:
            engine = self._engines.pop(key)
            if engine.rank not in alive_ranks:
                self._left.add(engine.rank)
            await engine.close()
            self._born.pop(key, None)
            LOG.info("engine forgotten engine=%s", key)
        withdrawn = [key for key in self._failed if key not in found]
        for key in withdrawn:
            del self._failed[key]
            self._born.pop(key, None)
        return bool(gone or withdrawn)

    def _set_problem(self, problem: str) -> None:
        if problem and problem != self._problem:
            LOG.warning("engine directory: %s", problem)
        self._problem = problem

    def _tell(self) -> None:
        for callback in self._callbacks:
            callback()


def _why_unreadable(directory: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return f"the engine directory {directory} does not exist yet; vLLM makes it when it starts with kvctl installed"
    try:
        status = directory.stat()
    except OSError:
        return f"the engine directory {directory} cannot be read by uid {os.getuid()}: {error.strerror}"
    return (
        f"the engine directory {directory} cannot be read by uid {os.getuid()}: it belongs to uid {status.st_uid}, "
        f"group {status.st_gid}, mode {stat.S_IMODE(status.st_mode):04o}; set KVCTL_ENGINE_GROUP at the engine to a "
        "group both have"
    )


def _read_failed(path: Path, key: str, rank: int) -> FailedEngine:
    try:
        found = note.read(path)
    except note.NoteError as error:
        return FailedEngine(key, rank, f"its note {path} cannot be read: {error}", 0)
    return FailedEngine(key, rank, found.reason, found.pid)
