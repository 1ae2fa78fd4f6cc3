"""The engines of a replica behind one vLLM API server, one a data-parallel rank.

Over HTTP a rank is a label in /metrics and a share of one POST for all. Each still gets an engine of its own, so that
every answer and every series is per rank, as with the bridge.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from engine_bridge import page as pages
from engine_bridge import protocol
from sidecar.backends.engine import (
    Answered,
    EngineBackend,
    EngineFacts,
    EngineSet,
    Liveness,
    Lost,
    Submitted,
    Unreachable,
)
from sidecar.backends.http.client import parse_url
from sidecar.backends.http.exposition import RankGauges
from sidecar.backends.http.outcomes import BRIDGE_HINT, NOT_KNOWN, needs_bridge, unsupported
from sidecar.backends.http.resets import needs_dev_mode
from sidecar.backends.http.server import POLL_S, ApiServer

UNKNOWN_PHASE: Final = -1


class HttpEngine:
    """Implements `sidecar.backends.engine.EngineBackend` for one rank."""

    def __init__(self, server: ApiServer, rank: int) -> None:
        """All ranks share the server."""
        self._server = server
        self.rank = rank

    @property
    def key(self) -> str:
        """E.g. "http-0-1a2b3c4d"."""
        return f"http-{self.rank}-{self._server.incarnation[:8] or 'unknown'}"

    @property
    def incarnation(self) -> str:
        """Of the API server process: stock vLLM does not outlive its engine cores."""
        return self._server.incarnation

    @property
    def facts(self) -> EngineFacts | None:
        """From /metrics and /version."""
        gauges = self._server.ranks.get(self.rank)
        if gauges is None:
            return None
        return EngineFacts(
            data_parallel_rank=self.rank,
            incarnation=self.incarnation,
            backend="http",
            data_parallel_size=len(self._server.ranks),
            vllm_version=self._server.version,
            model=gauges.model,
            block_size=gauges.block_size,
            blocks=max(gauges.usable_blocks, 0),
            prefix_caching=gauges.prefix_caching,
            capabilities=self._capabilities(),
        )

    @property
    def connected(self) -> bool:
        """Whether the last poll was answered."""
        return self._server.trouble is None

    @property
    def trouble(self) -> Unreachable | None:
        """Why it cannot be asked now."""
        return self._server.trouble

    def liveness(self) -> Liveness:
        """DEAD when the API server says that its engine core died; else the process is out of sight."""
        return Liveness.DEAD if self._server.engine_dead else Liveness.UNKNOWN

    def page(self) -> pages.Snapshot | None:
        """What /metrics said last, in the page's terms; -1 for what it does not tell."""
        gauges = self._server.ranks.get(self.rank)
        if gauges is None or not self._server.current:
            return None
        return pages.Snapshot(self._counters(gauges), ())

    async def submit(self, mutation: protocol.Mutation, deadline_ns: int) -> Submitted:
        """FAIL and PREEMPT resets; everything else needs the bridge and says so before anything is sent."""
        missing = needs_bridge(mutation)
        if missing or not isinstance(mutation, protocol.Reset):
            text = f"{missing} works only through the engine bridge and vLLM is reached over HTTP here; {BRIDGE_HINT}"
            return Answered(unsupported(mutation, "NEEDS_ENGINE_BRIDGE", text))
        trouble = self._server.trouble
        if trouble is not None:
            return trouble
        if self._server.dev_mode is False:
            # It may have been restarted since with other settings: only an answer of now counts.
            self._server.version = ""
            await self._refresh(deadline_ns)
            if self._server.dev_mode is False:
                text = needs_dev_mode(f"{self._server.target.url}/reset_prefix_cache is not there")
                return Answered(unsupported(mutation, "NEEDS_DEV_MODE", text))
        return await self._server.resets.submit(mutation, self.rank, deadline_ns)

    async def renew(self, renewal: protocol.Renew, deadline_ns: int) -> Submitted:
        """Leases are the bridge's."""
        text = f"leases work only through the engine bridge and vLLM is reached over HTTP here; {BRIDGE_HINT}"
        return Answered(
            protocol.Outcome(
                renewal.call, renewal.pause_request_id, "renew", "unsupported", "NEEDS_ENGINE_BRIDGE", text
            )
        )

    async def lookup(self, request_id: str, deadline_ns: int) -> protocol.Found | Lost | Unreachable:
        """From this sidecar's record: vLLM keeps none."""
        return self._server.resets.lookup(request_id, self.rank)

    async def cancel(self, request_id: str, deadline_ns: int) -> protocol.Cancelled | Lost | Unreachable:
        """Only what has not been sent."""
        return self._server.resets.cancel(request_id)

    async def evidence(self, timeout_s: float, contiguity_blocks: int = 4096) -> protocol.Evidence | Lost | Unreachable:
        """A fresh look at /metrics; what it does not tell is -1, and the head of the queue is never known."""
        await self._refresh(time.monotonic_ns() + int(timeout_s * 1e9))
        if self._server.trouble is not None:
            return self._server.trouble
        gauges = self._server.ranks.get(self.rank)
        if gauges is None:
            return Unreachable("ENGINE_NOT_ANSWERING", f"rank {self.rank} is no longer in {self._server.target.url}")
        return _evidence(gauges, self._server.seen_ns)

    async def _refresh(self, deadline_ns: int) -> None:
        left = (deadline_ns - time.monotonic_ns()) / 1e9
        if left <= 0:
            return
        asking = asyncio.ensure_future(self._server.refresh())
        done, _ = await asyncio.wait({asking}, timeout=left)
        if done:
            await asking
        else:
            asking.cancel()

    def _capabilities(self) -> dict[str, str]:
        bridge = f"only the engine bridge can do this; {BRIDGE_HINT}"
        known = dict.fromkeys(protocol.CAPABILITIES, bridge)
        known["admission"] = ""  # counts and tokens; what only the bridge sees is marked unknown in each answer
        if self._server.dev_mode:
            for name in ("reset.fail", "reset.preempt", "reset.connector", "reset.mm", "reset.encoder"):
                known[name] = ""
        else:
            missing = needs_dev_mode("not there" if self._server.dev_mode is False else "not known to be there")
            for name in ("reset.fail", "reset.preempt", "reset.connector", "reset.mm", "reset.encoder"):
                known[name] = missing
        return known

    def _counters(self, gauges: RankGauges) -> pages.Counters:
        return pages.Counters(
            incarnation=bytes.fromhex(self._server.incarnation) if self._server.incarnation else bytes(16),
            pid=0,
            data_parallel_rank=self.rank,
            phase=UNKNOWN_PHASE,
            steps=gauges.iterations,
            last_step_ns=0,
            last_progress_ns=self._server.last_progress_ns(self.rank),
            tokens_scheduled=gauges.tokens,
            outputs=gauges.generation_tokens,
            preemptions=gauges.preemptions,
            running=gauges.running,
            waiting=gauges.waiting,
            deferred=gauges.deferred,
            holding=NOT_KNOWN,
            paused=NOT_KNOWN if self._server.paused is None else 2 * int(self._server.paused),
            sleeping=NOT_KNOWN if gauges.awake < 0 else int(gauges.awake == 0),
            blocks_total=gauges.usable_blocks,
            blocks_free=gauges.free_blocks,
            blocks_cached=NOT_KNOWN,
            last_reset_ns=0,
            flags=NOT_KNOWN,
        )


