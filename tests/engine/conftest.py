"""Real vLLM engines for tests, booted as seldom as possible.

* `engine_process(...)`: context manager; vLLM's own client with an engine core process behind it (fake executor),
  driven through `VllmEngineHarness`.
* `sync_engine`, `async_engine`, `shared_engine` (both in turn): such engines shared by all tests of a session.
* `in_process_engine(...)`: the same without a process: the caller steps.
* `tiny_model_dir`: a model without weights that vLLM's CPU backend really runs.

A missing vLLM fails these tests; it does not skip them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tests.fake_engine.client import BridgeClient

Value = TypeVar("Value")
ROOT = Path(__file__).resolve().parents[2]
os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "proto" / "gen"), os.environ.get("PYTHONPATH", "")])
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

MODEL_DIR = ROOT / "sidecar" / "local" / "model"
BOOT_SECONDS = 180


@pytest.fixture(scope="session")
def tiny_model_dir() -> Path:
    return MODEL_DIR


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Booting vLLM is mostly imports, and slow on a loaded machine."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(BOOT_SECONDS * 2))


def engine_config(*, asynchronous: bool = False, **options: Any) -> Any:
    """A VllmConfig for the tiny model with the fake executor; `options` are EngineArgs."""
    from vllm.engine.arg_utils import EngineArgs

    arguments: dict[str, Any] = {
        "model": str(MODEL_DIR),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "enforce_eager": True,
        "dtype": "float32",
        "max_model_len": 1024,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 256,
        "block_size": 16,
        "enable_prefix_caching": True,
        "distributed_executor_backend": "tests.engine.fake_vllm.FakeExecutor",
        **options,
    }
    config = EngineArgs(**arguments).create_engine_config()
    # The CPU platform switches asynchronous scheduling off for the sake of its workers; the fake one can do it.
    config.scheduler_config.async_scheduling = asynchronous
    return config


class VllmEngineHarness:
    """vLLM's client and what came out of it. Outputs of an engine process are taken by a thread."""

    def __init__(self, client: Any, directory: Path, ranks: int = 1) -> None:
        self.client = client
        self.directory = directory
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, str] = {}
        self.cached: dict[str, int] = {}
        self.changed = threading.Condition()
        self._named = 0
        self._ranks = ranks
        self._pump: threading.Thread | None = None
        self._closing = False

    # --- requests ------------------------------------------------------------------------------------------------

    def add(self, prompt: list[int], max_tokens: int, *, rank: int | None = None, request_id: str = "") -> str:
        from vllm import SamplingParams
        from vllm.v1.engine import EngineCoreRequest

        self._named += 1
        name = request_id or f"request-{self._named}"
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        self.tokens[name] = []
        self.client.add_request(
            EngineCoreRequest(
                request_id=name,
                prompt_token_ids=prompt,
                mm_features=None,
                sampling_params=sampling,
                pooling_params=None,
                arrival_time=time.time(),
                lora_request=None,
                cache_salt=None,
                data_parallel_rank=rank,
            )
        )
        return name

    def take(self, outputs: Any) -> None:
        with self.changed:
            for output in outputs.outputs:
                self.tokens[output.request_id] += output.new_token_ids
                if output.prefill_stats is not None:
                    self.cached[output.request_id] = output.prefill_stats.num_cached_tokens
                if output.finish_reason is not None:
                    self.finished[output.request_id] = str(output.finish_reason)
            self.changed.notify_all()

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, seconds), f"never came: {what}; tokens {self.counts()}"

    def wait_tokens(self, name: str, count: int) -> None:
        self.wait(lambda: len(self.tokens[name]) >= count, f"{count} tokens of {name}")

    def wait_finished(self, *names: str) -> None:
        self.wait(lambda: all(name in self.finished for name in names), f"the end of {names}")

    def counts(self) -> dict[str, int]:
        return {name: len(tokens) for name, tokens in self.tokens.items()}

    # --- the process ---------------------------------------------------------------------------------------------

    def start_pump(self) -> None:
        def pump() -> None:
            while True:
                try:
                    outputs = self.client.get_output()
                except Exception:
                    if self._closing:
                        return
                    raise
                self.take(outputs)

        self._pump = threading.Thread(target=pump, name="outputs", daemon=True)
        self._pump.start()

    def sockets(self) -> list[Path]:
        """Sockets of all ranks, by rank, once they are there."""
        until = time.monotonic() + BOOT_SECONDS
        while True:
            found = sorted(self.directory.glob("engine-*.sock"))
            if len(found) >= self._ranks:
                return found
            notes = [note.read_text() for note in self.directory.glob("*.failed")]
            assert not notes, notes
            assert time.monotonic() < until, f"no engine socket in {list(self.directory.iterdir())}"
            threading.Event().wait(0.02)

    @contextmanager
    def bridge(self, rank: int = 0) -> Iterator[BridgeClient]:
        with BridgeClient(self.sockets()[rank]) as client:
            yield client

    def close(self) -> None:
        self._closing = True
        self.client.shutdown()


