"""The coordinator's settings; how they are given is in `sidecar.rpc.settings`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from sidecar.coordinator.inventory import InventoryError, load_inventory
from sidecar.rpc import logs, settings
from sidecar.rpc.addresses import Address
from sidecar.rpc.auth import Role
from sidecar.rpc.channels import ClientSecurity
from sidecar.rpc.settings import ConfigError, Program, ServerSecurity, Setting
from sidecar.rpc.tls import ClientTls

PREFIX: Final = "KVCTL_COORDINATOR_"


@dataclass(frozen=True, slots=True)
class Config:
    """Everything `kvctl-coordinator` can be told, checked."""

    inventory: Path | None
    targets: Sequence[str]
    discovery: Sequence[str]
    store: Path
    audit_log: str
    keep_operations: int
    keep_for: float
    replica_ca: Path | None
    replica_cert: Path | None
    replica_key: Path | None
    replica_server_name: str
    replica_token_file: Path | None
    replica_insecure: bool
    listen: Sequence[Address]
    metrics: Address | None
    tls_cert: Path | None
    tls_key: Path | None
    tls_client_ca: Path | None
    client_role: Mapping[str, Role]
    token_file: Sequence[tuple[Role, Path]]
    insecure: bool
    log_format: logs.Format
    log_level: str
    grace: float
    max_calls: int
    ready_file: Path | None
    check: bool = False
    """Validate and exit."""

    @property
    def server_security(self) -> ServerSecurity:
        """How this server proves itself and whom it serves."""
        return ServerSecurity(self.tls_cert, self.tls_key, self.tls_client_ca, self.client_role, self.token_file)

    @property
    def client_security(self) -> ClientSecurity:
        """How it proves itself to replicas and which it trusts."""
        tls = None
        if self.replica_ca is not None or self.replica_cert is not None:
            tls = ClientTls(self.replica_ca, self.replica_cert, self.replica_key, self.replica_server_name)
        return ClientSecurity(tls, self.replica_token_file, self.replica_insecure)

    @property
    def sources(self) -> tuple[str, ...]:
        """Every target text."""
        return (*self.targets, *self.discovery)


def default_store() -> Path:
    """$STATE_DIRECTORY (systemd), else /var/lib/kvctl when this user can write there, else the user's state."""
    configured = os.environ.get("STATE_DIRECTORY", "").split(":")[0]
    if configured:
        return Path(configured, "operations.db")
    system = Path("/var/lib/kvctl")
    if os.access(system, os.W_OK | os.X_OK):
        return system / "operations.db"
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base, "kvctl", "operations.db")


def load(arguments: Sequence[str], environment: Mapping[str, str]) -> Config:
    """Settings from all layers. ConfigError for what cannot be used; SystemExit for --help and --version."""
    values, check = settings.load(PROGRAM, arguments, environment)
    config = Config(**values, check=check)  # type: ignore[arg-type]
    config.server_security.check(config.listen, config.metrics)
    if config.inventory is None and not config.sources:
        raise ConfigError(
            "no replicas to coordinate: give --inventory FILE, or --targets with an address or dns:///name:port"
        )
    if config.inventory is not None:
        _check_inventory(config.inventory)
    if (config.replica_cert is None) != (config.replica_key is None):
        raise ConfigError("--replica-cert and --replica-key go together; one of them is missing")
    return config


def _check_inventory(path: Path) -> None:
    """At the start a list that cannot be read is a mistake; later the last good one is kept, see `discovery.static`."""
    try:
        load_inventory(path)
    except InventoryError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"--inventory {path} cannot be read by uid {os.getuid()}: {error.strerror}") from error


def _store(raw: settings.Raw) -> Path:
    path = Path(settings.one(raw)).absolute()
    if path.is_dir():
        raise ValueError(f"{path} is a directory; expected a file, e.g. {path / 'operations.db'}")
    return path


_TABLE: Final[dict[str, Setting]] = {
    "inventory": Setting(
        settings.path_or_none, str, "YAML file that lists replicas; read again when it changes", metavar="FILE"
    ),
    "targets": Setting(
        settings.several,
        list,
        "[NAME=]ADDRESS, dns:///name:port, endpoints:///NS/SERVICE or pods:///NS?selector=...; may be repeated",
        many=True,
        metavar="TARGET",
    ),
    "discovery": Setting(settings.several, list, "same as --targets", many=True, metavar="TARGET"),
    "store": Setting(
        _store, lambda: str(default_store()), "file of the operation store; one coordinator a file", metavar="FILE"
    ),
    "audit_log": Setting(settings.one, lambda: "-", "file for audit lines, - for stdout (-)", metavar="FILE"),
    "keep_operations": Setting(
        settings.count(1, 1_000_000), lambda: "1000", "ended operations kept on record (1000)", metavar="N"
    ),
    "keep_for": Setting(settings.seconds, lambda: "30d", "how long ended operations are kept (30d)", metavar="TIME"),
    "replica_ca": Setting(settings.path_or_none, str, "CA of the replicas' certificates, PEM", metavar="FILE"),
    "replica_cert": Setting(settings.path_or_none, str, "certificate shown to replicas, PEM", metavar="FILE"),
    "replica_key": Setting(settings.path_or_none, str, "its private key, PEM", metavar="FILE"),
    "replica_server_name": Setting(
        settings.one, str, "name expected in the replicas' certificates instead of their address", metavar="NAME"
    ),
    "replica_token_file": Setting(
        settings.path_or_none, str, "bearer token for replicas; read for each call", metavar="FILE"
    ),
    "replica_insecure": Setting(
        settings.boolean, lambda: "false", "send that token to other machines without TLS", switch=True
    ),
    **settings.server_table("127.0.0.1:7710", "127.0.0.1:7711"),
}

PROGRAM: Final = Program(
    "kvctl-coordinator",
    PREFIX,
    "Runs operations over a fleet of replicas, and remembers them. With --operator: Kubernetes CacheOperations.",
    _TABLE,
)

assert {*_TABLE, "check"} == {f.name for f in fields(Config)}, "the table and Config must name the same settings"
