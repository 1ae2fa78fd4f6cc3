"""What `kvctl doctor` looks at, and what it says about it: findings in the order in which a call travels.

Here (limits, token, certificates, proxies), the coordinator, each replica (reachable, a sidecar, its version, its
clock), each engine (attached, same version as its sidecar, what it cannot do, whether it admits requests), and, for
what runs on this machine, the engine directory with its sockets and notes of failed attachments.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Final

from kvctl.v1 import fleet_pb2, types_pb2
from rich.console import Console

from engine_bridge import __version__, note
from engine_bridge.protocol import default_engine_dir
from sidecar.cli import certificates, output
from sidecar.cli.exitcodes import Exit
from sidecar.cli.finding import Finding, Level
from sidecar.cli.printers import style
from sidecar.cli.printers.admission import BAD, GOOD, verdict_name
from sidecar.cli.reaching import open_reach, security_of
from sidecar.cli.settings import Settings
from sidecar.client.reach import Reach
from sidecar.client.remote import CoordinatorError
from sidecar.coordinator.outcomes import TARGET_NOT_READY

CLOCK_SKEW_S: Final = 60.0
ADMISSION_TIMEOUT_S: Final = 5.0
_PROXIES: Final = ("http_proxy", "https_proxy", "HTTPS_PROXY", "HTTP_PROXY", "grpc_proxy")
_PLACES: Final = {"ok": 0, "warning": 1, "wrong": 2}
"""What needs a look is printed last."""
_TONES: Final = {"ok": "good", "warning": "doubtful", "wrong": "bad"}


def examine(settings: Settings) -> list[Finding]:
    """Everything, in the order in which a call travels."""
    findings = [*_here(settings), *_engine_directory(default_engine_dir())]
    findings += asyncio.run(_fleet(settings))
    return findings


def print_findings(findings: list[Finding], form: str) -> Exit:
    """Print, and decide the exit code."""
    wrong = [finding for finding in findings if finding.level == "wrong"]
    if form == "json":
        output.write(json.dumps([asdict(finding) for finding in findings], indent=2) + "\n")
    else:
        output.show(lambda console: print_table(console, findings))
    if not wrong:
        return Exit.SUCCEEDED
    replicas = [finding for finding in findings if finding.subject.startswith("replica ")]
    lost = [finding for finding in replicas if finding.unreachable]
    return Exit.UNREACHABLE if any(f.unreachable for f in findings) and len(lost) == len(replicas) else Exit.FAILED


def print_table(console: Console, findings: list[Finding]) -> None:
    """A row a finding, what is wrong last, with what to do about it; then the sums."""
    made = style.table("", "WHAT", "FOUND")
    for finding in sorted(findings, key=lambda finding: _PLACES[finding.level]):
        text = finding.found + (f" -> {finding.advice}" if finding.advice else "")
        made.add_row(style.words(finding.level, _TONES[finding.level]), style.words(finding.subject), style.words(text))
    console.print(made)
    wrong, warnings = (sum(finding.level == level for finding in findings) for level in ("wrong", "warning"))
    console.print(f"{style.count(len(findings), 'check')}: {wrong} wrong, {style.count(warnings, 'warning')}")


# --- here --------------------------------------------------------------------------------------------------------


def _here(settings: Settings) -> Iterator[Finding]:
    yield Finding("ok", "kvctl", f"{__version__} on Python {sys.version.split()[0]}")
    yield Finding("ok", "fleet", f"{settings.fleet} (from {settings.source})")
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < 1024:
        yield Finding("warning", "open files", f"limit {soft}", "raise it with `ulimit -n 1024` for large fleets")
    else:
        yield Finding("ok", "open files", f"limit {soft}")
    if found := [name for name in _PROXIES if os.environ.get(name)]:
        yield Finding("ok", "proxy", f"{', '.join(found)} set; kvctl never uses a proxy")
    for what, path in (("CA", settings.ca), ("certificate", settings.cert)):
        if path:
            yield certificates.in_file(what, Path(path), time.time())
    if settings.key:
        yield _secret_file("key", Path(settings.key))
    if settings.token_file:
        yield _secret_file("token", Path(settings.token_file))


def _secret_file(what: str, path: Path) -> Finding:
    subject = f"{what} {path}"
    try:
        mode = path.stat().st_mode
        with path.open("rb") as file:
            empty = not file.read(4096).strip()
    except OSError as error:
        text = f"cannot be read by uid {os.getuid()}: {error.strerror or error}"
        return Finding("wrong", subject, text, "check path and mode")
    if empty:
        return Finding("wrong", subject, "is empty", f"put a {what} into it")
    if mode & (stat.S_IRWXG | stat.S_IRWXO) & ~(stat.S_IXGRP | stat.S_IXOTH):
        return Finding("warning", subject, f"mode {stat.S_IMODE(mode):04o}: others may read it", f"chmod 600 {path}")
    return Finding("ok", subject, "readable by its owner only")


# --- engines of this machine -------------------------------------------------------------------------------------


def _engine_directory(directory: Path) -> Iterator[Finding]:
    subject = f"engine directory {directory}"
    if not directory.is_dir():
        return
    try:
        entries = sorted(directory.iterdir())
        found = directory.stat()
    except OSError as error:
        text = f"cannot be listed by uid {os.getuid()}: {error.strerror or error}"
        yield Finding("wrong", subject, text, "run doctor as the engine's user, or set KVCTL_ENGINE_GROUP there")
        return
    if found.st_mode & (stat.S_IRWXO):
        text = f"mode {stat.S_IMODE(found.st_mode):04o}, uid {found.st_uid}: open to everyone"
        yield Finding("wrong", subject, text, f"chmod 700 {directory}")
    sockets = [entry for entry in entries if entry.suffix == ".sock"]
    yield Finding("ok", subject, f"{style.count(len(sockets), 'engine socket')}, uid {found.st_uid}")
    for entry in sockets:
        if not os.access(entry, os.R_OK | os.W_OK):
            text = f"cannot be used by uid {os.getuid()}"
            yield Finding("wrong", f"socket {entry}", text, "run as the engine's user, or set KVCTL_ENGINE_GROUP there")
    for entry in entries:
        if entry.suffix == ".failed":
            reason = _failure_note(entry)
            yield Finding(
                "wrong", f"bridge {entry.stem}", reason, "the engine serves without the bridge; restart it once mended"
            )


def _failure_note(path: Path) -> str:
    try:
        return f"could not attach: {note.read(path).reason}"
    except note.NoteError:
        return f"could not attach; its note {path} cannot be read"


# --- the fleet ---------------------------------------------------------------------------------------------------


async def _fleet(settings: Settings) -> list[Finding]:
    reach = open_reach(settings)
    asked_at = time.time()
    try:
        try:
            fleet = await reach.replicas(fleet_pb2.Targets(all=True))
        except CoordinatorError as error:
            code = error.failure.code
            advice = "check the address, and --ca and --token-file" if code != "INVALID_ARGUMENT" else ""
            return [Finding("wrong", "coordinator", str(error), advice, unreachable=True)]
        findings = [Finding("warning", "discovery", warning) for warning in fleet.warnings]
        if settings.coordinator:
            findings.append(Finding("ok", "coordinator", f"{settings.coordinator} answers"))
        if not fleet.replicas:
            findings.append(Finding("wrong", "discovery", "no replica found", "check the inventory or the DNS name"))
        elif all(replica.reason == TARGET_NOT_READY for replica in fleet.replicas):
            findings.append(Finding("wrong", "discovery", "no replica can be called", "each one below says why"))
        admission = await _admission(reach, fleet)
        findings += await _served(settings, fleet)
        for replica in fleet.replicas:
            findings += of_replica(replica, asked_at)
            findings += of_admission(replica, admission.get(replica.address))
        return findings
    finally:
        await reach.close()


async def _served(settings: Settings, fleet: fleet_pb2.ListReplicasResponse) -> list[Finding]:
    """Certificates of whom kvctl itself calls: the coordinator, else each replica."""
    tls = security_of(settings).tls
    if tls is None:
        return []
    servers = {f"replica {row.name}": row.address for row in fleet.replicas if row.reason != TARGET_NOT_READY}
    if settings.coordinator:
        servers = {"the coordinator": settings.coordinator}
    return await certificates.served(servers, tls, time.time())


async def _admission(reach: Reach, fleet: fleet_pb2.ListReplicasResponse) -> dict[str, fleet_pb2.ReplicaAdmission]:
    """Admission by address; a coordinator that fails now is a row for every replica."""
    if not any(replica.reachable for replica in fleet.replicas):
        return {}
    try:
        answer = await reach.admission(fleet_pb2.Targets(all=True), ADMISSION_TIMEOUT_S)
    except CoordinatorError as error:
        lost = fleet_pb2.ReplicaAdmission(code=error.failure.code, message=str(error))
        return {replica.address: lost for replica in fleet.replicas}
    return {row.address: row for row in answer.replicas}


def of_admission(replica: fleet_pb2.FleetReplica, row: fleet_pb2.ReplicaAdmission | None) -> Iterator[Finding]:
    """Findings about what the engines of a reachable replica do with requests."""
    if not replica.reachable or row is None:
        return
    if row.code != "OK":
        text = f"{row.code}: {row.message}"
        yield Finding("wrong", f"admission {replica.name}", text, "run doctor again; look at the sidecar's log")
        return
    pids = {engine.engine.data_parallel_rank: engine.pid for engine in replica.info.engines}
    for engine in row.admission.engines:
        rank = engine.engine.data_parallel_rank
        subject = f"admission {replica.name}/{rank}"
        name = verdict_name(engine.verdict)
        text = f"{name}: {engine.explanation}" if engine.explanation else name
        advice = verdict_advice(engine.verdict, replica.name, pids.get(rank, 0))
        if engine.stalled or engine.verdict in BAD or engine.verdict not in _NOT_WRONG:
            yield Finding("wrong", subject, text, advice or "`kvctl admission -o wide` has every figure")
        elif engine.verdict in _NOT_BEST:
            yield Finding("warning", subject, text, advice)
        else:
            yield Finding("ok", subject, text)


_NOT_BEST: Final = frozenset(
    {
        types_pb2.VERDICT_DEGRADED,
        types_pb2.VERDICT_THRASHING,
        types_pb2.VERDICT_PAUSED,
        types_pb2.VERDICT_SLEEPING,
        types_pb2.VERDICT_STARTING,
    }
)
_NOT_WRONG: Final = GOOD | _NOT_BEST | frozenset({types_pb2.VERDICT_SATURATED, types_pb2.VERDICT_WAITING_REMOTE_KV})


def verdict_advice(verdict: types_pb2.Verdict.ValueType, replica: str, pid: int) -> str:
    """What a person can do about a verdict; empty when nothing in particular. `pid`: the engine's, 0 if unknown."""
    process = str(pid) if pid > 0 else "PID"
    match verdict:
        case types_pb2.VERDICT_ENGINE_STOPPED:
            return f"something stopped the process (SIGSTOP, a debugger): let it go on with `kill -CONT {process}`"
        case types_pb2.VERDICT_ENGINE_HUNG:
            return f"see where it hangs with `py-spy dump --pid {process}`, then restart the engine"
        case types_pb2.VERDICT_ENGINE_DEAD:
            return "the engine is gone: read vLLM's log and restart it"
        case types_pb2.VERDICT_HELD_BLOCKS_DEADLOCK:
            return f"`kvctl relieve --replicas {replica}`"
        case types_pb2.VERDICT_HEAD_CANNOT_FIT:
            return "abort the request at the head, or give the engine more KV blocks"
        case types_pb2.VERDICT_BLOCKS_LEAKED:
            return "restart the engine at the next chance; no call gives leaked blocks back"
        case types_pb2.VERDICT_PAUSED:
            return (
                f"`kvctl scheduling resume --replicas {replica}` when nobody needs the pause any more "
                "(--force where its lease is still alive)"
            )
        case types_pb2.VERDICT_SLEEPING:
            return "wake it with vLLM's /wake_up"
        case types_pb2.VERDICT_STARTING:
            return "wait until it has started"
        case types_pb2.VERDICT_UNKNOWN | types_pb2.VERDICT_UNSPECIFIED:
            return f"the sidecar cannot tell: look at its log, and whether process {process} runs"
    return ""


