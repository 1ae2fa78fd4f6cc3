"""The three dashboards: the fleet, one replica, operations.

kvctl knows why admissions stall, vLLM knows what its users feel; a panel is worth most where both stand over one time
axis. Their series meet on (namespace, pod, engine), and every reset is an annotation: whoever sees the hit rate fall
sees in the same picture who asked for it.
"""

from __future__ import annotations

from typing import Final

from deploy.observability.alerts import absent_sidecars
from deploy.observability.panels import Annotation, Dashboard, Panel, Query, Variable

_FLEET: Final = 'namespace=~"$namespace"'
_ONE: Final = 'namespace=~"$namespace",pod=~"$pod"'

_NAMESPACE: Final = Variable("namespace", "label_values(kvctl_build_info, namespace)")
_POD: Final = Variable("pod", 'label_values(kvctl_build_info{namespace=~"$namespace"}, pod)', multi=False)


def _resets(where: str) -> Annotation:
    """Resets that dropped a cache, each at its own time.

    The value is the time (ms) and Grafana puts the mark there. The step of the query decides nothing but which of
    several resets of one engine and mode are still seen: the last one before each step. Grafana makes it long, minutes
    in a range of hours, so a mark at the step itself would be late, and one that is there for seconds would be missed.

    Not changes(): the gauge is computed from a monotonic age at each scrape and jitters by microseconds.
    """
    return Annotation(
        "Resets",
        f"kvctl_last_reset_timestamp_seconds{{{where}}} * 1000 >= $__from",
        "reset ({{mode}}) on {{pod}} engine {{engine}}",
    )


def _hit_ratio(by: str, where: str) -> str:
    return (
        f"sum by ({by}) (rate(vllm:prefix_cache_hits_total{{{where}}}[5m])) "
        f"/ sum by ({by}) (rate(vllm:prefix_cache_queries_total{{{where}}}[5m]))"
    )


def _first_token(quantile: str, by: str, where: str) -> str:
    return (
        f"histogram_quantile({quantile}, sum by ({by}, le) "
        f"(rate(vllm:time_to_first_token_seconds_bucket{{{where}}}[5m])))"
    )


FLEET: Final = Dashboard(
    "kvctl-fleet",
    "kvctl / Fleet",
    "Which replicas of the fleet stall, and why.",
    (
        Panel(
            "Replicas",
            (Query(f"count(count by (namespace, pod) (kvctl_admission_stalled{{{_FLEET}}}))", instant=True),),
            kind="stat",
            width=4,
            height=4,
        ),
        Panel(
            "Engines stalled",
            (Query(f"sum(kvctl_admission_stalled{{{_FLEET}}})", instant=True),),
            kind="stat",
            width=4,
            height=4,
            warn_above=1,
        ),
        Panel(
            "Requests running",
            (Query(f"sum(vllm:num_requests_running{{{_FLEET}}})", instant=True),),
            kind="stat",
            width=4,
            height=4,
        ),
        Panel(
            "Requests waiting",
            (Query(f"sum(vllm:num_requests_waiting{{{_FLEET}}})", instant=True),),
            kind="stat",
            width=4,
            height=4,
        ),
        Panel(
            "Prefix cache hit ratio",
            (Query(_hit_ratio("namespace", _FLEET), "{{namespace}}", instant=True),),
            kind="stat",
            unit="percentunit",
            width=4,
            height=4,
        ),
        Panel(
            "Sidecars absent",
            (Query(f"count({absent_sidecars(_FLEET)}) or vector(0)", instant=True),),
            kind="stat",
            width=4,
            height=4,
            about="Of pods that had one in the last six hours, or whose sidecar is among Prometheus' targets.",
            warn_above=1,
        ),
        Panel(
            "Engines by verdict",
            (Query(f"sum by (verdict) (kvctl_admission_verdict{{{_FLEET}}})", "{{verdict}}"),),
            about="Every engine has exactly one verdict: the sum is the number of engines.",
        ),
        Panel(
            "Stalled for",
            (Query(f"kvctl_admission_stalled_seconds{{{_FLEET}}}", "{{pod}} engine {{engine}}"),),
            unit="s",
        ),
        Panel(
            "Waiting requests (vLLM) where admissions are stalled (kvctl)",
            (
                Query(
                    f"sum by (namespace, pod, engine) (vllm:num_requests_waiting{{{_FLEET}}}) "
                    "* on (namespace, pod, engine) max by (namespace, pod, engine) "
                    f"(kvctl_admission_stalled{{{_FLEET}}})",
                    "{{pod}} engine {{engine}}",
                ),
            ),
            about="Above 0: users wait at an engine that cannot admit them.",
        ),
        Panel(
            "KV cache usage (vLLM)",
            (Query(f"vllm:kv_cache_usage_perc{{{_FLEET}}}", "{{pod}} engine {{engine}}"),),
            unit="percentunit",
            about="Usage can be 0% while nothing is admitted: read it beside the verdict.",
        ),
        Panel(
            "Time to first token, p50 and p99 (vLLM)",
            (
                Query(_first_token("0.5", "namespace", _FLEET), "p50 {{namespace}}"),
                Query(_first_token("0.99", "namespace", _FLEET), "p99 {{namespace}}"),
            ),
            unit="s",
        ),
        Panel(
            "Prefix cache hit ratio by pod (vLLM)",
            (Query(_hit_ratio("namespace, pod", _FLEET), "{{pod}}"),),
            unit="percentunit",
            about="Falls after a reset (annotation) and climbs back. It proves no reset: preempted requests count.",
        ),
        Panel(
            "Last reset",
            (
                Query(
                    f"max by (namespace, pod, engine, mode) (kvctl_last_reset_timestamp_seconds{{{_FLEET}}}) * 1000",
                    instant=True,
                ),
            ),
            kind="table",
            unit="dateTimeFromNow",
            width=24,
        ),
    ),
    (_NAMESPACE,),
    (_resets(_FLEET),),
)