@contextmanager
def engine_process(
    directory: Path,
    *,
    asynchronous: bool = False,
    step_ms: float = 0,
    blocks: int = 256,
    ranks: int = 1,
    **options: Any,
) -> Iterator[VllmEngineHarness]:
    """An engine core process of vLLM with the fake executor; `options` are EngineArgs."""
    from vllm.v1.engine.core_client import SyncMPClient
    from vllm.v1.executor.abstract import Executor

    environment = {
        "KVCTL_ENGINE_DIR": str(directory),
        "KVCTL_FAKE_STEP_MS": str(step_ms),
        "KVCTL_FAKE_BLOCKS": str(blocks),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        config = engine_config(asynchronous=asynchronous, **options)
        client = SyncMPClient(config, Executor.get_class(config), log_stats=True)
    harness = VllmEngineHarness(client, directory, ranks)
    try:
        harness.start_pump()
        harness.sockets()
        yield harness
    finally:
        harness.close()


@contextmanager
def in_process_engine(
    directory: Path, *, asynchronous: bool = False, blocks: int = 256, **options: Any
) -> Iterator[VllmEngineHarness]:
    """An engine core in this process that the test steps: `harness.take(harness.client.get_output())`."""
    from vllm.v1.engine.core_client import InprocClient
    from vllm.v1.executor.abstract import Executor

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVCTL_ENGINE_DIR", str(directory))
        patch.setenv("KVCTL_FAKE_BLOCKS", str(blocks))
        config = engine_config(asynchronous=asynchronous, **options)
        client = InprocClient(config, Executor.get_class(config), log_stats=True)
    harness = VllmEngineHarness(client, directory)
    try:
        yield harness
    finally:
        harness.close()


def eventually(read: Callable[[], Value], fits: Callable[[Value], bool], seconds: float = 20) -> Value:
    """Read until it fits; the last reading fails the test."""
    until = time.monotonic() + seconds
    while not fits(value := read()):
        assert time.monotonic() < until, value
        threading.Event().wait(0.01)
    return value


@pytest.fixture(scope="session")
def sync_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngineHarness]:
    """One engine process for all tests that leave it without requests. 1024 blocks of 16, 2 ms a step."""
    with engine_process(tmp_path_factory.mktemp("e"), step_ms=2, blocks=1024, max_model_len=8192) as engine:
        yield engine


@pytest.fixture(scope="session")
def async_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngineHarness]:
    """The same with AsyncScheduler and two batches in flight."""
    directory = tmp_path_factory.mktemp("e")
    with engine_process(directory, asynchronous=True, step_ms=2, blocks=1024, max_model_len=8192) as engine:
        yield engine


@pytest.fixture(params=["sync", "async"])
def shared_engine(request: pytest.FixtureRequest) -> VllmEngineHarness:
    """Either of the two."""
    engine: VllmEngineHarness = request.getfixturevalue(f"{request.param}_engine")
    return engine


@pytest.fixture
def engine_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Short enough for a socket path."""
    return tmp_path_factory.mktemp("e")