def _evidence(gauges: RankGauges, seen_ns: int) -> protocol.Evidence:
    return protocol.Evidence(
        call=0,
        monotonic_ns=seen_ns,
        running=gauges.running,
        waiting=gauges.waiting,
        waiting_remote_kv=gauges.loading,
        load_finished=gauges.load_finished,
        waiting_other=NOT_KNOWN,
        waiting_holding_blocks=NOT_KNOWN,
        blocks_total=gauges.usable_blocks,
        blocks_free=gauges.free_blocks,
        blocks_cached=NOT_KNOWN,
        blocks_orphaned=NOT_KNOWN,
        head=None,
        holders=[],
        oldest_waiting_ns=0 if gauges.waiting == 0 else NOT_KNOWN,
        paused="",
        sleeping=gauges.awake == 0,
        woke_without_reset=False,
        scheduling="running",
        weight_version="",
        contiguity=None,
        quarantined_requests=NOT_KNOWN,
        truncated=False,
    )


class HttpEngines:
    """Implements `sidecar.backends.engine.EngineSet` over one API server."""

    def __init__(
        self, url: str, *, poll_s: float = POLL_S, token_file: Path | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        """ValueError when the URL cannot be used."""
        self._callbacks: list[Callable[[], None]] = []
        self._server = ApiServer(parse_url(url), self._tell, poll_s=poll_s, token_file=token_file, tls=tls)
        self._engines: dict[int, HttpEngine] = {0: HttpEngine(self._server, 0)}

    @property
    def place(self) -> str:
        """The URL."""
        return self._server.target.url

    def engines(self) -> Sequence[EngineBackend]:
        """By rank. Rank 0 is always listed: an address that was given is an engine that is expected."""
        ranks = set(self._server.ranks) or set(self._engines)
        for rank in ranks - self._engines.keys():
            self._engines[rank] = HttpEngine(self._server, rank)
        return [self._engines[rank] for rank in sorted(ranks)]

    def trouble(self) -> Unreachable | None:
        """None: there is always an engine listed, with its own trouble."""
        return None

    def on_change(self, callback: Callable[[], None]) -> None:
        """See EngineSet."""
        self._callbacks.append(callback)

    async def start(self) -> None:
        """See EngineSet."""
        await self._server.start()

    async def close(self) -> None:
        """See EngineSet."""
        await self._server.close()

    def _tell(self) -> None:
        for callback in self._callbacks:
            callback()


class PreferBridge:
    """Implements `sidecar.backends.engine.EngineSet` over both ways: the bridge wherever it has attached.

    HTTP fills in only while no engine has introduced itself over the bridge. A bridge engine that died stays preferred:
    it died, and its API server, if it still answers, would say otherwise.
    """

    def __init__(self, bridge: EngineSet, http: HttpEngines) -> None:
        """Both are started and closed here."""
        self._bridge = bridge
        self._http = http

    @property
    def place(self) -> str:
        """Both places."""
        return f"{self._bridge.place} or {self._http.place}"

    def engines(self) -> Sequence[EngineBackend]:
        """The bridge's, if one of them has ever introduced itself, else those over HTTP if they answer."""
        bridged = self._bridge.engines()
        if any(engine.facts is not None for engine in bridged):
            return bridged
        over_http = self._http.engines()
        if any(engine.connected for engine in over_http) or not bridged:
            return over_http
        return bridged

    def trouble(self) -> Unreachable | None:
        """See EngineSet."""
        return None if self.engines() else self._bridge.trouble()

    def on_change(self, callback: Callable[[], None]) -> None:
        """See EngineSet."""
        self._bridge.on_change(callback)
        self._http.on_change(callback)

    async def start(self) -> None:
        """See EngineSet."""
        await asyncio.gather(self._bridge.start(), self._http.start())

    async def close(self) -> None:
        """See EngineSet."""
        await asyncio.gather(self._bridge.close(), self._http.close())
