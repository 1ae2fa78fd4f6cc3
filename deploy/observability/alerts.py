"""Every alert, once.

An alert is worth a page only when someone can act on it, so each summary names the replica, the engine, the verdict
and what to do first. A verdict gets an alert of its own because the remedies differ: relief mends a deadlock of held
blocks, does nothing for a hung engine, and would hide a leak. `for` is how long the state is normal: a queue waits a
moment for remote KV on every busy replica, and no engine is dead for half a minute.

Thresholds are starting points: they are constants here and end up in plain rule files that can be patched.
"""

from __future__ import annotations

from typing import Final

from deploy.observability.model import NAMESPACE, REPLICA, Alert, Group, Severity

BY: Final = "namespace, pod, instance, engine"
"""What names one engine."""

SIDECAR_PORT: Final = "kvctl-metrics"
"""Name of the sidecar's metrics port. Prometheus' targets carry it as `endpoint`: where there is such a target, a
sidecar is meant to be, whether or not one answers.
"""

_WHERE: Final = "replica " + REPLICA + ", engine {{ $labels.engine }}"


def verdict_series(verdict: str) -> str:
    """The 0/1 series of one verdict, e.g. "HELD_BLOCKS_DEADLOCK"."""
    return f'kvctl_admission_verdict{{verdict="{verdict}"}}'


def grown(series: str, window: str, by: str) -> str:
    """How much a counter grew in the window, counting the increment that created its series.

    increase() needs two samples, so the first failure of a kind is invisible to it: the series is born at 1. Such a
    series has fewer samples in the window than its target's kvctl_build_info, and then its value is the growth.
    """
    born = (
        f"{series} and count_over_time({series}[{window}])"
        " < on (namespace, pod, instance) group_left ()"
        f" max by (namespace, pod, instance) (count_over_time(kvctl_build_info[{window}]))"
    )
    return f"sum by ({by}) (\n  ({born})\n  or increase({series}[{window}])\n)"


def absent_sidecars(where: str = "") -> str:
    """Pods whose vLLM answers and whose sidecar does not, although it did within six hours or is meant to.

    A pod that never had kvctl is none of them: a cluster gets kvctl one workload at a time, and vLLM is scraped in all.
    `where`: label matchers for vLLM's series.
    """
    pods = "group by (namespace, pod)"
    vllm = "vllm:num_requests_running" + (f"{{{where}}}" if where else "")
    return (
        f"{pods} ({vllm})\n"
        "and on (namespace, pod) (\n"
        f"  {pods} (present_over_time(kvctl_watchers[6h]))\n"
        f'  or {pods} (up{{endpoint="{SIDECAR_PORT}"}})\n'
        ")\n"
        f"unless on (namespace, pod) {pods} (kvctl_watchers)"
    )


def _verdict(
    name: str, verdict: str, hold: str, severity: Severity, what: str, first_step: str, remedy: str, also: str = ""
) -> Alert:
    return Alert(
        name=name,
        expr=f"{verdict_series(verdict)} == 1{also}",
        hold=hold,
        severity=severity,
        finding=f"{verdict}: {_WHERE}: {what}",
        first_step=first_step,
        remedy=remedy,
        verdict=verdict,
    )


_CLI: Final = "kvctl admission --replicas " + REPLICA

