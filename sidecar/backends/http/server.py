"""One vLLM API server seen from outside: is it there, is its engine alive, what do its metrics say.

Polled every POLL_S. A poll is GET /health and GET /metrics: both are answered by the API server from memory and never
reach the engine. What a poll cannot know stays unknown. Three things are told apart that look alike from a distance:
nothing has listened yet (starting) and nothing listens any more (dead); an API server that answers while its engine
core is dead (vllm#39863: /health says 503); and a load balancer, behind which no single engine can be administered
(vllm/router#136): its answers alternate between processes of different start time.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import secrets
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from sidecar.backends.engine import Unreachable
from sidecar.backends.http import client, exposition, replies
from sidecar.backends.http.client import HttpError, NotSentError, Reply, Target
from sidecar.backends.http.exposition import RankGauges
from sidecar.backends.http.resets import Resets
from sidecar.rpc.tls import read_token

LOG: Final = logging.getLogger(__name__)

POLL_S: Final = 2.0
ASK_TIMEOUT_S: Final = 5.0
"""For the cheap routes. Under load vLLM's API server was seen to take seconds for them."""
STILL_NS: Final = 4_000_000_000
SILENT_NS: Final = 30_000_000_000
"""Without an answer for this long, what was seen last says nothing about now."""


class ApiServer:
    """What is known of one API server. Belongs to one event loop."""

    def __init__(
        self,
        target: Target,
        changed: Callable[[], None],
        *,
        poll_s: float = POLL_S,
        token_file: Path | None = None,
        tls: ssl.SSLContext | None = None,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        """`token_file`: a bearer token for a proxy or vLLM's admin key, read again for each request."""
        self.target = target
        self.version = ""
        self.dev_mode: bool | None = None
        """Whether the dev routes are there; None while it is not known."""
        self.ranks: dict[int, RankGauges] = {}
        self.incarnation = ""
        self.resets = Resets(self._post, lambda: self.version, lambda: self.ranks)
        self.paused: bool | None = None
        """Whether the scheduler is paused; asked only in dev mode and only while nothing moves."""
        self.seen_ns = 0
        """When /metrics last answered; 0 never."""
        self._changed = changed
        self._poll_s = poll_s
        self._token_file = token_file
        self._tls = tls
        self._clock = clock
        self._trouble: Unreachable | None = Unreachable("ENGINE_STARTING", f"{target.url} has not been asked yet")
        self._starts: list[float] = []
        self._progress: dict[int, tuple[int, int]] = {}
        self._task: asyncio.Task[None] | None = None
        self._polling: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Ask once, then keep asking in the background."""
        await self.refresh()
        self._task = asyncio.get_running_loop().create_task(self._run(), name=f"poll {self.target.url}")

    async def close(self) -> None:
        """Stop asking."""
        tasks = [task for task in (self._task, self._polling) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.resets.close()

    @property
    def trouble(self) -> Unreachable | None:
        """Why it cannot be asked now."""
        return self._trouble

    @property
    def engine_dead(self) -> bool:
        """Whether the API server itself says that its engine core died."""
        return self._trouble is not None and self._trouble.reason == "ENGINE_DEAD" and "503" in self._trouble.message

    @property
    def current(self) -> bool:
        """Whether what is in `ranks` was seen lately."""
        return self.seen_ns > 0 and self._clock() - self.seen_ns <= SILENT_NS

    def last_progress_ns(self, rank: int) -> int:
        """When a poll last saw this rank's tokens rise; 0 never."""
        return self._progress.get(rank, (0, 0))[1]

    async def refresh(self) -> None:
        """One poll; callers at the same time share it."""
        if self._polling is None or self._polling.done():
            self._polling = asyncio.get_running_loop().create_task(self._poll(), name=f"ask {self.target.url}")
        await asyncio.shield(self._polling)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                await self.refresh()
            except Exception:
                LOG.exception("polling failed url=%s", self.target.url)

    async def _poll(self) -> None:
        before = (self._trouble, self.incarnation, tuple(self.ranks))
        self._trouble = await self._look()
        if before != (self._trouble, self.incarnation, tuple(self.ranks)):
            if before[0] != self._trouble:
                LOG.info("api server url=%s state=%s", self.target.url, self._trouble or "answers")
            self._changed()

    async def _look(self) -> Unreachable | None:
        try:
            health = await self._get("/health")
            if health.status == 503:
                return Unreachable(
                    "ENGINE_DEAD", f"the API server at {self.target.url} answers and says 503: its engine core died"
                )
            metrics = await self._get("/metrics")
            if not self.version:
                await self._introduce()
        except NotSentError as error:
            return self._nothing_listens(error)
        except HttpError as error:
            return Unreachable("ENGINE_NOT_ANSWERING", str(error))
        page = exposition.read(metrics.body.decode("utf-8", "replace"))
        if metrics.status != 200 or not page.ranks:
            return Unreachable(
                "ENGINE_NOT_ANSWERING",
                f"{self.target.url}/metrics answered {metrics.status} without any vLLM engine; expected vLLM's API "
                "server, started without --disable-log-stats",
            )
        if self._is_load_balancer(page.process_started):
            return Unreachable(
                "NOT_ONE_REPLICA",
                f"several servers answer in turn at {self.target.url}: it is a load balancer; give each sidecar the "
                "address of its own vLLM",
            )
        self._take(page)
        await self._ask_whether_paused()
        return None

    async def _ask_whether_paused(self) -> None:
        """The one question here that reaches the engine, so only when requests wait and no token has come lately."""
        still = any(
            max(gauges.running, 0) + max(gauges.waiting, 0) > 0
            and self.seen_ns - self.last_progress_ns(rank) > STILL_NS
            for rank, gauges in self.ranks.items()
        )
        if not still or not self.dev_mode:
            self.paused = None
            return
        try:
            found = json.loads((await self._get("/is_paused")).body)["is_paused"]
        except (HttpError, ValueError, KeyError, TypeError):
            found = None
        self.paused = found if isinstance(found, bool) else None

    async def _introduce(self) -> None:
        """What does not change while a server process lives."""
        reply = await self._get("/version")
        try:
            found = json.loads(reply.body)
            self.version = str(found["version"])[:64] if reply.status == 200 else ""
        except (ValueError, KeyError, TypeError):
            self.version = ""
        # A GET of a POST route: 405 when it exists, 404 when it does not. The engine is not asked.
        self.dev_mode = replies.has_dev_routes(await self._get("/reset_prefix_cache"))

    def _nothing_listens(self, error: NotSentError) -> Unreachable:
        if not self.seen_ns:
            return Unreachable("ENGINE_STARTING", f"vLLM does not listen yet: {error}")
        self.version, self.dev_mode, self.ranks, self._starts = "", None, {}, []
        return Unreachable("ENGINE_DEAD", f"vLLM listens no more: {error}")

    def _is_load_balancer(self, started: float) -> bool:
        """A restart moves the start time on; going back to an older one means that two processes answer."""
        if started <= 0:
            return False
        if started not in self._starts:
            self._starts = [*self._starts[-3:], started]
        return len(self._starts) > 1 and started < max(self._starts)

    def _take(self, page: exposition.Exposition) -> None:
        now = self._clock()
        restarted = any(
            known.tokens > page.ranks[rank].tokens for rank, known in self.ranks.items() if rank in page.ranks
        )
        if page.process_started > 0:
            identity = f"{self.target.url} {page.process_started}"
            incarnation = hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
        elif restarted or not self.incarnation or not self.seen_ns:
            incarnation = secrets.token_hex(16)
        else:
            incarnation = self.incarnation
        if incarnation != self.incarnation:
            self.incarnation = incarnation
            self._progress.clear()
        for rank, gauges in page.ranks.items():
            known = self._progress.get(rank)
            if known is None:
                self._progress[rank] = (gauges.tokens, 0)
            elif gauges.tokens > known[0]:
                self._progress[rank] = (gauges.tokens, now)
        self.ranks = dict(sorted(page.ranks.items()))
        self.seen_ns = now

    async def _get(self, path: str) -> Reply:
        return await client.request(self.target, "GET", path, ASK_TIMEOUT_S, self._token(), self._tls)

    async def _post(self, path: str, timeout_s: float) -> Reply:
        return await client.request(self.target, "POST", path, timeout_s, self._token(), self._tls)

    def _token(self) -> str:
        if self._token_file is None:
            return ""
        try:
            return read_token(self._token_file)
        except (OSError, ValueError) as error:
            raise NotSentError(f"the {error.args[-1]}") from error
