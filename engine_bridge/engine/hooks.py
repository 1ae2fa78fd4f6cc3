"""Where the bridge gets into vLLM, and why each place is safe.

`load_general_plugins()` is the first statement of `EngineCore.__init__`, so in a spawned engine process a wrapped
`__init__` would come too late. `run_busy_loop` is the first call on the finished object: it is wrapped on the class,
attaches, runs the loop as it is, and cleans up when the loop ends in whatever way. Only engines without a loop, in the
caller's own process, are caught by wrapping `EngineCore.__init__`.

Everything else is overridden on the one instance, and calls the original whatever becomes of the bridge:

* `_process_input_queue` runs once per loop iteration, between two steps: the step boundary.
* `_handle_client_request` sees a private request type that stock code would only log. The waker puts it on
  `input_queue`, which is how vLLM itself wakes an idle engine.
* `step_fn` and the scheduler's `schedule` are counted; `set_pause_state` tells whose pause it is.

An engine in the caller's process is driven by the caller's threads. There a lock is shared by the bridge's thread and
by every method through which the caller changes the scheduler.
"""

# ruff: noqa: ANN401 - what is hooked here has whatever signature this vLLM gives it

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import Any, Final

from vllm.v1.engine import core as vllm_core

from engine_bridge import attach
from engine_bridge.engine.core import VllmEngine, rank_of
from engine_bridge.page import Phase

logger = logging.getLogger("kvctl.bridge")

_MARK: Final = "_kvctl_hooked"
_BRIDGE: Final = "_kvctl_bridge"

WAKE: Final = object()
"""The private request type. Compared by identity; vLLM's own are members of an enum."""

_LOCKED: Final = (
    "post_step",
    "add_request",
    "abort_requests",
    "reset_mm_cache",
    "reset_prefix_cache",
    "reset_encoder_cache",
    "pause_scheduler",
    "resume_scheduler",
    "sleep",
    "wake_up",
    "release_kv_cache_memory",
    "execute_dummy_batch",
    "collective_rpc",
    "set_weight_version",
)
"""What a caller in the same process may call and that changes what the bridge reads or changes."""


def install() -> None:
    """Wrap the classes, once in a process. Opens nothing: with fork as start method children inherit this."""
    for owner in (vllm_core.EngineCoreProc, vllm_core.DPEngineCoreProc):
        _wrap_loop(owner)
    _wrap_init(vllm_core.EngineCore)


def _wrap_loop(owner: type) -> None:
    original = owner.__dict__.get("run_busy_loop")
    if original is None or hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def run_busy_loop(self: Any) -> Any:
        bridge = getattr(self, _BRIDGE, None) or attach_to_process(self)
        try:
            return original(self)
        finally:
            if bridge is not None:
                bridge.close()

    setattr(run_busy_loop, _MARK, True)
    owner.run_busy_loop = run_busy_loop  # type: ignore[attr-defined]


def _wrap_init(owner: Any) -> None:
    original = owner.__init__
    if hasattr(original, _MARK):
        return

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if not isinstance(self, vllm_core.EngineCoreProc):
            attach_in_process(self)

    setattr(init, _MARK, True)
    owner.__init__ = init


def _or_break_down(bridge: attach.Bridge, hook: Callable[[], None]) -> attach.Bridge | None:
    """Hooks that do not fit this vLLM must not keep its engine from starting."""
    try:
        hook()
    except Exception as error:
        logger.exception("kvctl: the engine bridge does not fit this vLLM and is off; the engine serves without it")
        bridge.break_down(error)
        return None
    return bridge


# --- an engine with a loop of its own --------------------------------------------------------------------------------


def attach_to_process(engine: Any) -> attach.Bridge | None:
    """Attach to an EngineCoreProc whose loop is about to start."""
    ports: list[VllmEngine] = []

    def make_port() -> VllmEngine:
        ports.append(VllmEngine(engine))
        return ports[0]

    bridge = attach.attach(
        make_port,
        rank=rank_of(engine),
        wake=lambda: engine.input_queue.put_nowait((WAKE, None)),
        stopping=lambda: not engine.is_running(),
    )
    if bridge is None:
        return None
    setattr(engine, _BRIDGE, bridge)
    return _or_break_down(bridge, lambda: _hook_loop(engine, ports[0], bridge))