REPLICA: Final = Dashboard(
    "kvctl-replica",
    "kvctl / Replica",
    "One replica: its verdict, its queue, its blocks, its engine thread.",
    (
        Panel(
            "Verdict",
            (Query(f"kvctl_admission_verdict{{{_ONE}}} == 1", "engine {{engine}} {{verdict}}"),),
            kind="state-timeline",
            width=24,
            height=6,
        ),
        Panel(
            "Requests by state (kvctl)",
            (Query(f"kvctl_requests{{{_ONE}}}", "engine {{engine}} {{state}}"),),
        ),
        Panel(
            "Running and waiting (vLLM)",
            (
                Query(f"vllm:num_requests_running{{{_ONE}}}", "engine {{engine}} running"),
                Query(f"vllm:num_requests_waiting{{{_ONE}}}", "engine {{engine}} waiting"),
            ),
        ),
        Panel(
            "Oldest waiting request",
            (Query(f"kvctl_oldest_waiting_seconds{{{_ONE}}}", "engine {{engine}}"),),
            unit="s",
        ),
        Panel(
            "Time to first token (vLLM)",
            (
                Query(_first_token("0.5", "engine", _ONE), "p50 engine {{engine}}"),
                Query(_first_token("0.99", "engine", _ONE), "p99 engine {{engine}}"),
            ),
            unit="s",
        ),
        Panel(
            "KV blocks by state (kvctl)",
            (Query(f"kvctl_kv_blocks{{{_ONE}}}", "engine {{engine}} {{state}}"),),
            about="Free falling while no request runs is the picture of a deadlock or a leak.",
        ),
        Panel(
            "KV cache usage (vLLM)",
            (Query(f"vllm:kv_cache_usage_perc{{{_ONE}}}", "engine {{engine}}"),),
            unit="percentunit",
        ),
        Panel(
            "Prefix cache queries and hits, tokens a second (vLLM)",
            (
                Query(f"rate(vllm:prefix_cache_queries_total{{{_ONE}}}[5m])", "engine {{engine}} queries"),
                Query(f"rate(vllm:prefix_cache_hits_total{{{_ONE}}}[5m])", "engine {{engine}} hits"),
            ),
        ),
        Panel(
            "Free queue contiguity",
            (Query(f"kvctl_free_queue_contiguity_ratio{{{_ONE}}}", "engine {{engine}}"),),
            unit="percentunit",
            about="1: neighbours in the free queue are neighbours in memory. Matters where a connector moves blocks.",
        ),
        Panel(
            "Engine steps a second",
            (Query(f"rate(kvctl_engine_steps_total{{{_ONE}}}[1m])", "engine {{engine}}"),),
            unit="ops",
        ),
        Panel(
            "Age of the engine's last step",
            (Query(f"kvctl_engine_step_age_seconds{{{_ONE}}}", "engine {{engine}}"),),
            unit="s",
            about="Grows on an idle engine too: read it beside the phase.",
        ),
        Panel(
            "Time in the present phase",
            (Query(f"kvctl_engine_phase_seconds{{{_ONE}}} > 0", "engine {{engine}} {{phase}}"),),
            unit="s",
            about="Long in `step` is a long step or a hung engine; long in `idle` is an engine without work.",
        ),
    ),
    (_NAMESPACE, _POD),
    (_resets(_ONE),),
)

