"""vLLM's real API server on the CPU: resets under HTTP load change no token, and a stop leaves nothing behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.contract.engine_contract import reset_result
from tests.engine.conftest import BOOT_SECONDS, ROOT, eventually
from tests.fake_engine.client import BridgeClient

pytestmark = [pytest.mark.engine, pytest.mark.timeout(BOOT_SECONDS * 2)]

PREFIX = list(range(8, 136))
LENGTH = 300
_no_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


@contextmanager
def api_server(engine_dir: Path, model: Path) -> Iterator[str]:
    port = free_port()
    arguments = ["--host", "127.0.0.1", "--port", str(port), "--model", str(model), "--served-model-name", "tiny"]
    arguments += ["--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32"]
    arguments += ["--kv-cache-memory-bytes", str(64 << 20), "--max-model-len", "2048", "--seed", "1"]
    arguments += ["--enable-prompt-tokens-details", "--block-size", "32"]
    process = subprocess.Popen(
        [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments],
        cwd=ROOT,
        env={**os.environ, "KVCTL_ENGINE_DIR": str(engine_dir)},
        start_new_session=True,
    )

    def healthy() -> bool:
        assert process.poll() is None, f"the API server ended with code {process.returncode}"
        try:
            return bool(_no_proxy.open(f"http://127.0.0.1:{port}/health", timeout=5).status == 200)
        except OSError:
            return False

    try:
        eventually(healthy, lambda found: found, BOOT_SECONDS)
        yield f"http://127.0.0.1:{port}"
        process.send_signal(signal.SIGTERM)
        process.wait(60)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


def complete(url: str, prompt: list[int], length: int) -> dict[str, Any]:
    body = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": length,
        "temperature": 0,
        "ignore_eos": True,
        "detokenize": False,
        "return_token_ids": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with _no_proxy.open(request, timeout=120) as response:
        answer: dict[str, Any] = json.load(response)
        return answer


def tokens(answer: dict[str, Any]) -> list[int]:
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def cached(answer: dict[str, Any]) -> int:
    return int((answer["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)


def test_resets_under_http_load_change_no_token(engine_dir: Path, tiny_model_dir: Path) -> None:
    prompts = [[*PREFIX, 200 + number] for number in range(4)]
    with api_server(engine_dir, tiny_model_dir) as url, ThreadPoolExecutor(4) as clients:
        (path,) = engine_dir.glob("engine-0-*.sock")
        with BridgeClient(path) as bridge:
            undisturbed = [tokens(complete(url, prompt, LENGTH)) for prompt in prompts]
            assert all(len(found) == LENGTH for found in undisturbed)
            answers = [clients.submit(complete, url, prompt, LENGTH) for prompt in prompts]
            eventually(lambda: bridge.admission(0).running, lambda running: running == len(prompts))
            assert bridge.reset("fail").reason == "BLOCKS_HELD_BY_REQUESTS"
            kept = 0
            while bridge.admission(0).running == len(prompts) and kept < 40:
                kept += reset_result(bridge.reset("keep")).requests_kept
            assert kept >= len(prompts)
            assert [tokens(answer.result()) for answer in answers] == undisturbed
            assert bridge.reset("fail", wait_for_idle=True).state == "done"
            assert cached(complete(url, prompts[0], 1)) == 0
            assert cached(complete(url, prompts[0], 1)) == len(PREFIX)
    eventually(lambda: list(engine_dir.iterdir()), lambda found: found == [])
