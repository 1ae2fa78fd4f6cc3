"""Recording rules: what dashboards ask over and over, and what a person wants to query by hand.

Names follow Prometheus' level:metric:operations. Series of kvctl and of vLLM meet on (namespace, pod, engine): both
are scraped from one pod and both number the engine cores of a pod from 0. Outside Kubernetes, give both scrape
targets a `pod` label with the replica's name (see prometheus/scrape-static.yaml).
"""

from __future__ import annotations

from typing import Final

from deploy.observability.model import Group, Recording

_ENGINE: Final = "namespace, pod, engine"

RECORDINGS: Final = (
    Recording("namespace:kvctl_engines:count", "count by (namespace) (kvctl_admission_stalled)"),
    Recording("namespace:kvctl_engines_stalled:sum", "sum by (namespace) (kvctl_admission_stalled)"),
    Recording("namespace_verdict:kvctl_engines:sum", "sum by (namespace, verdict) (kvctl_admission_verdict)"),
    Recording(
        "namespace_pod_engine:kvctl_kv_blocks_used:ratio",
        f'1 - sum by ({_ENGINE}) (kvctl_kv_blocks{{state="free"}})'
        f' / sum by ({_ENGINE}) (kvctl_kv_blocks{{state="total"}})',
    ),
    Recording(
        "namespace_pod_engine:kvctl_engine_steps:rate1m", f"sum by ({_ENGINE}) (rate(kvctl_engine_steps_total[1m]))"
    ),
    Recording(
        "namespace_operation_code:kvctl_operations:increase15m",
        "sum by (namespace, operation, code) (increase(kvctl_operations_total[15m]))",
    ),
    Recording(
        "namespace_operation:kvctl_operation_duration_seconds:p99_15m",
        "histogram_quantile(0.99, sum by (namespace, operation, le) "
        "(rate(kvctl_operation_duration_seconds_bucket[15m])))",
    ),
    Recording(
        "namespace_pod:kvctl_engine_pause_seconds:p99_15m",
        "histogram_quantile(0.99, sum by (namespace, pod, le) (rate(kvctl_engine_pause_seconds_bucket[15m])))",
    ),
    Recording(
        "namespace_pod_engine:vllm_prefix_cache_hits:ratio_rate5m",
        f"sum by ({_ENGINE}) (rate(vllm:prefix_cache_hits_total[5m])) "
        f"/ sum by ({_ENGINE}) (rate(vllm:prefix_cache_queries_total[5m]))",
    ),
)

GROUPS: Final = (Group("kvctl.recording", "30s", recordings=RECORDINGS),)
