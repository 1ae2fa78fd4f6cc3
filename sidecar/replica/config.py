"""The sidecar's settings; how they are given, and in which order they win, is in `sidecar.rpc.settings`."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final

from engine_bridge.protocol import default_engine_dir
from sidecar.rpc import addresses, logs, settings
from sidecar.rpc.addresses import Address
from sidecar.rpc.auth import Role
from sidecar.rpc.settings import ConfigError, Program, Raw, ServerSecurity, Setting

PREFIX: Final = "KVCTL_SIDECAR_"

_LABEL_KEY: Final = re.compile(r"[A-Za-z0-9._/-]{1,253}")
_LABEL_VALUE: Final = re.compile(r"[A-Za-z0-9._-]{0,253}")
"""What an inventory and a label selector take."""


@dataclass(frozen=True, slots=True)
class Config:
    """Everything `kvctl-sidecar` can be told, checked."""

    name: str
    labels: Mapping[str, str]
    engine_dir: Path
    engine_url: str
    engine_token_file: Path | None
    engine_ca: Path | None
    listen: Sequence[Address]
    metrics: Address | None
    tls_cert: Path | None
    tls_key: Path | None
    tls_client_ca: Path | None
    client_role: Mapping[str, Role]
    token_file: Sequence[tuple[Role, Path]]
    insecure: bool
    expect_engines: int
    audit_log: str
    log_format: logs.Format
    log_level: str
    grace: float
    max_calls: int
    stall_after: float
    hung_after: float
    ready_file: Path | None
    check: bool = field(default=False)
    """Validate and exit."""

    @property
    def server_security(self) -> ServerSecurity:
        """How this server proves itself and whom it serves."""
        return ServerSecurity(self.tls_cert, self.tls_key, self.tls_client_ca, self.client_role, self.token_file)


def load(arguments: Sequence[str], environment: Mapping[str, str]) -> Config:
    """Settings from all layers. ConfigError for what cannot be used; SystemExit for --help and --version."""
    # The short form that everybody types; the setting itself has its full name in every layer.
    words = ["--labels" if word == "--label" else word.replace("--label=", "--labels=", 1) for word in arguments]
    values, check = settings.load(PROGRAM, words, environment)
    config = Config(**values, check=check)  # type: ignore[arg-type]
    config.server_security.check(config.listen, config.metrics)
    if config.stall_after < 1 or config.hung_after < config.stall_after:
        raise ConfigError(
            f"--stall-after {config.stall_after:g} s and --hung-after {config.hung_after:g} s: expected 1 s or more "
            "for the first, and no less than that for the second"
        )
    return config


def _engine_dir(raw: Raw) -> Path:
    if not settings.one(raw):
        raise ValueError("no directory is given")
    path = Path(settings.one(raw)).absolute()
    longest = len(os.fsencode(path)) + len("/engine-00000-00000000.sock")
    if longest > addresses.MAX_SOCKET_PATH_BYTES:
        raise ValueError(
            f"{path} is too long: a socket in it would have {longest} bytes and Linux allows "
            f"{addresses.MAX_SOCKET_PATH_BYTES}; choose a shorter directory"
        )
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is not a directory")
    return path


def _name(raw: Raw) -> str:
    text = settings.one(raw)
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?", text):
        raise ValueError(
            f"{settings.shown(text)} is not a replica name; expected 1 to 253 letters, digits, '-', '.' and '_', "
            "with a letter or digit at both ends"
        )
    if text == "all":
        raise ValueError("'all' means every replica where replicas are chosen; give this one another --name")
    return text


def _labels(raw: Raw) -> dict[str, str]:
    labels: dict[str, str] = {}
    for key, value in (settings.pair(text, "KEY=VALUE") for text in settings.several(raw)):
        if not _LABEL_KEY.fullmatch(key):
            raise ValueError(
                f"label key {settings.shown(key)} is not one; expected 1 to 253 letters, digits, '.', '_', '/' and '-'"
            )
        if not _LABEL_VALUE.fullmatch(value):
            raise ValueError(
                f"value {settings.shown(value)} of label {key!r} is not one; expected at most 253 letters, "
                "digits, '.', '_' and '-'"
            )
        if key in labels:
            raise ValueError(f"label {key!r} is given twice: {labels[key]!r} and {value!r}")
        labels[key] = value
    return labels


def _url(raw: Raw) -> str:
    text = settings.one(raw).rstrip("/")
    if text and not text.startswith(("http://", "https://")):
        raise ValueError(f"{settings.shown(text)} is not a URL; expected e.g. http://127.0.0.1:8000")
    return text


_TABLE: Final[dict[str, Setting]] = {
    "name": Setting(_name, lambda: socket.gethostname() or "replica", "replica name (host name)", metavar="NAME"),
    "labels": Setting(
        _labels, list, "label of this replica, also --label; may be repeated", many=True, metavar="KEY=VALUE"
    ),
    "engine_dir": Setting(
        _engine_dir,
        # KVCTL_ENGINE_DIR, which the engines read, counts here too.
        lambda: str(default_engine_dir()),
        "directory where engines put their sockets (KVCTL_ENGINE_DIR, else /run/kvctl or the user's)",
        metavar="DIR",
    ),
    "engine_url": Setting(_url, str, "stock vLLM's HTTP address; used where no bridge is found", metavar="URL"),
    "engine_token_file": Setting(settings.path_or_none, str, "bearer token for that HTTP address", metavar="FILE"),
    "engine_ca": Setting(settings.path_or_none, str, "CA that signed its certificate, for https", metavar="FILE"),
    "expect_engines": Setting(
        settings.count(0, 4096),
        lambda: "0",
        "data-parallel ranks that must be here; missing ones fail (0: as many as they know of)",
        metavar="N",
    ),
    "stall_after": Setting(
        settings.seconds, lambda: "5s", "no token for so long, with work there, is a stall (5s)", metavar="TIME"
    ),
    "hung_after": Setting(
        settings.seconds,
        lambda: "60s",
        "one step for so long is a hung engine; raise it for long prefills (60s)",
        metavar="TIME",
    ),
    "audit_log": Setting(settings.one, lambda: "-", "file for audit lines, - for stdout (-)", metavar="FILE"),
    **settings.server_table("127.0.0.1:7700", "127.0.0.1:7701"),
}

PROGRAM: Final = Program(
    "kvctl-sidecar",
    PREFIX,
    "Serves the KV cache administration API for the vLLM engines beside it.",
    _TABLE,
)

assert {*_TABLE, "check"} == {f.name for f in fields(Config)}, "the table and Config must name the same settings"
