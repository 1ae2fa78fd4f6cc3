"""Where the bridge gets into vLLM, and why each place is safe.

`load_general_plugins()` is the first statement of `EngineCore.__init__`, so in a spawned engine process a wrapped
`__init__` would come too late. `run_busy_loop` is the first call on the finished object: it is wrapped on the class,
attaches, runs the loop as it is, and cleans up when the loop ends in whatever way. Only engines without a loop, in the
caller's own process, are caught by wrapping `EngineCore.__init__`.

Everything else is overridden on the one instance, and calls the original whatever becomes of the bridge:

* `_process_input_queue` runs once per loop iteration, between two steps: the step boundary.
* `_handle_client_request` sees a private request type that stock code would only log. The waker puts it on
  `input_queue`, which is how vLLM itself wakes an idle engine.
* `_handle_shutdown` decides whether work is left: an operation that holds the scheduler goes on before it is asked.
* `step_fn` and the scheduler's `schedule` are counted; `set_pause_state` tells whose pause it is.

Other plugins may hook the same methods: see `in_force` for how ours stay in force and how they are taken out.

An engine in the caller's process is driven by the caller's threads. There a lock is shared by the bridge's thread and
by every method through which the caller changes the scheduler.
"""

# ruff: noqa: ANN401 - what is hooked here has whatever signature this vLLM gives it

from __future__ import annotations

import atexit
import functools
import logging
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final

from vllm.v1.engine import core as vllm_core

from engine_bridge import attach
from engine_bridge.engine.core import VllmEngine, rank_of
from engine_bridge.engine.in_force import Layer, Layers
from engine_bridge.page import Phase

logger = logging.getLogger("vllm.kvctl")

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

_LONGEST_LEAVE_S: Final = 2.0
"""A program that ends waits no longer than this for a step that another of its threads makes."""

_NOTICED: Final = frozenset({"sleep", "wake_up", "reset_prefix_cache", "pause_scheduler"})
"""Of these, what is looked at afterwards: nobody may step the engine before the next one undoes its traces."""


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


def _attach(engine: Any, hook: Callable[[VllmEngine, attach.Bridge], None], **how: Any) -> attach.Bridge | None:
    """A bridge for this engine, hooked; None when it could not be had. Whatever it is that this vLLM does otherwise
    must not keep its engine from starting.
    """
    ports: list[VllmEngine] = []

    def make_port() -> VllmEngine:
        ports.append(VllmEngine(engine))
        return ports[0]

    bridge = attach.attach(make_port, rank=_rank_for_note(engine), **how)
    if bridge is None:
        for port in ports:
            port.remove_guards()
        return None
    try:
        setattr(engine, _BRIDGE, bridge)
        hook(ports[0], bridge)
    except Exception as error:
        logger.exception("kvctl: the engine bridge does not fit this vLLM and is off; the engine serves without it")
        bridge.break_down(error)
        return None
    return bridge


def _rank_for_note(engine: Any) -> int:
    """The rank under which a failure is noted. Where it cannot be told the port cannot be made either, and says why."""
    try:
        return rank_of(engine)
    except (AttributeError, TypeError, ValueError):
        return 0


# --- an engine with a loop of its own --------------------------------------------------------------------------------


def attach_to_process(engine: Any) -> attach.Bridge | None:
    """Attach to an EngineCoreProc whose loop is about to start."""
    return _attach(
        engine,
        lambda port, bridge: _hook_loop(engine, port, bridge),
        wake=lambda: engine.input_queue.put_nowait((WAKE, None)),
        stopping=lambda: not engine.is_running(),
    )