def of_replica(replica: fleet_pb2.FleetReplica, now: float) -> Iterator[Finding]:
    """Findings about one replica. `now`: seconds since the epoch."""
    subject = f"replica {replica.name}"
    if replica.reason == TARGET_NOT_READY:
        text = "operations skip it, and end as partial at best, until it is ready or gone"
        yield Finding("warning", subject, replica.message, text)
        return
    if not replica.reachable:
        advice = "start kvctl-sidecar there, or mend the address"
        if replica.code in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
            advice = "check --token-file, or --cert and --key"
        elif "HTTP" in replica.message or "load balancer" in replica.message:
            advice = ""
        yield Finding("wrong", subject, f"{replica.code}: {replica.message}", advice, unreachable=True)
        return
    info = replica.info
    if info.version != __version__:
        text = f"sidecar {info.version or 'unknown'}, this kvctl {__version__}"
        yield Finding("warning", subject, text, "upgrade the older one; what one does not know it refuses by name")
    else:
        yield Finding("ok", subject, f"sidecar {info.version} at {replica.address}")
    if told := clock(info, now):
        yield Finding("warning", subject, told, "times in records will confuse; operations do not depend on clocks")
    if not info.engines:
        text = "the sidecar has found no engine"
        yield Finding("wrong", subject, text, "start vLLM with kvctl installed and the same KVCTL_ENGINE_DIR")
    for engine in info.engines:
        yield from _of_engine(replica.name, info.version, engine)


