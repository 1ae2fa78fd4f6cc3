"""A vLLM API server that is none: answers as told, in the shapes of vLLM 0.12 to 0.33, over real sockets."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field


@dataclass
class Answer:
    """What one route answers. `hold` makes it wait until it is set; `drop` ends the connection instead."""

    status: int = 200
    body: str = ""
    content_type: str = "application/json"
    chunked: bool = False
    hold: asyncio.Event | None = None
    drop: bool = False


def metrics(
    running: int = 0,
    waiting: int = 0,
    *,
    ranks: int = 1,
    usage: float = 0.0,
    tokens: int = 100,
    preemptions: int = 0,
    deferred: int | None = 0,
    started: float | None = 1000.5,
    awake: int | None = 1,
    caching: bool = True,
    old_names: bool = False,
) -> str:
    """A page as vLLM writes it, with families that nobody reads in between."""
    lines = [
        "# HELP python_gc_objects_collected_total Objects",
        'python_gc_objects_collected_total{generation="0"} 1.0',
    ]
    if started is not None:
        lines.append(f"process_start_time_seconds {started}")
    for rank in range(ranks):
        labels = f'engine="{rank}",model_name="tiny \\"x\\", y"'
        use = "gpu_cache_usage_perc" if old_names else "kv_cache_usage_perc"
        lines += [
            f"vllm:num_requests_running{{{labels}}} {float(running)}",
            f"vllm:num_requests_waiting{{{labels}}} {float(waiting)}",
            f"vllm:{use}{{{labels}}} {usage}",
            f"vllm:num_preemptions_total{{{labels}}} {float(preemptions)}",
            f"vllm:num_preemptions_created{{{labels}}} 1.7e9",
            f"vllm:prompt_tokens_total{{{labels}}} {float(tokens)}",
            f"vllm:generation_tokens_total{{{labels}}} {float(tokens)}",
            f"vllm:iteration_tokens_total_count{{{labels}}} 7.0",
            f'vllm:cache_config_info{{block_size="16",enable_prefix_caching="{caching}",engine="{rank}",'
            f'num_gpu_blocks="161"}} 1.0',
        ]
        if deferred is not None:
            lines.append(f'vllm:num_requests_waiting_by_reason{{{labels},reason="deferred"}} {float(deferred)}')
        if awake is not None:
            lines.append(f'vllm:engine_sleep_state{{{labels},sleep_state="awake"}} {float(awake)}')
    return "\n".join(lines) + "\n"


@dataclass
class FakeVllm:
    """Routes are "METHOD /path" without the query; anything not listed is a 404."""

    version: str = "0.33.0"
    routes: dict[str, Answer] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    headers: list[str] = field(default_factory=list)
    port: int = 0
    posted: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.routes = {
            "GET /health": Answer(),
            "GET /version": Answer(body=f'{{"version":"{self.version}"}}'),
            "GET /metrics": Answer(body=metrics(), content_type="text/plain"),
            **self.routes,
        }
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def dev(self, reset: Answer | None = None) -> FakeVllm:
        """With the dev routes."""
        self.routes["GET /reset_prefix_cache"] = Answer(405, '{"detail":"Method Not Allowed"}')
        self.routes["POST /reset_prefix_cache"] = reset or Answer(body='{"success":true}')
        self.routes["POST /reset_mm_cache"] = Answer()
        self.routes["POST /reset_encoder_cache"] = Answer()
        return self

    def show(self, **values: object) -> None:
        """Change what /metrics says."""
        self.routes["GET /metrics"] = Answer(body=metrics(**values), content_type="text/plain")  # type: ignore[arg-type]

    @property
    def resets(self) -> list[str]:
        """POSTs so far, with their queries."""
        return [request.removeprefix("POST ") for request in self.requests if request.startswith("POST ")]

    async def __aenter__(self) -> FakeVllm:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Listen no more and drop what is open."""
        if self._server is not None:
            self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._serve(reader, writer)
        except (asyncio.CancelledError, ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._connections.discard(task)
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.splitlines()[0].split(" ")
        self.requests.append(f"{method} {path}")
        self.headers.append(head)
        if method == "POST":
            self.posted.set()
        answer = self.routes.get(f"{method} {path.partition('?')[0]}", Answer(404, '{"detail":"Not Found"}'))
        if answer.hold is not None:
            await answer.hold.wait()
        if answer.drop:
            return
        body = answer.body.encode()
        reply = [f"HTTP/1.1 {answer.status} Whatever", f"content-type: {answer.content_type}"]
        if answer.chunked:
            reply += ["transfer-encoding: chunked", "", ""]
            writer.write("\r\n".join(reply).encode())
            for start in range(0, len(body), 7):
                piece = body[start : start + 7]
                writer.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
            writer.write(b"0\r\n\r\n")
        else:
            writer.write("\r\n".join([*reply, f"content-length: {len(body)}", "", ""]).encode() + body)
        await writer.drain()
