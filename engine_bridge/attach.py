"""One engine core gets one bridge: files, socket, page, waker, dispatcher.

The bridge is a guest in the engine's process. Whatever goes wrong with it, the engine serves on: an attach that fails
leaves one log line and a `.failed` note for the sidecar, and a defect later detaches the bridge in the same way. No
method that the engine's loop calls ever raises.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Concatenate, Final, ParamSpec

from engine_bridge import __version__, places, protocol
from engine_bridge.dispatcher import Dispatcher
from engine_bridge.listener import Listener
from engine_bridge.page import FLAG_ABANDONED_UPDATE, FLAG_WOKE_WITHOUT_RESET, Counters, PageWriter, Phase
from engine_bridge.port import EnginePort
from engine_bridge.waker import Waker

RESET_MODES: Final[dict[str, int]] = {"fail": 1, "preempt": 2, "keep": 3, "foreign": 4}
"""Values of Counters.last_reset_mode."""

logger = logging.getLogger("vllm.kvctl")


P = ParamSpec("P")


def _never_raises(method: Callable[Concatenate[Bridge, P], None]) -> Callable[Concatenate[Bridge, P], None]:
    """For what the engine's loop calls: a defect of ours detaches the bridge and goes no further."""

    def guarded(self: Bridge, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if self.closed:
            return
        try:
            method(self, *args, **kwargs)
        except Exception as error:
            logger.exception("kvctl: the bridge failed and detached; the engine serves on")
            self.break_down(error)

    guarded.__doc__ = method.__doc__
    return guarded


class Bridge:
    """What the loop's hooks call, in the order the loop runs. All methods but `wake` belong to the engine's thread."""

    def __init__(
        self,
        port: EnginePort,
        *,
        wake: Callable[[], None],
        stopping: Callable[[], bool],
        directory: Path,
        group: str,
    ) -> None:
        """Open everything; raises what stands in the way, leaving nothing behind."""
        identity = port.identity
        incarnation = uuid.uuid4()
        self.incarnation = incarnation.hex
        self.name = places.engine_name(identity.data_parallel_rank, self.incarnation)
        self.closed = False
        self.on_breakdown: Callable[[], None] = lambda: None
        self.before_boundary: Callable[[], None] = lambda: None
        self.before_step: Callable[[], None] = lambda: None
        self._port = port
        self._directory = directory
        self._start_ticks = places.process_start_ticks()
        places.check_socket_path(directory / f"{self.name}.sock")
        places.remove_stale(directory, identity.data_parallel_rank)
        self.counters = Counters(
            incarnation=incarnation.bytes,
            pid=os.getpid(),
            data_parallel_rank=identity.data_parallel_rank,
            process_start_ticks=self._start_ticks,
            blocks_total=identity.blocks,
            phase_since_ns=time.monotonic_ns(),
        )
        self.page = PageWriter(directory / f"{self.name}.page", self.counters)
        with ExitStack() as undo:
            undo.callback(self.page.path.unlink, missing_ok=True)
            undo.callback(self.page.close)
            places.share(self.page.path, group, 0o600, 0o640)
            self._dispatcher = Dispatcher(port, self, clock=time.monotonic_ns, stopping=stopping)
            self._listener = Listener(
                directory / f"{self.name}.sock", self._welcome, self._dispatcher.handle, group=group
            )
            undo.callback(self._listener.close, "the bridge could not attach")
            self._waker = Waker(self._listener.fileno(), wake)
            undo.pop_all()

    def _welcome(self) -> protocol.Welcome:
        identity = self._port.identity
        return protocol.Welcome(
            version=protocol.PROTOCOL_VERSION,
            incarnation=self.incarnation,
            pid=os.getpid(),
            process_start_ticks=self._start_ticks,
            data_parallel_rank=identity.data_parallel_rank,
            data_parallel_size=identity.data_parallel_size,
            vllm_version=identity.vllm_version,
            bridge_version=__version__,
            model=identity.model,
            block_size=identity.block_size,
            blocks=identity.blocks,
            prefix_caching=identity.prefix_caching,
            capabilities=self._port.capabilities(),
            monotonic_ns=time.monotonic_ns(),
            local_ranks=list(identity.local_ranks),
        )

    # --- what the loop calls -------------------------------------------------------------------------------------

    @_never_raises
    def boundary(self) -> None:
        """Between two steps: go on with what runs, take what arrived."""
        self.before_boundary()
        dispatcher = self._dispatcher
        if not dispatcher.quiet:
            dispatcher.tick()
        self._listener.drain()

    @_never_raises
    def step_begins(self) -> None:
        """The loop enters a step."""
        self.before_step()
        self.page.set_phase(Phase.STEP, time.monotonic_ns())

    @_never_raises
    def step_ended(self, read_counters: Callable[[Counters, int], None]) -> None:
        """The loop has left a step: `read_counters` fills in the engine's counts at the given time."""
        now = time.monotonic_ns()
        counters = self.counters
        counters.steps += 1
        counters.last_step_ns = now
        counters.phase = Phase.LOOP
        counters.phase_since_ns = now
        read_counters(counters, now)
        self.page.publish()

    @_never_raises
    def observe(self, read_counters: Callable[[Counters, int], None], phase: Phase) -> None:
        """Publish counts outside a step, in `phase`."""
        now = time.monotonic_ns()
        if self.counters.phase != phase:
            self.counters.phase = phase
            self.counters.phase_since_ns = now
        read_counters(self.counters, now)
        self.page.publish()

    @_never_raises
    def arm(self) -> None:
        """The engine is about to block for lack of work: from here on the waker watches for us."""
        self._waker.arm(self._dispatcher.next_timer_ns(), at_once=self._dispatcher.wants_turn)

    @property
    def wants_turn(self) -> bool:
        """Whether an operation has work left that needs no step first."""
        return not self.closed and self._dispatcher.wants_turn

    @property
    def waits_for_step(self) -> bool:
        """Whether that work needs the engine to step first."""
        return not self.closed and self._dispatcher.waits_for_step

    def close(self) -> None:
        """The engine's loop has ended: answer who waits, remove our files."""
        if self.closed:
            return
        self.closed = True
        try:
            self._dispatcher.stop()
            self.page.set_phase(Phase.STOPPED, time.monotonic_ns())
        except Exception:
            logger.exception("kvctl: stopping the bridge failed")
        self._remove("the engine is shutting down")

    def after_fork(self) -> None:
        """In a forked child: the engine, its socket and its files are the parent's."""
        if self.closed:
            return
        self.closed = True
        self._waker.close_inherited()
        self._listener.close_inherited()

    def _remove(self, reason: str) -> None:
        """Close and remove all that is ours, whatever becomes of the single pieces."""
        try:
            with ExitStack() as pieces:
                pieces.callback(self.page.path.unlink, missing_ok=True)
                pieces.callback(self.page.close)
                pieces.callback(self._listener.close, reason)
                pieces.callback(self._waker.close)
        except Exception:
            logger.exception("kvctl: closing the bridge failed")

    def break_down(self, error: Exception) -> None:
        """A defect of ours: get out of the engine's way for good, and leave a note."""
        self.closed = True
        try:
            self._dispatcher.stop()
        except Exception:
            logger.exception("kvctl: an operation could not be ended")
        self._remove("the bridge had a defect and detached; the engine serves on")
        rank = self._port.identity.data_parallel_rank
        places.write_failure(self._directory, self.name, f"detached: {type(error).__name__}: {error}", rank)
        try:
            self.on_breakdown()
        except Exception:
            logger.exception("kvctl: a hook could not be taken out")

    # --- Recorder, for the dispatcher ----------------------------------------------------------------------------

    def note_started(self, request_id: str, now_ns: int) -> None:
        """See dispatcher.Recorder."""
        self.page.note_started(request_id, now_ns)

    def note_reset(self, mode: protocol.RunningMode, now_ns: int) -> None:
        """See dispatcher.Recorder."""
        self.counters.last_reset_ns = now_ns
        self.counters.last_reset_mode = RESET_MODES[mode]
        self.counters.flags &= ~FLAG_WOKE_WITHOUT_RESET

    def note_working(self, working: bool) -> None:
        """See dispatcher.Recorder."""
        self.page.set_phase(Phase.OPERATION if working else Phase.LOOP, time.monotonic_ns())

    def note_operation(self, now_ns: int, longest_us: int) -> None:
        """See dispatcher.Recorder."""
        self.counters.last_operation_ns = now_ns
        self.counters.last_pause_us = longest_us
        self.page.publish()

    def note_abandoned(self, abandoned: bool) -> None:
        """See dispatcher.Recorder."""
        flags = self.counters.flags & ~FLAG_ABANDONED_UPDATE
        self.counters.flags = flags | (FLAG_ABANDONED_UPDATE if abandoned else 0)
        self.page.publish()


def attach(
    make_port: Callable[[], EnginePort],
    *,
    rank: int,
    wake: Callable[[], None],
    stopping: Callable[[], bool],
    directory: Path | None = None,
) -> Bridge | None:
    """A bridge for one engine, or None with one log line and a note for the sidecar.

    `directory` overrides KVCTL_ENGINE_DIR and the rule behind it.
    """
    configured = directory is not None or bool(os.environ.get("KVCTL_ENGINE_DIR"))
    directory = directory or protocol.default_engine_dir()
    group = os.environ.get("KVCTL_ENGINE_GROUP", "")
    try:
        places.prepare_directory(directory, group, configured=configured)
        bridge = Bridge(make_port(), wake=wake, stopping=stopping, directory=directory, group=group)
    except Exception as error:
        # A guest that cannot get in must not keep the house from opening.
        reason = str(error) if isinstance(error, places.AttachError | OSError) else f"{type(error).__name__}: {error}"
        unexpected = not isinstance(error, places.AttachError | OSError)
        logger.warning("kvctl: the engine bridge is off, the engine serves without it: %s", reason, exc_info=unexpected)
        places.write_failure(directory, places.engine_name(rank, uuid.uuid4().hex), reason, rank)
        return None
    me = weakref.ref(bridge)

    def leave_to_parent() -> None:
        here = me()
        if here is not None:
            here.after_fork()

    os.register_at_fork(after_in_child=leave_to_parent)
    logger.info("kvctl: engine bridge attached at %s", directory / f"{bridge.name}.sock")
    return bridge
