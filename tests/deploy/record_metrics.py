"""Record what a real replica and a real coordinator expose, for the tests of rules and dashboards.

    python tests/deploy/record_metrics.py

Starts vLLM's own API server on the CPU with the bridge, a sidecar and a coordinator, sends requests and operations
(some refused), and writes /metrics of all three twice, before and after, into tests/deploy/recorded. Run it again when
names of metrics change, here or in vLLM; what it writes is checked in.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OUT = Path(__file__).parent / "recorded"
BOOT_S = 240


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return str(answer.read().decode())


def until(url: str, process: subprocess.Popen[str], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        try:
            get(url)
            return
        except OSError as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{url} did not answer; the process is {process.poll()}") from error
            time.sleep(0.2)


def start(stack: ExitStack, words: list[str], log: Path, **env: str) -> subprocess.Popen[str]:
    """A process group of its own, ended with the stack."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "proto/gen")])
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", *words],
            env={**os.environ, "PYTHONPATH": path, **env},
            stdout=file,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def end() -> None:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)

    stack.callback(end)
    return process


def vllm_words(port: int) -> list[str]:
    """vLLM's own API server over the model without weights."""
    return [
        "vllm.entrypoints.openai.api_server",
        *("--model", str(ROOT / "sidecar/local/model"), "--served-model-name", "tiny", "--load-format", "dummy"),
        *("--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32", "--kv-cache-memory-bytes", "67108864"),
        *("--max-model-len", "2048", "--block-size", "32", "--host", "127.0.0.1", "--port", str(port)),
    ]


VLLM_ENV = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}


def complete(port: int, first: int, tokens: int = 8) -> None:
    body = json.dumps(
        {
            "model": "tiny",
            "prompt": [first, *range(1, 200)],
            "max_tokens": tokens,
            "ignore_eos": True,
            "detokenize": False,
            "temperature": 0,
        }
    ).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        answer.read()


def kvctl(*words: str) -> int:
    path = os.pathsep.join([str(ROOT), str(ROOT / "proto/gen")])
    done = subprocess.run(
        [sys.executable, "-m", "sidecar.cli.main", *words],
        env={**os.environ, "PYTHONPATH": path},
        timeout=60,
        check=False,
        capture_output=True,
        text=True,
    )
    sys.stdout.write(f"kvctl {' '.join(words)}: {done.returncode}\n{done.stdout[-400:]}{done.stderr[-400:]}\n")
    return done.returncode


def main() -> None:
    port, grpc_port, metrics, fleet, fleet_metrics = (free_port() for _ in range(5))
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        engines = work / "engines"
        engines.mkdir(mode=0o700)
        vllm = start(stack, vllm_words(port), work / "vllm.log", KVCTL_ENGINE_DIR=str(engines), **VLLM_ENV)
        words = ["sidecar.replica.main", "--engine-dir", str(engines), "--name", "vllm-0"]
        words += ["--listen", f"127.0.0.1:{grpc_port}", "--metrics", f"127.0.0.1:{metrics}"]
        sidecar = start(stack, words, work / "sidecar.log")
        words = ["sidecar.coordinator.main", "--targets", f"127.0.0.1:{grpc_port}", "--store", str(work / "ops.db")]
        words += ["--listen", f"127.0.0.1:{fleet}", "--metrics", f"127.0.0.1:{fleet_metrics}"]
        coordinator = start(stack, words, work / "coordinator.log")
        until(f"http://127.0.0.1:{metrics}/livez", sidecar, 30)
        until(f"http://127.0.0.1:{fleet_metrics}/livez", coordinator, 30)
        try:
            until(f"http://127.0.0.1:{port}/health", vllm, BOOT_S)
        except RuntimeError:
            sys.stderr.write((work / "vllm.log").read_text()[-4000:])
            raise
        until(f"http://127.0.0.1:{metrics}/readyz", sidecar, 30)

        def both(number: int) -> None:
            for name, at in (("vllm", port), ("sidecar", metrics), ("coordinator", fleet_metrics)):
                (OUT / f"{name}.{number}.prom").write_text(get(f"http://127.0.0.1:{at}/metrics"))

        def round_of_work() -> None:
            for first in (1, 1, 2, 2):
                complete(port, first)
            long = threading.Thread(target=complete, args=(port, 3, 400))
            long.start()
            time.sleep(0.5)  # the refusal needs a request that runs; a shorter one would only make it succeed
            kvctl("reset", "--mode", "fail", "--coordinator", f"127.0.0.1:{fleet}")
            kvctl("reset", "--mode", "keep", "--coordinator", f"127.0.0.1:{fleet}")
            long.join()
            kvctl("reorder", "--coordinator", f"127.0.0.1:{fleet}")
            kvctl("admission", "--target", f"127.0.0.1:{grpc_port}")

        round_of_work()
        both(1)
        round_of_work()
        both(2)


if __name__ == "__main__":
    main()