ADMISSION: Final = (
    _verdict(
        "KvctlAdmissionHeldBlocksDeadlock",
        "HELD_BLOCKS_DEADLOCK",
        "1m",
        "critical",
        "nothing runs, and waiting requests hold the blocks that the head of the queue needs.",
        f"Run `kvctl relieve --replicas {REPLICA}`.",
        f"Run `kvctl relieve --replicas {REPLICA}`: it gives back the blocks of one waiting request, which is "
        "recomputed. Nothing else ends this state: it does not pass by itself.",
    ),
    _verdict(
        "KvctlAdmissionHeadCannotFit",
        "HEAD_CANNOT_FIT",
        "1m",
        "critical",
        "the head of the queue needs more blocks than the whole pool has.",
        "Abort that request at its client.",
        f"Run `{_CLI}` for the request's id and abort it at the client, or give the engine a larger KV cache.",
    ),
    _verdict(
        "KvctlAdmissionWaitingRemoteKV",
        "WAITING_REMOTE_KV",
        "5m",
        "warning",
        "nothing runs; the queue waits for KV that is still being loaded.",
        "Mend the remote KV store or the network to it.",
        "Look at the remote KV store and the network to it. Relief does not help: the blocks are being written into.",
    ),
    _verdict(
        "KvctlAdmissionThrashing",
        "THRASHING",
        "5m",
        "warning",
        "requests are preempted and re-admitted over and over and hardly any token comes out.",
        "Send this replica less.",
        "Send this replica less (lower --max-num-seqs, fewer long requests) or give it a larger KV cache.",
    ),
    _verdict(
        "KvctlAdmissionDegraded",
        "DEGRADED",
        "10m",
        "warning",
        "tokens move at a small fraction of what this engine did before with the same queue.",
        "Compare contiguity and pauses on the replica dashboard, then look at the device.",
        "Compare the free queue's contiguity and the engine's pauses on the replica dashboard; a reorder of the free "
        "queue mends the former, the runbook tells the other causes apart.",
    ),
    _verdict(
        "KvctlAdmissionBlocksLeaked",
        "BLOCKS_LEAKED",
        "10m",
        "warning",
        "blocks are held by no request, and their number grows.",
        "Plan a restart of the engine before the pool is full.",
        "Plan a restart of the engine before the pool is full; report it to vLLM with `kvctl admission -o json`.",
    ),
    _verdict(
        "KvctlAdmissionPaused",
        "PAUSED",
        "10m",
        "warning",
        "the scheduler has been paused for ten minutes.",
        f"If no weight update runs: `kvctl scheduling resume --replicas {REPLICA}`.",
        f"If no weight update runs, run `kvctl scheduling resume --replicas {REPLICA}`; else look at the trainer.",
    ),
    _verdict(
        "KvctlAdmissionSleeping",
        "SLEEPING",
        "10m",
        "warning",
        "the executor sleeps while requests wait.",
        f"Wake it (POST /wake_up), then `kvctl reset --replicas {REPLICA}`.",
        "Wake the engine (POST /wake_up at vLLM) and reset its prefix cache: the KV behind its hashes is gone.",
        also=f' and on ({BY}) kvctl_requests{{state="waiting"}} > 0',
    ),
    _verdict(
        "KvctlEngineHung",
        "ENGINE_HUNG",
        "1m",
        "critical",
        "the process lives and its engine thread has not moved.",
        "Take a stack dump and restart the pod.",
        "Take a stack dump (py-spy dump --pid) and restart the pod. No operation can reach a hung engine.",
    ),
    _verdict(
        "KvctlEngineStopped",
        "ENGINE_STOPPED",
        "1m",
        "critical",
        "the process is stopped (SIGSTOP, a debugger).",
        "Send it SIGCONT.",
        "Send it SIGCONT, or end the debugger that holds it.",
    ),
    _verdict(
        "KvctlEngineDead",
        "ENGINE_DEAD",
        "30s",
        "critical",
        "the engine's process is gone.",
        "Take the pod out of the load balancer and restart it.",
        "The API server may still answer 200: take the pod out of the load balancer and restart it.",
    ),
    _verdict(
        "KvctlEngineStartingTooLong",
        "STARTING",
        "20m",
        "warning",
        "the engine has been starting for twenty minutes.",
        "Read the engine's log.",
        "Read the engine's log: weights that cannot be loaded or a compilation that never ends.",
    ),
    _verdict(
        "KvctlAdmissionUnknown",
        "UNKNOWN",
        "10m",
        "warning",
        "there is not enough evidence for a verdict.",
        "Run `kvctl doctor`: is the bridge attached?",
        f"The bridge is not attached or its evidence is not whole: read the note in the engine directory and `{_CLI}`.",
    ),
)

_KNOWN: Final = "|".join(alert.verdict for alert in ADMISSION)

CATCH_ALL: Final = (
    Alert(
        name="KvctlAdmissionStalled",
        expr=f'kvctl_admission_stalled == 1 unless on ({BY}) (kvctl_admission_verdict{{verdict=~"{_KNOWN}"}} == 1)',
        hold="2m",
        severity="critical",
        finding=f"STALLED: {_WHERE}: no waiting request can start, and no alert of its own fits the verdict.",
        first_step=f"Run `{_CLI}`.",
        remedy=f"Run `{_CLI}`: it gives the verdict, its evidence and what to do.",
    ),
    Alert(
        name="KvctlRequestStarving",
        expr=f"kvctl_oldest_waiting_seconds > 600 unless on ({BY}) kvctl_admission_stalled == 1",
        hold="5m",
        severity="warning",
        finding=f"STARVING: {_WHERE}: others flow, and one request has waited {{{{ $value | humanizeDuration }}}}.",
        first_step="Abort it at its client.",
        remedy=f"Run `{_CLI}` for its id and state; it is parked in the engine and its client still waits.",
    ),
)