def _hook_loop(engine: Any, port: VllmEngine, bridge: attach.Bridge) -> None:
    steps = port.steps
    process_input_queue, handle_client_request = engine._process_input_queue, engine._handle_client_request
    step_fn = engine.step_fn

    def at_boundary() -> Any:
        bridge.boundary()
        if not engine.has_work():
            bridge.observe(steps, Phase.IDLE if engine.is_running() else Phase.STOPPING)
            bridge.arm()
        return process_input_queue()

    def handle(request_type: Any, request: Any) -> Any:
        if request_type is not WAKE:
            result = handle_client_request(request_type, request)
            if request_type == vllm_core.EngineCoreRequestType.UTILITY:
                # Sleeping, waking and resets come this way, to an engine that may then block at once.
                bridge.observe(steps, Phase.LOOP if engine.has_work() else Phase.IDLE)
            return result
        bridge.boundary()
        if not engine.has_work():
            bridge.observe(steps, Phase.IDLE)
            bridge.arm()
        return None

    def step() -> Any:
        bridge.step_begins()
        outputs, executed = step_fn()
        steps.count_outputs(outputs)
        bridge.step_ended(steps)
        return outputs, executed

    _hook_scheduler(engine.scheduler, port)
    engine._process_input_queue, engine._handle_client_request, engine.step_fn = at_boundary, handle, step

    def unhook() -> None:
        engine._process_input_queue, engine.step_fn = process_input_queue, step_fn
        # `handle` stays: a wake-up may still be in the queue, and stock code would call it an error.

    bridge.on_breakdown = unhook


def _hook_scheduler(scheduler: Any, port: VllmEngine) -> None:
    set_pause_state = scheduler.set_pause_state

    def noticing(state: Any) -> None:
        set_pause_state(state)
        port.note_foreign_pause()

    scheduler.schedule = port.steps.count_schedule(scheduler.schedule)
    scheduler.set_pause_state = noticing


# --- an engine in the caller's process --------------------------------------------------------------------------------


def attach_in_process(engine: Any) -> attach.Bridge | None:
    """Attach to an EngineCore that its caller steps."""
    ports: list[VllmEngine] = []
    lock = threading.RLock()
    wanted = threading.Event()

    def make_port() -> VllmEngine:
        ports.append(VllmEngine(engine))
        return ports[0]

    bridge = attach.attach(make_port, rank=rank_of(engine), wake=wanted.set, stopping=lambda: False)
    if bridge is None:
        return None
    setattr(engine, _BRIDGE, bridge)
    serve = threading.Thread(
        target=_serve, args=(bridge, ports[0].steps, lock, wanted), name="kvctl-bridge", daemon=True
    )

    def hook_and_start() -> None:
        _hook_methods(engine, ports[0], bridge, lock, wanted)
        serve.start()

    return _or_break_down(bridge, hook_and_start)


def _hook_methods(engine: Any, port: VllmEngine, bridge: attach.Bridge, lock: Any, wanted: threading.Event) -> None:
    steps = port.steps
    step_fn, shutdown = engine.step_fn, engine.shutdown

    def step() -> Any:
        with lock:
            bridge.boundary()
            bridge.step_begins()
            outputs, executed = step_fn()
            steps.count_outputs(outputs)
            bridge.step_ended(steps)
            if not engine.scheduler.has_requests() and not engine.batch_queue:
                bridge.observe(steps, Phase.IDLE)
                bridge.arm()
            return outputs, executed

    def locked(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            with lock:
                return method(*args, **kwargs)

        return call

    def close_and_shutdown(*args: Any, **kwargs: Any) -> Any:
        with lock:
            bridge.close()
        wanted.set()
        return shutdown(*args, **kwargs)

    bridge.on_breakdown = wanted.set
    _hook_scheduler(engine.scheduler, port)
    for name in _LOCKED:
        if hasattr(engine, name):
            setattr(engine, name, locked(getattr(engine, name)))
    engine.step_fn, engine.shutdown = step, close_and_shutdown


def _serve(bridge: attach.Bridge, steps: Any, lock: Any, wanted: threading.Event) -> None:
    """The bridge's own thread: acts whenever the caller is not inside the engine. `wanted` is set by the waker, and
    when the bridge has closed.
    """
    wanted.set()
    while not bridge.closed:
        wanted.wait()
        wanted.clear()
        with lock:
            bridge.boundary()
            bridge.observe(steps, Phase.IDLE)
            if not bridge.waits_for_step:
                bridge.arm()
