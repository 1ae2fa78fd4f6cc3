"""The HTTP backend against vLLM's real API server, with and without its dev mode; no bridge anywhere near.

The server, its routes, the engine core and the scheduler are vLLM's own; only the model is the fake executor's, so that
a step takes as long as the test wants.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from kvctl.v1 import types_pb2 as types

from engine_bridge import protocol
from sidecar.backends.engine import Answered
from sidecar.backends.http.engines import HttpEngine, HttpEngines
from sidecar.replica.sampler import Sampler

pytestmark = [pytest.mark.engine, pytest.mark.timeout(420)]

BOOT_S = 300
STEP_MS = 20


@dataclass
class Server:
    """One API server process group."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path
    dev_mode: bool

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def complete(self, prompt: list[int], max_tokens: int) -> dict[str, Any]:
        """One completion, to its end."""
        body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "detokenize": False}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{self.url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as reply:
            answer: dict[str, Any] = json.load(reply)
        return answer

    def stop(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(10)


def boot(directory: Path, model: Path, dev_mode: bool) -> Server:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "KVCTL_BRIDGE": "0",
        "VLLM_PLUGINS": "",
        "KVCTL_FAKE_STEP_MS": str(STEP_MS),
        "KVCTL_FAKE_BLOCKS": "512",
        "TMPDIR": str(directory),
    }
    environment.pop("VLLM_SERVER_DEV_MODE", None)
    if dev_mode:
        environment["VLLM_SERVER_DEV_MODE"] = "1"
    arguments = [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--model", str(model), "--served-model-name", "tiny", "--skip-tokenizer-init", "--load-format", "dummy"),
        *("--enforce-eager", "--dtype", "float32", "--max-model-len", "4096", "--block-size", "16"),
        *("--max-num-seqs", "4", "--distributed-executor-backend", "tests.engine.fake_vllm.FakeExecutor"),
        "--enable-prompt-tokens-details",
    ]
    log = directory / "vllm.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            arguments, cwd=directory, env=environment, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    return Server(process, port, log, dev_mode)


def wait_until_healthy(server: Server) -> None:
    deadline = time.monotonic() + BOOT_S
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            break
        try:
            with opener.open(f"{server.url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.25)
    server.stop()
    pytest.fail(f"vLLM did not come up:\n{server.log.read_text(errors='replace')[-4000:]}")


@pytest.fixture(scope="module", params=[True, False], ids=["dev mode", "no dev mode"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path
) -> Iterator[Server]:
    found = boot(tmp_path_factory.mktemp("http"), tiny_model_dir, request.param)
    try:
        wait_until_healthy(found)
        yield found
    finally:
        found.stop()


@pytest.fixture
async def engine(server: Server) -> AsyncIterator[HttpEngine]:
    engines = HttpEngines(server.url, poll_s=0.5)
    await engines.start()
    found = engines.engines()[0]
    assert isinstance(found, HttpEngine)
    yield found
    await engines.close()


@pytest.fixture
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as pool:
        yield pool


def reset(running: str = "fail", **asked: bool) -> protocol.Reset:
    return protocol.Reset(1, str(uuid.uuid4()), 0, running, **asked)  # type: ignore[arg-type]


def engine_cores(parent: int) -> list[int]:
    """The engine core processes of an API server, by the title they give themselves."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    titles = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    found = [pid for pid, title in titles.items() if b"EngineCore" in title]
    assert found, titles
    return found


async def submit(engine: HttpEngine, mutation: protocol.Mutation) -> protocol.Outcome:
    answer = await engine.submit(mutation, time.monotonic_ns() + 20_000_000_000)
    assert isinstance(answer, Answered), answer
    return answer.outcome


async def until(condition: Callable[[], Awaitable[bool]], what: str, seconds: float = 30) -> None:
    """Poll something outside of this process."""
    end = asyncio.get_running_loop().time() + seconds
    while not await condition():
        assert asyncio.get_running_loop().time() < end, f"never came: {what}"
        await asyncio.sleep(0.1)


async def until_running(engine: HttpEngine, count: int) -> None:
    async def enough() -> bool:
        told = await engine.evidence(5.0)
        return isinstance(told, protocol.Evidence) and told.running >= count

    await until(enough, f"{count} running requests")


def stream(server: Server, pool: ThreadPoolExecutor, seed: int, max_tokens: int = 300) -> Future[dict[str, Any]]:
    return pool.submit(server.complete, [seed + i % 64 for i in range(64)], max_tokens)


def cached_tokens(answer: dict[str, Any]) -> int:
    details = answer["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens") or 0)


async def test_the_server_introduces_itself_and_its_engine_is_idle(server: Server, engine: HttpEngine):
    facts = engine.facts
    assert facts is not None
    assert facts.vllm_version.startswith("0.")
    assert (facts.model, facts.block_size, facts.data_parallel_size) == ("tiny", 16, 1)
    assert facts.blocks == 511
    assert (facts.capabilities["reset.fail"] == "") is server.dev_mode
    counters = engine.page().counters
    assert (counters.running, counters.waiting, counters.sleeping) == (0, 0, 0)
    assert (counters.blocks_total, counters.blocks_free) == (511, 511)


async def test_what_is_seen_under_load_is_flowing_and_idle_again_afterwards(
    server: Server, engine: HttpEngine, background: ThreadPoolExecutor
):
    requests = [stream(server, background, 10 + n, 200) for n in range(3)]
    await until_running(engine, 3)
    sampler = Sampler(_one(engine))
    seen: list[int] = []

    async def all_done() -> bool:
        status = await sampler.status(5.0)
        seen.append(status.engines[0].verdict)
        assert not status.stalled
        return all(request.done() for request in requests) and seen[-1] == types.VERDICT_IDLE

    await until(all_done, "the requests to end")
    assert types.VERDICT_FLOWING in seen
    await sampler.close()


async def test_without_dev_mode_a_reset_needs_it_and_says_what_is_better(server: Server, engine: HttpEngine):
    if server.dev_mode:
        assert (await submit(engine, reset())).state == "done"
        return
    outcome = await submit(engine, reset())
    assert (outcome.state, outcome.reason) == ("unsupported", "NEEDS_DEV_MODE")
    assert "engine bridge" in outcome.message


async def test_keep_needs_the_bridge_with_and_without_dev_mode(engine: HttpEngine):
    outcome = await submit(engine, reset("keep"))
    assert (outcome.state, outcome.reason) == ("unsupported", "NEEDS_ENGINE_BRIDGE")


async def test_an_idle_reset_empties_the_cache(server: Server, engine: HttpEngine):
    prompt = [7 + n % 99 for n in range(128)]
    server.complete(prompt, 2)
    assert cached_tokens(server.complete(prompt, 2)) > 0
    outcome = await submit(engine, reset())
    after = cached_tokens(server.complete(prompt, 2))
    if server.dev_mode:
        assert outcome.state == "done"
        assert after == 0
    else:
        assert outcome.state == "unsupported"
        assert after > 0


async def test_under_load_fail_is_refused_by_name_and_preempt_works_without_losing_a_request(
    server: Server, engine: HttpEngine, background: ThreadPoolExecutor
):
    if not server.dev_mode:
        assert (await submit(engine, reset("preempt"))).reason == "NEEDS_DEV_MODE"
        return
    requests = [stream(server, background, 100 + n, 250) for n in range(2)]
    await until_running(engine, 2)
    refused = await submit(engine, reset())
    assert (refused.state, refused.reason) == ("refused", "BLOCKS_HELD_BY_REQUESTS")
    assert "2 requests running" in refused.message
    before = engine.page().counters.preemptions
    assert (await submit(engine, reset("preempt"))).state == "done"
    answers = await asyncio.gather(*(asyncio.wrap_future(request) for request in requests))
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [250, 250]

    async def preempted() -> bool:
        await engine.evidence(5.0)
        return engine.page().counters.preemptions >= before + 2

    await until(preempted, "two preemptions in the metrics")


async def test_the_other_tiers_are_accepted_and_stay_unconfirmed(server: Server, engine: HttpEngine):
    outcome = await submit(engine, reset(connector=True, mm=True, encoder=True))
    if not server.dev_mode:
        assert outcome.reason == "NEEDS_DEV_MODE"
        return
    assert (outcome.state, outcome.reason) == ("partial", "UNCONFIRMED")
    assert isinstance(outcome.result, protocol.ResetResult)
    assert outcome.result.prefix.state == "done"
    states = [outcome.result.connector.state, outcome.result.multimodal.state, outcome.result.encoder.state]
    assert states == ["unconfirmed"] * 3


async def test_a_paused_scheduler_is_seen_where_dev_mode_lets_it_be_asked(
    server: Server, engine: HttpEngine, background: ThreadPoolExecutor
):
    if not server.dev_mode:
        assert engine.page().counters.paused == -1
        return
    running = stream(server, background, 60, 400)
    await until_running(engine, 1)
    await asyncio.to_thread(_post, server, "/pause?mode=keep")

    async def seen() -> bool:
        await engine.evidence(5.0)
        return engine.page().counters.paused == 2

    try:
        await until(seen, "the pause")
    finally:
        await asyncio.to_thread(_post, server, "/resume")
    await asyncio.wrap_future(running)


async def test_a_dead_engine_core_is_dead_within_seconds(server: Server, engine: HttpEngine):
    """vllm#39863. Last, because nothing is left after it."""
    assert engine.connected
    for pid in engine_cores(server.process.pid):
        os.kill(pid, signal.SIGKILL)
    sampler = Sampler(_one(engine))

    async def dead() -> bool:
        return (await sampler.status(5.0)).engines[0].verdict == types.VERDICT_ENGINE_DEAD

    await until(dead, "the death of the engine core")
    answer = await engine.submit(reset(), time.monotonic_ns() + 5_000_000_000)
    assert not isinstance(answer, Answered), "a dead engine answers nothing"
    await sampler.close()


class _one:  # noqa: N801 - reads as "one engine"
    """An EngineSet of one."""

    place = "test"

    def __init__(self, engine: HttpEngine) -> None:
        self._engine = engine

    def engines(self) -> list[HttpEngine]:
        return [self._engine]

    def trouble(self) -> None:
        return None

    def on_change(self, callback: Any) -> None: ...
    async def start(self) -> None: ...
    async def close(self) -> None: ...


def _post(server: Server, path: str) -> None:
    request = urllib.request.Request(f"{server.url}{path}", b"", method="POST")
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=20) as reply:
        assert reply.status == 200