_CHOSEN: Final = frozenset({"events.publish"})
"""What an engine lacks because nobody configured it, which is nothing to mend."""


def clock(info: types_pb2.ReplicaInfo, now: float) -> str:
    """How wrong a replica's clock is against the one here, empty when it is not. `now`: when it was asked."""
    if info.HasField("now"):
        ahead = info.now.seconds + info.now.nanos / 1e9 - now
        if abs(ahead) <= CLOCK_SKEW_S:
            return ""
        return f"its clock is {style.seconds(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} this one"
    # A sidecar that does not tell its time: what it says of its start is no later than its time now.
    ahead = info.started_at.seconds - now
    return f"its clock is at least {style.seconds(ahead)} ahead of this one" if ahead > CLOCK_SKEW_S else ""


def _of_engine(replica: str, sidecar_version: str, engine: types_pb2.EngineInfo) -> Iterator[Finding]:
    subject = f"engine {replica}/{engine.engine.data_parallel_rank}"
    if not engine.connected:
        text = engine.unavailable_reason or "does not answer"
        yield Finding("wrong", subject, text, "if its process has ended, restart it: the sidecar finds it by itself")
        return
    kind = "bridge" if engine.backend == types_pb2.BACKEND_KIND_BRIDGE else "HTTP only"
    text = f"vLLM {engine.vllm_version or 'unknown'}, {kind}"
    if engine.backend == types_pb2.BACKEND_KIND_HTTP:
        yield Finding("warning", subject, text, "install kvctl in the engine's environment for keep and reorder")
    elif engine.bridge_version != sidecar_version:
        yield Finding(
            "warning", subject, f"bridge {engine.bridge_version}, sidecar {sidecar_version}", "upgrade the older"
        )
    else:
        yield Finding("ok", subject, text)
    if not engine.prefix_caching_enabled:
        yield Finding("warning", subject, "prefix caching is off: a reset has nothing to drop")
    for capability in engine.capabilities:
        if not capability.available:
            level: Level = "ok" if capability.name in _CHOSEN else "warning"
            yield Finding(level, subject, f"cannot {capability.name}: {capability.reason}")
