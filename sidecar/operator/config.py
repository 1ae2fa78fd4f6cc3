"""The operator's settings; how they are given is in `sidecar.rpc.settings`.

They share names, environment and meaning with the coordinator's where both have them: it is the same program, with
resources in place of its own store and API.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Final

from sidecar.rpc import logs, settings
from sidecar.rpc.addresses import Address
from sidecar.rpc.channels import ClientSecurity
from sidecar.rpc.settings import ConfigError, Program, Setting
from sidecar.rpc.tls import ClientTls

PREFIX: Final = "KVCTL_OPERATOR_"


@dataclass(frozen=True, slots=True)
class Config:
    """Everything `kvctl-coordinator --operator` can be told, checked."""

    namespace: str
    """Empty: the namespace of the pod or of the kubeconfig's context."""
    discovery: Sequence[str]
    identity: str
    lease: str
    lease_duration: float
    """Seconds after which a leader that is gone is replaced."""
    replica_ca: Path | None
    replica_cert: Path | None
    replica_key: Path | None
    replica_server_name: str
    replica_token_file: Path | None
    replica_insecure: bool
    metrics: Address | None
    log_format: logs.Format
    log_level: str
    ready_file: Path | None
    check: bool = False
    """Validate and exit."""

    @property
    def client_security(self) -> ClientSecurity:
        """How it proves itself to replicas and which it trusts."""
        tls = None
        if self.replica_ca is not None or self.replica_cert is not None:
            tls = ClientTls(self.replica_ca, self.replica_cert, self.replica_key, self.replica_server_name)
        return ClientSecurity(tls, self.replica_token_file, self.replica_insecure)


def load(arguments: Sequence[str], environment: Mapping[str, str]) -> Config:
    """Settings from all layers. ConfigError for what cannot be used; SystemExit for --help and --version."""
    values, check = settings.load(PROGRAM, arguments, environment)
    config = Config(**values, check=check)  # type: ignore[arg-type]
    if (config.replica_cert is None) != (config.replica_key is None):
        raise ConfigError("--replica-cert and --replica-key go together; one of them is missing")
    if config.lease_duration < 1:
        raise ConfigError(f"--lease-duration is {config.lease_duration:g} s; a Lease counts whole seconds, at least 1")
    return config


_SERVER: Final = settings.server_table("", "127.0.0.1:7711")

_TABLE: Final[dict[str, Setting]] = {
    "namespace": Setting(
        settings.one, str, "namespace to serve (the pod's own, or the kubeconfig context's)", metavar="NAME"
    ),
    "discovery": Setting(
        settings.several,
        list,
        "pods:///NS?selector=... or endpoints:///NS/SERVICE (pods labelled kvctl.dev/sidecar=true); may be repeated",
        many=True,
        metavar="TARGET",
    ),
    "identity": Setting(settings.one, lambda: os.uname().nodename, "name of this process in the Lease", metavar="NAME"),
    "lease": Setting(settings.one, lambda: "kvctl-operator", "name of the Lease (kvctl-operator)", metavar="NAME"),
    "lease_duration": Setting(
        settings.seconds, lambda: "15s", "time after which a lost leader is replaced, at least 1s (15s)", metavar="TIME"
    ),
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
    "metrics": _SERVER["metrics"],
    "log_format": _SERVER["log_format"],
    "log_level": _SERVER["log_level"],
    "ready_file": _SERVER["ready_file"],
}

PROGRAM: Final = Program(
    "kvctl-coordinator --operator", PREFIX, "Runs the CacheOperation resources of one namespace.", _TABLE
)

assert {*_TABLE, "check"} == {f.name for f in fields(Config)}, "the table and Config must name the same settings"