def _hook_loop(engine: Any, port: VllmEngine, bridge: attach.Bridge) -> None:
    steps = port.steps

    def at_boundary(process_input_queue: Callable[[], Any]) -> Any:
        bridge.boundary()
        if not engine.has_work():
            bridge.observe(steps, Phase.IDLE if engine.is_running() else Phase.STOPPING)
            bridge.arm()
        return process_input_queue()

    def handle(handle_client_request: Callable[..., Any], request_type: Any, request: Any) -> Any:
        if request_type is not WAKE:
            utility = request_type == vllm_core.EngineCoreRequestType.UTILITY
            if utility:
                # A sleep that had waited for steps may have begun since.
                bridge.observe(steps, Phase.LOOP)
            result = handle_client_request(request_type, request)
            if utility:
                # Sleeping, waking and resets come this way, to an engine that may then block at once.
                bridge.observe(steps, Phase.LOOP if engine.has_work() else Phase.IDLE)
            return result
        bridge.boundary()
        if not engine.has_work():
            bridge.observe(steps, Phase.IDLE)
            bridge.arm()
        return None

    def step(step_fn: Callable[[], Any]) -> Any:
        bridge.step_begins()
        outputs, executed = step_fn()
        steps.hand_out(outputs)
        bridge.step_ended(steps)
        return outputs, executed

    def handle_shutdown(original: Callable[[], Any]) -> Any:
        if bridge.waits_for_step and not engine.is_running():
            # An engine held by an operation looks as if it had nothing left to do, and would end with its requests.
            bridge.boundary()
        return original()

    stepping = Layer(engine, "step_fn", step)
    layers = [Layer(engine, "_process_input_queue", at_boundary), stepping, *_scheduler_layers(engine.scheduler, port)]
    if hasattr(engine, "_handle_shutdown"):
        layers.append(Layer(engine, "_handle_shutdown", handle_shutdown))
    looping = Layers(*layers)
    handled = Layer(engine, "_handle_client_request", handle)
    # `handled` stays: a wake-up may still be in the queue, and stock code would call it an error.
    bridge.on_breakdown = lambda: _get_out(looping, port)
    looping.lay()
    handled.lay()
    bridge.before_boundary = Layers(stepping, handled).lay
    bridge.before_step = lambda: _keep(looping, port)


def _scheduler_layers(scheduler: Any, port: VllmEngine) -> list[Layer]:
    def noticing(set_pause_state: Callable[..., Any], state: Any) -> Any:
        return port.pause_state_is_set(lambda wanted: set_pause_state(wanted), state)

    return [
        Layer(scheduler, "schedule", port.steps.count_schedule),
        Layer(scheduler, "set_pause_state", noticing),
    ]


def _keep(layers: Layers, port: VllmEngine) -> None:
    layers.lay()
    port.keep_guards()
    port.tidy()


def _get_out(layers: Layers, port: VllmEngine) -> None:
    layers.lift()
    port.remove_guards()


# --- an engine in the caller's process --------------------------------------------------------------------------------


def attach_in_process(engine: Any) -> attach.Bridge | None:
    """Attach to an EngineCore that its caller steps."""
    lock = threading.RLock()
    wanted = threading.Event()

    def hook_and_start(port: VllmEngine, bridge: attach.Bridge) -> None:
        _hook_methods(engine, port, bridge, lock, wanted)
        threading.Thread(
            target=_serve, args=(bridge, port.steps, lock, wanted), name="kvctl-bridge", daemon=True
        ).start()
        atexit.register(_leave, weakref.ref(bridge), lock, wanted)

    return _attach(engine, hook_and_start, wake=wanted.set, stopping=lambda: False)


def _hook_methods(engine: Any, port: VllmEngine, bridge: attach.Bridge, lock: Any, wanted: threading.Event) -> None:
    steps = port.steps

    def step(step_fn: Callable[[], Any]) -> Any:
        with lock:
            bridge.boundary()
            bridge.step_begins()
            outputs, executed = step_fn()
            steps.hand_out(outputs)
            bridge.step_ended(steps)
            if not engine.scheduler.has_requests() and not engine.batch_queue:
                bridge.observe(steps, Phase.IDLE)
                bridge.arm()
            return outputs, executed

    def locked(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with lock:
            return method(*args, **kwargs)

    def locked_and_noticed(method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with lock:
            try:
                return method(*args, **kwargs)
            finally:
                bridge.observe(steps, Phase.IDLE)

    def close_and_shutdown(shutdown: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with lock:
            bridge.close()
        wanted.set()
        return shutdown(*args, **kwargs)

    counted = Layers(Layer(engine, "step_fn", step), *_scheduler_layers(engine.scheduler, port))
    guarded = Layers(
        *(
            Layer(engine, name, locked_and_noticed if name in _NOTICED else locked)
            for name in _LOCKED
            if hasattr(engine, name)
        )
    )

    def get_out() -> None:
        guarded.lift()
        _get_out(counted, port)
        wanted.set()

    bridge.on_breakdown = get_out
    for layers in (counted, guarded, Layer(engine, "shutdown", close_and_shutdown)):
        layers.lay()
    bridge.before_step = lambda: _keep(counted, port)


def _leave(bridge_of: weakref.ref[attach.Bridge], lock: Any, wanted: threading.Event) -> None:
    """The program ends. Up to 0.30, vLLM does not shut down an engine that its program leaves as it is."""
    bridge = bridge_of()
    # Whoever still steps on a thread of its own may never let go, and the program must end.
    if bridge is None or bridge.closed or not lock.acquire(timeout=_LONGEST_LEAVE_S):
        return
    try:
        bridge.close()
    finally:
        lock.release()
    wanted.set()


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
            bridge.arm()