OPERATIONS: Final = Dashboard(
    "kvctl-operations",
    "kvctl / Operations",
    "What was asked of the fleet, how it ended, and what it cost the engines.",
    (
        Panel(
            "Operations by code, a 15 minute window",
            (
                Query(
                    f"sum by (operation, mode, code) (increase(kvctl_operations_total{{{_FLEET}}}[15m]))",
                    "{{operation}} {{mode}} {{code}}",
                ),
            ),
            width=24,
        ),
        Panel(
            "Duration, p50 and p99",
            (
                Query(
                    "histogram_quantile(0.5, sum by (operation, le) "
                    f"(rate(kvctl_operation_duration_seconds_bucket{{{_FLEET}}}[15m])))",
                    "p50 {{operation}}",
                ),
                Query(
                    "histogram_quantile(0.99, sum by (operation, le) "
                    f"(rate(kvctl_operation_duration_seconds_bucket{{{_FLEET}}}[15m])))",
                    "p99 {{operation}}",
                ),
            ),
            unit="s",
        ),
        Panel(
            "Hold of the engine thread, p50 and p99",
            (
                Query(
                    "histogram_quantile(0.5, sum by (pod, le) "
                    f"(rate(kvctl_engine_pause_seconds_bucket{{{_FLEET}}}[15m])))",
                    "p50 {{pod}}",
                ),
                Query(
                    "histogram_quantile(0.99, sum by (pod, le) "
                    f"(rate(kvctl_engine_pause_seconds_bucket{{{_FLEET}}}[15m])))",
                    "p99 {{pod}}",
                ),
            ),
            unit="s",
            about="What an operation costs the requests that run meanwhile.",
        ),
        Panel(
            "Results by target (coordinator)",
            (
                Query(
                    f"sum by (operation, result) (increase(kvctl_coordinator_replica_results_total{{{_FLEET}}}[15m]))",
                    "{{operation}} {{result}}",
                ),
            ),
        ),
        Panel(
            "Replicas as the coordinator sees them",
            (
                Query(
                    f"sum by (state) (max by (namespace, state) (kvctl_coordinator_replicas{{{_FLEET}}}))", "{{state}}"
                ),
            ),
            about="By whoever sees most: a coordinator and each operator look at the same replicas.",
        ),
        Panel(
            "Fleet operations under way, and calls beyond the first",
            (
                Query(f"kvctl_coordinator_operations_active{{{_FLEET}}}", "under way {{pod}}"),
                Query(f"increase(kvctl_coordinator_retries_total{{{_FLEET}}}[15m])", "retries {{pod}}"),
            ),
            about="Retries that grow while nothing fails: replicas that refuse, or that answer late.",
        ),
        Panel(
            "Fleet operations by end, a 15 minute window",
            (
                Query(
                    f"sum by (operation, state) (increase(kvctl_coordinator_operations_total{{{_FLEET}}}[15m]))",
                    "{{operation}} {{state}}",
                ),
            ),
        ),
        Panel(
            "Operations with unknown outcomes",
            (Query(f"kvctl_coordinator_operations_unknown{{{_FLEET}}}", "{{pod}}"),),
            kind="stat",
            warn_above=1,
        ),
        Panel(
            "Versions",
            (Query(f"count by (version) (kvctl_build_info{{{_FLEET}}})", "{{version}}", instant=True),),
            kind="table",
        ),
    ),
    (_NAMESPACE,),
    (_resets(_FLEET),),
)

DASHBOARDS: Final = (FLEET, REPLICA, OPERATIONS)