_TARGET: Final = "namespace, pod, instance"
_TARGET_OPERATION: Final = "namespace, pod, instance, operation"
_TIMES: Final = "{{ $value | humanize }}"
_OPERATION: Final = "{{ $labels.operation }}"


_RESETS_REFUSED: Final = 'kvctl_operations_total{operation="reset",code="FAILED_PRECONDITION"}'
_RESETS_DONE: Final = 'kvctl_operations_total{operation="reset",code="OK"}'
_TIMED_OUT: Final = 'kvctl_operations_total{code="DEADLINE_EXCEEDED"}'
_RAISED: Final = 'kvctl_operations_total{code="INTERNAL"}'


OPERATIONS: Final = (
    Alert(
        name="KvctlResetsRefused",
        expr=f"{grown(_RESETS_REFUSED, '15m', _TARGET)} > 2\n"
        f"unless on ({_TARGET})\n{grown(_RESETS_DONE, '15m', _TARGET)} > 0",
        hold="1m",
        severity="warning",
        finding=f"RESETS REFUSED: replica {REPLICA}: {_TIMES} resets were refused in 15 minutes and none succeeded.",
        first_step="Use `kvctl reset --mode keep`.",
        remedy="The cache is older than its caller believes. Use `--mode keep` (with `--quarantine` after a weight "
        "update), `--wait-for-idle`, or `--mode preempt`.",
    ),
    Alert(
        name="KvctlOperationsTimedOut",
        expr=f"{grown(_TIMED_OUT, '15m', _TARGET_OPERATION)} > 0",
        hold="1m",
        severity="warning",
        finding=f"TIMED OUT: replica {REPLICA}: {_OPERATION} passed its deadline {_TIMES} times in 15 minutes.",
        first_step="Ask again by request id where the answer says UNKNOWN; raise `--timeout` where NOT_EXECUTED.",
        remedy="The answer says which: NOT_EXECUTED never ran and never will; UNKNOWN had started and must be asked "
        "for again by its request id.",
    ),
    Alert(
        name="KvctlOperationOutcomeUnknown",
        expr="kvctl_coordinator_operations_unknown > 0",
        hold="5m",
        severity="warning",
        finding=f"UNKNOWN OUTCOMES: coordinator {REPLICA}: {_TIMES} operations have targets whose answer was lost.",
        first_step="Find them with `kvctl ops list` and see why they do not answer.",
        remedy="They are asked for by themselves for an hour. `kvctl ops get ID` or `kubectl describe cop NAME` names "
        "the replicas; for one that stays away start a new operation: the same id calls nobody.",
    ),
    Alert(
        name="KvctlOperationRaised",
        expr=f"{grown(_RAISED, '15m', _TARGET_OPERATION)} > 0",
        hold="0m",
        severity="warning",
        finding=f"RAISED: replica {REPLICA}: {_OPERATION} raised inside the engine, which goes on serving.",
        first_step="Do not repeat it on the rest of the fleet.",
        remedy="Report it with the sidecar's log; do not repeat the operation on the rest of the fleet.",
    ),
    Alert(
        name="KvctlResetStorm",
        expr=f"{grown(_RESETS_DONE, '10m', _TARGET)} > 20",
        hold="0m",
        severity="warning",
        finding=f"RESET STORM: replica {REPLICA}: {_TIMES} resets in 10 minutes; its cache never warms up.",
        first_step="Stop the caller that the audit log names.",
        remedy="The audit log names the caller: it retries what has already succeeded, or resets once a request.",
    ),
    Alert(
        name="KvctlEnginePauseLong",
        expr=f"histogram_quantile(0.99, sum by ({_TARGET}, le) (rate(kvctl_engine_pause_seconds_bucket[15m]))) > 0.25",
        hold="0m",
        severity="info",
        finding=f"LONG PAUSE: replica {REPLICA}: operations held the engine thread for "
        "{{ $value | humanizeDuration }} (p99).",
        first_step="Run them at a quieter time, or in slices.",
        remedy="Use the sliced scopes while serving (`kvctl reorder --scope uncached`) or a quieter time.",
    ),
)

