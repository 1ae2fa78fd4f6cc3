"""What a local fleet starts: command lines and environments of vLLM and of the sidecar beside it.

The model is six layers of random weights, so it needs no download; it is large enough that the engine, not the HTTP
server before it, sets the pace (about 10 ms a token). Its config is Granite's for one reason: Granite has multipliers
for attention and residuals, and with those of model/config.json a greedy stream depends on every token of its context.
(With the usual random weights the next token depends on little but the last one, and "the same tokens as without a
reset" would prove nothing about the KV cache.)
"""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sidecar.local.layout import LOGS, LocalError, Replica

MODEL: Final = Path(__file__).with_name("model")
MODEL_NAME: Final = "tiny"
MAX_MODEL_TOKENS: Final = 8192
VOCABULARY: Final = 512
BLOCK_TOKENS: Final = 32
"""Tokens in a KV block: attention on the CPU wants a multiple of 32."""

MAX_REPLICAS: Final = 16


@dataclass(frozen=True, slots=True)
class Settings:
    """How to boot a fleet."""

    replicas: int = 2
    directory: str | None = None
    """Parent of the private socket directory; None: the runtime directory or /tmp."""
    base_port: int | None = None
    """First of three ports a replica (API, sidecar, metrics); None: free ones."""
    kv_cache_mib: int = 128
    """KV cache of one replica; 128 MiB are 682 blocks of 32 tokens."""
    dev_mode: bool = False
    """vLLM's development routes (/reset_prefix_cache and others); off as in production."""
    boot_seconds: float = 300.0
    """Time for the whole fleet to be ready."""
    engine_arguments: tuple[str, ...] = field(default=())
    """Further arguments for vLLM's server, e.g. "--data-parallel-size=2"."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program to start."""

    arguments: list[str]
    environment: dict[str, str]
    log: Path


def check(settings: Settings) -> None:
    """LocalError for settings that cannot work, before anything is started."""
    if not 1 <= settings.replicas <= MAX_REPLICAS:
        raise LocalError(f"--replicas {settings.replicas}: a local fleet has 1 to {MAX_REPLICAS} replicas")
    if importlib.util.find_spec("vllm") is None:
        raise LocalError(
            f"vLLM is not installed beside {sys.executable}; in a clone run `make demo`, "
            "which installs the CPU build, or install vLLM there"
        )


def plan(settings: Settings, state: Path) -> list[Replica]:
    """Names, ports and logs of the replicas. LocalError when a port is in use."""
    ports = _ports(settings)
    return [
        Replica(
            name=f"r{index}",
            api=f"127.0.0.1:{ports[3 * index]}",
            sidecar=f"127.0.0.1:{ports[3 * index + 1]}",
            metrics=f"127.0.0.1:{ports[3 * index + 2]}",
            engine_log=str(state / LOGS / f"r{index}-engine.log"),
            sidecar_log=str(state / LOGS / f"r{index}-sidecar.log"),
        )
        for index in range(settings.replicas)
    ]


def _ports(settings: Settings) -> list[int]:
    wanted = [0] * (3 * settings.replicas)
    if settings.base_port is not None:
        wanted = [settings.base_port + offset for offset in range(len(wanted))]
        if wanted[0] < 1 or wanted[-1] > 65535:
            raise LocalError(f"--base-port {settings.base_port}: ports {wanted[0]} to {wanted[-1]} do not all exist")
    held: list[socket.socket] = []
    try:
        for port in wanted:
            bound = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            held.append(bound)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                bound.bind(("127.0.0.1", port))
                bound.listen(1)  # SO_REUSEADDR lets a second bind pass, but not a second listen
            except OSError as error:
                raise LocalError(f"port {port} on 127.0.0.1: {error.strerror}; give another --base-port") from error
        return [int(bound.getsockname()[1]) for bound in held]
    finally:
        for bound in held:
            bound.close()


def engine_directory(run: Path, replica: Replica) -> Path:
    """Where this replica's engines and sidecar meet."""
    return run / replica.name


def engine(replica: Replica, run: Path, settings: Settings) -> Program:
    """The OpenAI API server of vLLM on the CPU, with the bridge, offline, one thread for computing."""
    host, port = replica.api.rsplit(":", 1)
    # `vllm serve` asks for the metadata of a package named vllm, which the CPU build does not have.
    arguments = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", host, "--port", port]
    arguments += ["--model", str(MODEL), "--served-model-name", MODEL_NAME]
    arguments += ["--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32"]
    arguments += ["--kv-cache-memory-bytes", str(settings.kv_cache_mib * 2**20)]
    arguments += ["--max-model-len", str(MAX_MODEL_TOKENS), "--block-size", str(BLOCK_TOKENS)]
    arguments += ["--enable-prompt-tokens-details", *settings.engine_arguments]
    directory = engine_directory(run, replica)
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_SERVER_DEV_MODE": "1" if settings.dev_mode else "0",
        "VLLM_PLUGINS": "kvctl",
        "KVCTL_BRIDGE": "1",
        "KVCTL_ENGINE_DIR": str(directory),
        # Two replicas fit two cores, and one thread computes the same sums in the same order every time.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # vLLM's own sockets and caches go where they are removed with the fleet.
        "VLLM_RPC_BASE_PATH": str(directory),
        "VLLM_CACHE_ROOT": str(run / "cache"),
        "VLLM_CONFIG_ROOT": str(run / "cache"),
        "TMPDIR": str(directory),
        "PYTHONUNBUFFERED": "1",
    }
    return Program(arguments, environment, Path(replica.engine_log))


def sidecar(replica: Replica, run: Path) -> Program:
    """kvctl-sidecar for one replica."""
    arguments = [sys.executable, "-m", "sidecar.replica.main", "--engine-dir", str(engine_directory(run, replica))]
    arguments += ["--listen", replica.sidecar, "--metrics", replica.metrics]
    arguments += ["--name", replica.name, "--label", "fleet=local"]
    # Settings of a sidecar that the user runs elsewhere are not meant for this one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVCTL_")}
    return Program(arguments, environment | {"PYTHONUNBUFFERED": "1"}, Path(replica.sidecar_log))
