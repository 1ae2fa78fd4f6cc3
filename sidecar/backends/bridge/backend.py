"""One engine process behind its socket and its page.

Keeps one connection, and opens it again when it breaks while the process lives. What a mutation's caller is told when
no answer comes is decided here, from three witnesses: whether the frame was sent, what the page shows as taken up, and
what /proc says of the process. The page is decisive: the engine thread notes a request id before it looks at the
deadline, so an id that is absent after the deadline was not executed and never will be.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from engine_bridge import page, protocol
from sidecar.backends.bridge import ownership, process
from sidecar.backends.bridge.connection import Connection, ConnectionGone, NoAnswer, Refused, Reply
from sidecar.backends.engine import Answered, EngineFacts, Liveness, Lost, Submitted, Unreachable

LOG: Final = logging.getLogger(__name__)

_FIRST_RETRY_S: Final = 0.1
_LONGEST_RETRY_S: Final = 2.0
_MOST_RANKS: Final = 1024
"""Beside one engine. What an engine says is not believed without bounds."""

R = TypeVar("R", protocol.Found, protocol.Cancelled, protocol.Evidence)


class BridgeEngine:
    """Implements `sidecar.backends.engine.EngineBackend`."""

    def __init__(self, directory: Path, key: str, rank: int, client: str, changed: Callable[[], None]) -> None:
        """`key` is the file name without suffix. `changed` is called when it connects or disconnects."""
        self.key = key
        self.rank = rank
        self._socket_path = directory / f"{key}.sock"
        self._page_path = directory / f"{key}.page"
        self._client = client
        self._changed = changed
        self._connection: Connection | None = None
        self._welcome: protocol.Welcome | None = None
        self._attached_at = 0.0
        self._peer_pid = 0
        self._reader: page.PageReader | None = None
        self._refusal: Unreachable | None = None
        self._gone = ""
        self._news = asyncio.Event()
        self._task = asyncio.create_task(self._keep_connected(), name=f"engine {key}")

    async def close(self) -> None:
        """Stop reconnecting, close the connection and the page."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        if self._connection is not None:
            self._connection.close()
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    # --- what is known -------------------------------------------------------------------------------------------

    @property
    def incarnation(self) -> str:
        """From the handshake, else from the page, else the eight digits in the file name."""
        if self._welcome is not None:
            return self._welcome.incarnation
        snapshot = self._page_or_none()
        return snapshot.counters.incarnation.hex() if snapshot is not None else self.key.rpartition("-")[2]

    @property
    def facts(self) -> EngineFacts | None:
        """None until the handshake."""
        w = self._welcome
        if w is None:
            return None
        return EngineFacts(
            data_parallel_rank=w.data_parallel_rank,
            incarnation=w.incarnation,
            backend="bridge",
            pid=w.pid,
            data_parallel_size=w.data_parallel_size,
            local_ranks=tuple(rank for rank in w.local_ranks[:_MOST_RANKS] if rank >= 0),
            vllm_version=w.vllm_version,
            bridge_version=w.bridge_version,
            model=w.model,
            block_size=w.block_size,
            blocks=w.blocks,
            prefix_caching=w.prefix_caching,
            attached_at=self._attached_at,
            capabilities=w.capabilities,
        )

    @property
    def connected(self) -> bool:
        """Whether the handshake is done and the connection stands."""
        return self._connection is not None and self._welcome is not None and not self._connection.closed

    @property
    def dead(self) -> bool:
        """Whether nothing can come of this engine any more: its process is gone."""
        return bool(self._gone)

    @property
    def stopped_properly(self) -> bool:
        """Whether its page's last word was that it stops."""
        snapshot = self._page_or_none()
        return snapshot is not None and snapshot.counters.phase >= page.Phase.STOPPING

    @property
    def trouble(self) -> Unreachable | None:
        """Why it cannot be asked now."""
        if self.connected:
            return None
        if self._gone:
            return Unreachable("ENGINE_DEAD", self._gone)
        if self._refusal is not None:
            return self._refusal
        snapshot = self._page_or_none()
        state = self.liveness()
        if state is Liveness.DEAD:
            return Unreachable("ENGINE_DEAD", f"{self._name} is gone: its process has ended")
        if snapshot is None or snapshot.counters.phase == page.Phase.STARTING:
            return Unreachable("ENGINE_STARTING", f"{self._name} is starting")
        if snapshot.counters.phase >= page.Phase.STOPPING:
            return Unreachable("ENGINE_STOPPING", f"{self._name} is shutting down")
        return Unreachable("ENGINE_NOT_ANSWERING", f"{self._name} has not answered yet: {self._doing()}")

    def liveness(self) -> Liveness:
        """The process as /proc shows it now."""
        if self._peer_pid:
            ticks = self._welcome.process_start_ticks if self._welcome is not None else 0
            return process.liveness(self._peer_pid, ticks)
        snapshot = self._page_or_none()
        if snapshot is None or not snapshot.counters.process_start_ticks:
            return Liveness.UNKNOWN
        found = process.stat(snapshot.counters.pid)
        # The page has the pid of the engine's own namespace: only a matching start time proves that it is ours too.
        if found is None or found[1] != snapshot.counters.process_start_ticks:
            return Liveness.UNKNOWN
        return process.liveness(snapshot.counters.pid, snapshot.counters.process_start_ticks)

    def _page_or_none(self) -> page.Snapshot | None:
        try:
            return self.page()
        except page.PageError as error:
            LOG.debug("page not readable engine=%s reason=%r", self.key, str(error))
            return None

    def page(self) -> page.Snapshot:
        """The engine's page as it is now; PageError says why it cannot be read."""
        if self._reader is None:
            self._reader = page.PageReader(self._page_path)
        return self._reader.read()

    @property
    def _name(self) -> str:
        pid = self._peer_pid or (self._welcome.pid if self._welcome is not None else 0)
        return f"engine {self.rank}" + (f" (pid {pid})" if pid else "")

    def _doing(self) -> str:
        """What the engine's thread does, in words, for an error message."""
        state = self.liveness()
        if state is Liveness.STOPPED:
            return f"its process is stopped (SIGSTOP or a debugger); kill -CONT {self._peer_pid or 'PID'} resumes it"
        snapshot = self._page_or_none()
        if snapshot is None:
            return "its page cannot be read"
        since = (time.monotonic_ns() - snapshot.counters.phase_since_ns) / 1e9
        try:
            phase = page.Phase(snapshot.counters.phase).name.lower()
        except ValueError:
            phase = f"phase {snapshot.counters.phase}"
        return f"its thread has been in phase {phase!r} for {since:.1f} s"

    # --- connecting ----------------------------------------------------------------------------------------------

    async def _keep_connected(self) -> None:
        """Until the process is gone: connect, shake hands, wait for the end, again. The wait grows to 2 s."""
        wait = _FIRST_RETRY_S
        while not self._gone:
            if await self._connect_once():
                wait = _FIRST_RETRY_S
                continue
            self._tell()
            await asyncio.sleep(wait)
            wait = min(wait * 2, _LONGEST_RETRY_S)

    async def _connect_once(self) -> bool:
        """One connection from its start to its end; False when none came about. Sets what `trouble` tells."""
        try:
            ownership.check_directory(self._socket_path.parent)
            # A file has the wall clock only; when that steps later, records must not seem to reach back further.
            attached_at = time.monotonic() - max(0.0, time.time() - self._socket_path.stat().st_mtime)
            connection = await Connection.open(self._socket_path)
        except ownership.NotTrusted as error:
            self._refusal = Unreachable("ENGINE_NOT_TRUSTED", str(error))
            return False
        except PermissionError:
            self._refusal = Unreachable("ENGINE_NOT_TRUSTED", ownership.why_denied(self._socket_path))
            return False
        except OSError as error:
            self._look_at_refusal(error)
            return False
        began = time.monotonic()
        ended = asyncio.Event()
        connection.on_closed(ended.set)
        self._peer_pid = connection.peer.pid
        self._refusal = None
        self._connection = connection
        try:
            welcome = await connection.handshake(self._client)
            if self._welcome is not None and self._welcome.incarnation != welcome.incarnation:
                raise Refused(f"its incarnation changed to {welcome.incarnation}: another engine took its socket")
            self._welcome = welcome
            self._attached_at = max(attached_at, self._attached_at) if self._attached_at else attached_at
            LOG.info(
                "engine connected engine=%s pid=%d vllm=%s model=%s",
                self.key,
                welcome.pid,
                welcome.vllm_version,
                welcome.model,
            )
            self._tell()
            await ended.wait()
            LOG.info("engine disconnected engine=%s reason=%r", self.key, connection.closed_because)
        except Refused as error:
            self._refusal = Unreachable("BRIDGE_NOT_ATTACHED", f"{self._name} refused this sidecar: {error}")
            LOG.warning("engine refused the connection engine=%s reason=%r", self.key, str(error))
            return False
        except (ConnectionGone, NoAnswer) as error:
            LOG.info("engine connection lost in the handshake engine=%s reason=%r", self.key, str(error))
            return False
        finally:
            connection.close()
            self._connection = None
            if self.liveness() is Liveness.DEAD:
                self._gone = f"{self._name} is gone: its process has ended"
            self._tell()
        return time.monotonic() - began > _FIRST_RETRY_S  # one that breaks at once must not be a busy loop

    def _look_at_refusal(self, error: OSError) -> None:
        state = self.liveness()
        if isinstance(error, ConnectionRefusedError | FileNotFoundError) and state in (Liveness.DEAD, Liveness.UNKNOWN):
            snapshot = self._page_or_none()
            starting = snapshot is not None and snapshot.counters.phase == page.Phase.STARTING
            if isinstance(error, FileNotFoundError) and starting and self._welcome is None:
                return  # the page comes before the socket
            self._gone = f"{self._name} is gone: nobody listens on {self._socket_path} ({error.strerror})"
            return
        if isinstance(error, ConnectionRefusedError | FileNotFoundError):
            self._refusal = None  # alive without a listener: starting or stopping, the page tells
            return
        self._refusal = Unreachable("ENGINE_NOT_ANSWERING", f"{self._name}: {self._socket_path}: {error.strerror}")

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
        self._changed()

    async def _ready(self, deadline_ns: int) -> Connection | Unreachable | None:
        """The connection, waiting for it while the process lives; None when the deadline comes first."""
        while True:
            if self.connected:
                return self._connection
            trouble = self.trouble
            if trouble is not None and trouble.reason != "ENGINE_NOT_ANSWERING":
                return trouble
            news = self._news
            left = (deadline_ns - time.monotonic_ns()) / 1e9
            if left <= 0:
                return None
            try:
                async with asyncio.timeout(min(left, 0.25)):  # a process that dies unconnected brings no news
                    await news.wait()
            except TimeoutError:
                continue

    # --- asking --------------------------------------------------------------------------------------------------

    async def submit(self, mutation: protocol.Mutation, deadline_ns: int) -> Submitted:
        """See EngineBackend. A connection that breaks while the process lives is opened again and the same request
        id sent again: the engine joins it to what runs, or repeats what is on record.
        """
        began = time.monotonic_ns()
        patience = deadline_ns + _grace_ns(deadline_ns - began)
        sent = False
        try:
            while True:
                ready = await self._ready(patience)
                if isinstance(ready, Unreachable):
                    return self._died() if sent else ready
                if ready is None or (not sent and time.monotonic_ns() >= deadline_ns):
                    return self._lost(mutation, began, deadline_ns, sent=sent)
                call = ready.next_call()
                request = msgspec.structs.replace(mutation, call=call, deadline_ns=deadline_ns)
                before, sent = sent, True
                try:
                    return self._read_outcome(await ready.call(request, call, patience))
                except NoAnswer as error:
                    return self._lost(mutation, began, deadline_ns, sent=before or error.sent)
                except ConnectionGone as error:
                    sent = before or error.sent
                    await asyncio.sleep(0.01)  # let the keeper see the end before it is asked again
        except asyncio.CancelledError:
            if not sent:
                raise
            return self._lost(mutation, began, deadline_ns, sent=True)

    async def renew(self, renewal: protocol.Renew, deadline_ns: int) -> Submitted:
        """See EngineBackend."""
        answer = await self._ask(lambda call: msgspec.structs.replace(renewal, call=call), deadline_ns)
        return answer if isinstance(answer, Lost | Unreachable) else self._read_outcome(answer)

    async def lookup(self, request_id: str, deadline_ns: int) -> protocol.Found | Lost | Unreachable:
        """See EngineBackend."""
        return self._expect(
            protocol.Found, await self._ask(lambda call: protocol.Lookup(call, request_id), deadline_ns)
        )

    async def cancel(self, request_id: str, deadline_ns: int) -> protocol.Cancelled | Lost | Unreachable:
        """See EngineBackend."""
        return self._expect(
            protocol.Cancelled, await self._ask(lambda call: protocol.Cancel(call, request_id), deadline_ns)
        )

    async def evidence(self, timeout_s: float, contiguity_blocks: int = 4096) -> protocol.Evidence | Lost | Unreachable:
        """See EngineBackend."""
        deadline_ns = time.monotonic_ns() + int(timeout_s * 1e9)
        return self._expect(
            protocol.Evidence, await self._ask(lambda call: protocol.Admission(call, contiguity_blocks), deadline_ns)
        )

    async def _ask(self, build: Callable[[int], protocol.Request], deadline_ns: int) -> Reply | Lost | Unreachable:
        ready = await self._ready(deadline_ns)
        if isinstance(ready, Unreachable):
            return ready
        if ready is None:
            return Lost("not_executed", f"{self._name} did not answer in time: {self._doing()}")
        if time.monotonic_ns() >= deadline_ns:
            return Lost("not_executed", f"{self._name} was not asked: there was no time left")
        call = ready.next_call()
        try:
            return await ready.call(build(call), call, deadline_ns)
        except NoAnswer as error:
            return Lost(
                "unknown" if error.sent else "not_executed", f"{self._name} did not answer in time: {self._doing()}"
            )
        except ConnectionGone:
            await asyncio.sleep(0.01)
            return self.trouble or Unreachable("ENGINE_NOT_ANSWERING", f"{self._name} broke the connection")

    def _expect(self, wanted: type[R], answer: Reply | Lost | Unreachable) -> R | Lost | Unreachable:
        if isinstance(answer, wanted | Lost | Unreachable):
            return answer
        if isinstance(answer, protocol.Fault):
            return Unreachable("PROTOCOL_ERROR", f"{self._name} could not answer: {answer.message}")
        return Unreachable(
            "PROTOCOL_ERROR", f"{self._name} answered with {type(answer).__name__} instead of {wanted.__name__}"
        )

    def _read_outcome(self, reply: Reply) -> Submitted:
        if isinstance(reply, protocol.Outcome):
            return Answered(reply)
        if isinstance(reply, protocol.Fault):
            return Unreachable("PROTOCOL_ERROR", f"{self._name} could not read the request: {reply.message}", sent=True)
        return Unreachable(
            "PROTOCOL_ERROR", f"{self._name} answered with {type(reply).__name__} instead of Outcome", sent=True
        )

    # --- lost answers --------------------------------------------------------------------------------------------

    def _died(self) -> Unreachable:
        return Unreachable(
            "ENGINE_DIED_DURING_OPERATION",
            f"{self._name} went away while the operation was under way; a successor starts with a cold cache",
            sent=True,
        )

    def _lost(self, mutation: protocol.Mutation, began_ns: int, deadline_ns: int, *, sent: bool) -> Submitted:
        """What can be said when no answer came by the deadline."""
        doing = self._doing()
        if not sent:
            return Lost("not_executed", f"{self._name} was never reached, and will not run it: {doing}")
        if self.liveness() is Liveness.DEAD:
            return self._died()
        snapshot = self._page_or_none()
        if snapshot is None:
            return Lost("unknown", f"{self._name} gave no answer and its page cannot be read; ask again by request id")
        if snapshot.has_started(mutation.request_id):
            return Lost("unknown", f"{self._name} had started it and gave no answer: {doing}; ask again by request id")
        overwritten = len(snapshot.started) == page.STARTED_SLOTS and snapshot.started[0][1] > began_ns
        if overwritten or time.monotonic_ns() <= deadline_ns:
            return Lost("unknown", f"{self._name} gave no answer: {doing}; ask again by request id")
        if isinstance(mutation, protocol.Reset) and mutation.wait_for_idle:
            # It waits unstarted until a moment comes, and its "never" can be late by one long step.
            message = f"{self._name} found no moment without a held block by the deadline, and will not run it: {doing}"
            return Lost("not_executed", message, "NEVER_IDLE")
        return Lost("not_executed", f"{self._name} did not take it up by the deadline and will not run it: {doing}")


def _grace_ns(budget_ns: int) -> int:
    """How long after the engine's deadline its answer "expired" may still arrive: 2%, 20 ms to 200 ms."""
    return min(max(20_000_000, budget_ns // 50), 200_000_000)