QUEUE: Final = (
    Alert(
        name="KvctlFreeQueueFragmented",
        expr="kvctl_free_queue_contiguity_ratio < 0.3",
        hold="30m",
        severity="info",
        finding=f"FRAGMENTED: {_WHERE}: only {{{{ $value | humanizePercentage }}}} of neighbours in the free queue are "
        "adjacent blocks.",
        first_step=f"If transfers are slow: `kvctl reorder --replicas {REPLICA}`.",
        remedy=f"If transfers are slow, run `kvctl reorder --replicas {REPLICA}` while idle, or a keep reset with "
        "`--reorder`; without a KV connector it matters little.",
    ),
    Alert(
        name="KvctlWeightUpdateAbandoned",
        expr="kvctl_abandoned_update == 1",
        hold="0m",
        severity="critical",
        finding=f"ABANDONED UPDATE: {_WHERE}: the client that wrote the weights went away; they may be half written.",
        first_step="Write the weights again, then resume.",
        remedy=f"Write the weights again, then run `kvctl scheduling resume --replicas {REPLICA}`; the engine stays "
        "paused till then.",
    ),
)

PRESENCE: Final = (
    Alert(
        name="KvctlSidecarAbsent",
        expr=absent_sidecars(),
        hold="5m",
        severity="warning",
        finding=f"SIDECAR ABSENT: replica {REPLICA}: vLLM answers, its kvctl sidecar does not; no stall is seen.",
        first_step="Look at the sidecar's container and its scrape target.",
        remedy="`kubectl describe pod` and the sidecar's log say why it is down, Prometheus' targets page why it is "
        "not scraped. Where it was taken out on purpose, take its target out too.",
    ),
    Alert(
        name="KvctlAbsent",
        expr="absent(kvctl_watchers)",  # a sidecar's series; kvctl_build_info is the coordinator's too
        hold="10m",
        severity="critical",
        finding="ABSENT: no kvctl sidecar is scraped at all; no alert about admissions can fire.",
        first_step="Look at the scrape configuration.",
        remedy="Look at the scrape configuration: the PodMonitor's selector, the NetworkPolicy, the metrics port.",
    ),
    Alert(
        name="KvctlReplicasUnreachable",
        # One for all that look at the same replicas: a coordinator, the operator that leads and the one that stands by.
        expr='max by (namespace) (kvctl_coordinator_replicas{state="unreachable"}) > 0',
        hold="10m",
        severity="warning",
        finding=f"UNREACHABLE: {_TIMES} replicas{NAMESPACE} cannot be reached by the coordinator or the operator.",
        first_step="Run `kvctl replicas` for each one's reason.",
        remedy="Run `kvctl replicas`: it gives each one's reason. No fleet operation is complete until then.",
    ),
    Alert(
        name="KvctlFleetOperationFailures",
        expr=grown(
            'kvctl_coordinator_replica_results_total{result=~"failed|unreachable|unknown"}', "15m", _TARGET_OPERATION
        )
        + " > 0",
        hold="0m",
        severity="warning",
        finding=f"NOT ALL SUCCEEDED: coordinator {REPLICA}: {_TIMES} targets of {_OPERATION} failed in 15 minutes.",
        first_step="Read why with `kvctl ops get ID`, then start a new one on those.",
        remedy="Run `kvctl ops get ID` or `kubectl describe cop NAME`: every target is there with its reason.",
    ),
    Alert(
        name="KvctlStoreFailed",
        expr="kvctl_coordinator_store_failed == 1",
        hold="1m",
        severity="critical",
        finding=f"STORE FAILED: coordinator {REPLICA} cannot put operations on record; it starts none.",
        first_step="Free the disk, or mend the rights of the file that its log names.",
        remedy="Its log and the refusals (STORE_FAILED) name the file and the error: free the disk, mend the rights.",
    ),
    Alert(
        name="KvctlDiscoveryIncomplete",
        expr="kvctl_coordinator_discovery_incomplete == 1",
        hold="10m",
        severity="warning",
        finding=f"INCOMPLETE: coordinator {REPLICA} may not see every replica.",
        first_step="Run `kvctl replicas`: its warnings name the source.",
        remedy="Run `kvctl replicas`: its warnings say which source is in trouble. No fleet operation ends as "
        "succeeded until then.",
    ),
)

GROUPS: Final = (
    Group("kvctl.admission", "15s", alerts=ADMISSION + CATCH_ALL),
    Group("kvctl.operations", "30s", alerts=OPERATIONS),
    Group("kvctl.engine", "30s", alerts=QUEUE),
    Group("kvctl.presence", "30s", alerts=PRESENCE),
)

ALERTS: Final = tuple(alert for group in GROUPS for alert in group.alerts)
