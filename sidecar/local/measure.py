"""Run the three modes against a fleet under load, and measure what clients and engines saw.

The resets go through the fan-out that kvctl itself uses. What is measured comes from elsewhere: from the tokens and
times that streaming clients received, and from the engines' counters.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from kvctl.v1 import fleet_pb2, replica_pb2, types_pb2

from sidecar.coordinator import calls
from sidecar.coordinator.channels import Channels
from sidecar.coordinator.discovery.static import StaticDiscovery
from sidecar.coordinator.fanout import Run
from sidecar.coordinator.outcomes import Failure
from sidecar.coordinator.targets import Target
from sidecar.local.counters import Counters, read_counters
from sidecar.local.figures import Answer, Figures, Mode, ModeFigures, Probe, Streams
from sidecar.local.layout import Fleet, Replica
from sidecar.local.load import (
    PREFIX_TOKENS,
    STREAM_TOKENS,
    Load,
    LoadError,
    finish,
    longest_gap,
    prompt,
    usual_gap,
)
from sidecar.local.streams import Generation, generate

_MODES: Final[dict[Mode, types_pb2.RunningRequests.ValueType]] = {
    "fail": types_pb2.RUNNING_REQUESTS_FAIL,
    "preempt": types_pb2.RUNNING_REQUESTS_PREEMPT,
    "keep": types_pb2.RUNNING_REQUESTS_KEEP,
}
_CONTROL_TOKENS: Final = 64
_PROBE_LANE: Final = 1000
"""Lanes from here on are single requests with the shared prefix and an ending nobody else has."""

_TOKENS_AFTER: Final = 24
"""Tokens that every stream gets after an operation before its effect is read off."""

_LATEST_SHARE: Final = 0.85
"""A stream further along than this may end before the reset that it is meant to span."""
_TRIES: Final = 8

Tell = Callable[[str], None]


@dataclass(slots=True)
class _Watched:
    """One replica with its load."""

    replica: Replica
    directory: Path
    load: Load
    probes: int = 0

    def counters(self) -> Counters:
        return read_counters(self.directory)

    async def probe(self) -> int:
        """Cached prompt tokens of one more request with the shared prefix."""
        self.probes += 1
        asked = await generate(self.replica.api, Generation(prompt(_PROBE_LANE + self.probes), max_tokens=1))
        if asked.error:
            raise LoadError(f"{self.replica.name}: a request with the shared prefix failed: {asked.error}")
        return asked.cached_tokens


async def measure(fleet: Fleet, tell: Tell) -> Figures:
    """Load the fleet and run the modes. LoadError when the load itself does not work."""
    watched = [_Watched(replica, Path(fleet.directory, replica.name), Load(replica.api)) for replica in fleet.replicas]
    channels = Channels()
    try:
        tell("Streaming undisturbed, for comparison")
        for each in watched:
            each.load.start()
        await asyncio.gather(*(each.load.wait_rounds(1) for each in watched))
        first = [lane.generations[0] for each in watched for lane in each.load.lanes]
        diverged = await _control(watched[0])
        modes = []
        for mode in _MODES:
            tell(f"Resetting with --mode {mode} under load")
            modes.append(await _run_mode(mode, watched, channels))
        return Figures(
            replicas=len(watched),
            streams=len(first),
            prefix_tokens=PREFIX_TOKENS,
            stream_tokens=STREAM_TOKENS,
            usual_gap_ms=_ms(usual_gap(first)),
            usual_longest_gap_ms=_ms(max(longest_gap(g, g.times[0], g.times[-1]) for g in first)),
            control_diverged=diverged,
            vllm_version=await _version(channels, watched[0].replica),
            modes=modes,
        )
    finally:
        await asyncio.gather(*(each.load.stop() for each in watched))
        await channels.close()


async def _control(watched: _Watched) -> bool:
    """Whether a stream changes when the first token of its prompt does, hundreds of tokens earlier."""
    lane = watched.load.lanes[0]
    changed = (lane.prompt[0] ^ 1, *lane.prompt[1:])
    asked = await generate(watched.replica.api, Generation(changed, _CONTROL_TOKENS))
    if asked.error:
        raise LoadError(f"the control request failed: {asked.error}")
    return asked.tokens != lane.generations[0].tokens[:_CONTROL_TOKENS]


async def _run_mode(mode: Mode, watched: Sequence[_Watched], channels: Channels) -> ModeFigures:
    probing = mode != "preempt"  # restarted requests fill the cache again at once: a probe would say nothing
    before = await _all_under_way(watched, probing=probing)
    spanning = [each.load.under_way() for each in watched]
    marked = [generation for streams in spanning for generation in streams]
    given = {id(generation): len(generation.tokens) for generation in marked}
    counted = [each.counters() for each in watched]
    started = time.monotonic()
    operation = await _reset(mode, watched, channels)
    took = time.monotonic() - started
    await _until_each_has(marked, {key: count + _TOKENS_AFTER for key, count in given.items()})
    read = time.monotonic()
    spent = [(was, each.counters()) for was, each in zip(counted, watched, strict=True)]
    probes = []
    for each, cached in zip(watched, before, strict=True):
        if probing:
            probes.append(Probe(each.replica.name, cached, await each.probe(), await each.probe()))
    for each in watched:
        each.load.open_gate()
    await finish(marked)
    references = [each.load.reference(g) for each, streams in zip(watched, spanning, strict=True) for g in streams]
    pairs = list(zip(marked, references, strict=True))
    return ModeFigures(
        mode=mode,
        state=fleet_pb2.OperationState.Name(operation.state).removeprefix("OPERATION_STATE_"),
        took_ms=_ms(took),
        answers=[_answer(row) for row in operation.results],
        streams=Streams(
            under_way=len(marked),
            finished=sum(g.finished for g in marked),
            identical=sum(r is not None and g.finished and g.tokens == r.tokens for g, r in pairs),
            tokens=sum(len(g.tokens) for g in marked),
            given_before=sum(given.values()),
            longest_gap_ms=_ms(max((longest_gap(g, started, read) for g in marked), default=0.0)),
            errors=[g.error for g in marked if g.error],
        ),
        preemptions=sum(now.preemptions - was.preemptions for was, now in spent),
        recomputed_tokens=sum(now.not_given - was.not_given for was, now in spent),
        probes=probes,
    )


async def _all_under_way(watched: Sequence[_Watched], *, probing: bool) -> list[int]:
    """Close the gates while every stream of every replica is under way at once; the probes' cached tokens. On a busy
    machine one replica's streams end while another is waited for: then they all go on, and it is tried again.
    """
    for _ in range(_TRIES):
        await asyncio.gather(*(each.load.wait_midstream() for each in watched))
        for each in watched:
            each.load.close_gate()
        cached = await asyncio.gather(*(each.probe() for each in watched)) if probing else [0] * len(watched)
        if all(each.load.all_midstream(_LATEST_SHARE) for each in watched):
            return cached
        for each in watched:
            each.load.open_gate()
    raise LoadError(f"in {_TRIES} tries the streams never ran on every replica at once: the machine is too busy")


async def _until_each_has(streams: Sequence[Generation], wanted: dict[int, int]) -> None:
    """Wait until every stream has come this far, or has ended."""

    def behind(g: Generation) -> bool:
        return len(g.tokens) < min(wanted[id(g)], g.max_tokens) and not g.error and not g.finished

    async with asyncio.timeout(60):
        while any(behind(stream) for stream in streams):  # noqa: ASYNC110 - tokens come by the thousand
            await asyncio.sleep(0.005)


async def _reset(mode: Mode, watched: Sequence[_Watched], channels: Channels) -> fleet_pb2.FleetOperation:
    spec = fleet_pb2.OperationSpec(
        reset=replica_pb2.ResetPrefixCacheRequest(running_requests=_MODES[mode]),
        targets=fleet_pb2.Targets(all=True),
    )
    targets = [Target(each.replica.sidecar, each.replica.name) for each in watched]
    return await Run(spec, StaticDiscovery(targets), channels).run()


def _answer(row: fleet_pb2.TargetResult) -> Answer:
    engines = row.reset.engines
    return Answer(
        replica=row.replica,
        code=row.code,
        reason=row.reason,
        message=row.message,
        requests_running=sum(engine.requests_running for engine in engines),
        requests_kept=sum(engine.requests_kept for engine in engines),
        requests_preempted=sum(engine.requests_preempted for engine in engines),
        blocks_held=sum(engine.holders.held_blocks for engine in engines),
        cached_blocks_dropped=sum(engine.cached_blocks_dropped for engine in engines),
        engine_pause_us=max((engine.pause.longest_us for engine in engines), default=0),
    )


async def _version(channels: Channels, replica: Replica) -> str:
    async with channels.lease(Target(replica.sidecar)) as channel:
        found = await calls.get_replica(channel, replica.sidecar, 5.0, channels.metadata())
    if isinstance(found, Failure) or not found.engines:
        return "of unknown version"
    return found.engines[0].vllm_version


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 2)
