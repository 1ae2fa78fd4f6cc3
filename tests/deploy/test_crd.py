"""The CacheOperation's schema refuses what the API refuses, at `kubectl apply` and not minutes later."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import yaml
from apiserver import CRD
from crd_validation import Invalid, admit

from sidecar.coordinator.rollout import Policy, PolicyError
from sidecar.operator.resource import operation_spec, read
from sidecar.replica import rules
from sidecar.rpc.errors import Failure

SCHEMA = yaml.safe_load(CRD.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
ALL = {"all": True}


def stored(spec: dict[str, Any], old: dict[str, Any] | None = None) -> dict[str, Any]:
    result: dict[str, Any] = admit(SCHEMA, {"spec": spec}, {"spec": old} if old is not None else None)["spec"]
    return result


GOOD = [
    {"reset": {}, "targets": ALL},
    {"reset": {"runningRequests": "Fail", "waitForIdle": True}, "targets": ALL},
    {"reset": {"waitForIdle": True}, "targets": {"names": ["vllm-*"]}},
    {"reset": {"runningRequests": "Keep", "quarantineRunning": True, "purpose": "WeightUpdate"}, "targets": ALL},
    {"reset": {"runningRequests": "Keep", "purpose": "Benchmark"}, "targets": ALL},
    {
        "reset": {"runningRequests": "Preempt", "purpose": "WeightUpdate"},
        "targets": {"selector": "pool=a,tier in (x,y)"},
    },
    {"reorder": {"scope": "Uncached"}, "targets": ALL},
    {"relieve": {}, "targets": ALL, "concurrencyPolicy": "Replace", "ttlSecondsAfterFinished": 60},
    {"reset": {}, "targets": ALL, "rollout": {"strategy": "Rolling", "maxUnavailable": "25%", "canary": 1}},
    {"reset": {}, "targets": ALL, "rollout": {"strategy": "Rolling", "maxUnavailable": 2, "minHealthySeconds": 5}},
    {"reset": {}, "targets": ALL, "rollout": {"maxFailures": 3, "concurrency": 8}},
]

BAD = [
    ({"targets": ALL}, "exactly one of reset, reorder, relieve"),
    ({"reset": {}, "relieve": {}, "targets": ALL}, "exactly one of reset, reorder, relieve"),
    ({"reset": {}}, "targets"),
    ({"reset": {}, "targets": {}}, "exactly one of all, names, selector"),
    ({"reset": {}, "targets": {"all": True, "names": ["a"]}}, "exactly one of all, names, selector"),
    ({"reset": {}, "targets": {"all": False}}, "all can only be true"),
    ({"reset": {}, "targets": {"names": []}}, "names"),
    ({"reset": {"runningRequests": "Drop"}, "targets": ALL}, "runningRequests"),
    ({"reset": {"runningRequests": "Keep", "waitForIdle": True}, "targets": ALL}, "waitForIdle needs"),
    ({"reset": {"quarantineRunning": True}, "targets": ALL}, "quarantineRunning needs"),
    ({"reset": {"runningRequests": "Preempt", "quarantineRunning": True}, "targets": ALL}, "quarantineRunning needs"),
    ({"reset": {"runningRequests": "Keep", "purpose": "WeightUpdate"}, "targets": ALL}, "stale KV"),
    ({"reorder": {"scope": "Everything"}, "targets": ALL}, "scope"),
    ({"reset": {}, "targets": ALL, "rollout": {"canary": 1}}, "need strategy Rolling"),
    ({"reset": {}, "targets": ALL, "rollout": {"strategy": "Rolling", "maxUnavailable": 0}}, "at least 1"),
    ({"reset": {}, "targets": ALL, "rollout": {"strategy": "Rolling", "maxUnavailable": 10**9}}, "at least 1"),
    ({"reset": {}, "targets": ALL, "rollout": {"strategy": "Rolling", "maxUnavailable": "0%"}}, "at least 1"),
    ({"reset": {}, "targets": ALL, "rollout": {"strategy": "Rolling", "maxUnavailable": "101%"}}, "at least 1"),
    ({"reset": {}, "targets": ALL, "rollout": {"concurrency": 5000}}, "concurrency"),
    ({"reset": {}, "targets": ALL, "concurrencyPolicy": "Queue"}, "concurrencyPolicy"),
    ({"reset": {}, "targets": ALL, "timeoutSeconds": 0}, "timeoutSeconds"),
]


@pytest.mark.parametrize("spec", GOOD, ids=str)
def test_what_the_schema_accepts_is_a_fleet_operation(spec: dict[str, Any]) -> None:
    body = {"metadata": {"name": "x", "uid": "u"}, "spec": stored(spec)}
    asked = operation_spec(read(body).spec)
    assert asked.WhichOneof("operation") in spec
    Policy.resolve(asked.rollout, 8)


@pytest.mark.parametrize(("spec", "why"), BAD, ids=str)
def test_a_spec_that_makes_no_sense_is_refused_with_the_reason(spec: dict[str, Any], why: str) -> None:
    with pytest.raises(Invalid, match=why.replace("(", r"\(")):
        stored(spec)


def test_defaults_are_the_least_disruptive() -> None:
    spec = stored({"reset": {}, "targets": ALL})
    assert spec["reset"]["runningRequests"] == "Fail"
    assert spec["concurrencyPolicy"] == "Forbid"
    assert spec["timeoutSeconds"] == 30


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"reset": {"runningRequests": "Preempt"}}, "reset cannot change"),
        ({"targets": {"names": ["other"]}}, "targets cannot change"),
        ({"rollout": {"strategy": "Rolling"}}, "rollout cannot change"),
        ({"validateOnly": True}, "validateOnly cannot change"),
        ({"retryRefused": True}, "retryRefused cannot change"),
        ({"timeoutSeconds": 31}, "timeoutSeconds cannot change"),
        ({"concurrencyPolicy": "Allow"}, "concurrencyPolicy cannot change"),
        ({"reset": None, "relieve": {}}, "cannot change"),
    ],
)
def test_an_operation_that_may_have_begun_does_not_turn_into_another(change: dict[str, Any], why: str) -> None:
    old = stored({"reset": {"runningRequests": "Keep"}, "targets": ALL})
    new = {key: value for key, value in {**old, **change}.items() if value is not None}
    with pytest.raises(Invalid, match=why):
        stored(new, old)


@pytest.mark.parametrize("change", [{"suspend": True}, {"cancel": True}, {"ttlSecondsAfterFinished": 5}])
def test_suspend_cancel_and_ttl_may_change_later(change: dict[str, Any]) -> None:
    old = stored({"reset": {"runningRequests": "Keep"}, "targets": ALL})
    assert stored({**old, **change}, old).items() >= change.items()


def test_one_that_was_stored_before_a_default_was_there_can_still_be_written() -> None:
    assert stored(
        {"reset": {}, "targets": ALL, "suspend": True}, {"reset": {"runningRequests": "Fail"}, "targets": ALL}
    )


def test_a_cancel_is_for_good() -> None:
    old = stored({"reset": {}, "targets": ALL, "cancel": True})
    with pytest.raises(Invalid, match="cannot be revived"):
        stored({**old, "cancel": False}, old)


def every(**fields: tuple[Any, ...]) -> list[dict[str, Any]]:
    """Every combination of the given values; None leaves the field out."""
    rows = itertools.product(*fields.values())
    return [{name: value for name, value in zip(fields, row, strict=True) if value is not None} for row in rows]


def accepted(spec: dict[str, Any]) -> bool:
    try:
        stored(spec)
    except Invalid:
        return False
    return True


def test_the_definition_refuses_the_resets_that_a_replica_refuses_and_no_others() -> None:
    resets = every(
        runningRequests=(None, "Fail", "Preempt", "Keep"),
        waitForIdle=(None, False, True),
        quarantineRunning=(None, False, True),
        purpose=(None, "Benchmark", "WeightUpdate"),
        resetConnector=(None, True),
    )
    differ, refused = [], 0
    for reset in resets:
        request = operation_spec(read({"metadata": {}, "spec": {"reset": reset, "targets": ALL}}).spec).reset
        try:
            rules.check(request)
            fine = True
        except Failure:
            fine = False
            refused += 1
        if accepted({"reset": reset, "targets": ALL}) != fine:
            differ.append(reset)
    assert differ == []
    assert 0 < refused < len(resets)


def test_the_definition_refuses_the_rollouts_that_the_coordinator_refuses_and_no_others() -> None:
    rollouts = every(
        strategy=(None, "AllAtOnce", "Rolling"),
        maxUnavailable=(None, 0, 1, "1", "0", "25%", "0%", "100%", "101%", "half", "-1"),
        canary=(None, 2),
        minHealthySeconds=(None, 5),
        concurrency=(None, 1024, 1025),
    )
    differ, refused = [], 0
    for rollout in rollouts:
        spec = {"reset": {}, "targets": ALL, "rollout": rollout}
        try:
            Policy.resolve(operation_spec(read({"metadata": {}, "spec": spec}).spec).rollout, 8)
            fine = True
        except PolicyError:
            fine = False
            refused += 1
        if accepted(spec) != fine:
            differ.append(rollout)
    assert differ == []
    assert 0 < refused < len(rollouts)


def test_every_field_of_the_api_s_reset_can_be_asked_for() -> None:
    from kvctl.v1 import replica_pb2

    names = {field.json_name for field in replica_pb2.ResetPrefixCacheRequest.DESCRIPTOR.fields}
    ours = set(SCHEMA["properties"]["spec"]["properties"]["reset"]["properties"])
    assert names - ours == {"requestId", "validateOnly"}, "the id is derived; validateOnly is a field of the spec"


def test_the_schema_is_structural() -> None:
    """What an API server demands of every node: a type, unless it is int-or-string."""

    def walk(node: dict[str, Any], path: str) -> None:
        assert "type" in node or node.get("x-kubernetes-int-or-string"), path
        for name, inner in node.get("properties", {}).items():
            walk(inner, f"{path}.{name}")
        for name in ("items", "additionalProperties"):
            if name in node:
                walk(node[name], f"{path}[]")

    walk(SCHEMA, "")
