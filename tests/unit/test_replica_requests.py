"""Requests: every option reaches the engine, every rule names its field."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor import FieldDescriptor
from kvctl.v1 import replica_pb2 as api
from kvctl.v1 import types_pb2 as types

from engine_bridge import protocol
from sidecar.replica import requests, rules
from sidecar.rpc.errors import Failure

ID = "6f4a1c52-9d0e-4f5b-8c1e-2a7d3b9e0f11"  # fixed: parallel workers must collect the same cases
KEEP = types.RUNNING_REQUESTS_KEEP
BASE = {
    api.ResetPrefixCacheRequest: {"request_id": ID},
    api.ReorderFreeQueueRequest: {"request_id": ID},
    api.RelieveAdmissionRequest: {"request_id": ID},
    api.PauseSchedulingRequest: {"request_id": ID, "lease": {"seconds": 5}},
    api.ResumeSchedulingRequest: {"request_id": ID},
}
NEEDS = {"quarantine_running": {"running_requests": KEEP}}
SAME_AS_DEFAULT = {
    ("running_requests", types.RUNNING_REQUESTS_FAIL),
    ("scope", types.REORDER_SCOPE_IDLE),
    ("on_abandon", api.ABANDON_POLICY_STAY_PAUSED),
}
DECIDES_HERE = {("purpose", types.PURPOSE_BENCHMARK), ("purpose", types.PURPOSE_WEIGHT_UPDATE)}
"""Only rules out combinations; nothing for the engine to do."""


def values_of(field):
    if field.type == FieldDescriptor.TYPE_ENUM:
        return [number for number in field.enum_type.values_by_number if number]
    if field.type == FieldDescriptor.TYPE_BOOL:
        return [True]
    if field.name.endswith("request_id"):
        return ["0b7e2d94-3c51-4a86-9f2d-71c0e8a4b6d3"]
    if field.type == FieldDescriptor.TYPE_STRING:
        return ["v7"]
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        return [{"seconds": 77}]
    raise AssertionError(f"a kind of field that this test does not know: {field.name}")


CASES = [
    (request_type, field.name, value)
    for request_type in BASE
    for field in request_type.DESCRIPTOR.fields
    for value in values_of(field)
]


@pytest.mark.parametrize(("request_type", "field", "value"), CASES)
def test_every_option_of_every_request_reaches_the_engine(request_type, field, value):
    base = {**BASE[request_type], **NEEDS.get(field, {})}
    without = requests.read(request_type(**base))
    changed = requests.read(request_type(**{**base, field: value}))
    if (field, str(value)) in {(name, str(one)) for name, one in SAME_AS_DEFAULT | DECIDES_HERE}:
        assert changed == without
    else:
        assert changed != without


def test_every_field_of_an_engine_message_can_be_set_from_the_api():
    """The other way round: nothing the engine can do is out of reach."""
    seen: dict[type, set[str]] = {}
    for request_type, field, value in CASES:
        base = {**BASE[request_type], **NEEDS.get(field, {})}
        without = requests.read(request_type(**base)).mutation
        changed = requests.read(request_type(**{**base, field: value})).mutation
        differing = {name for name in without.__struct_fields__ if getattr(without, name) != getattr(changed, name)}
        seen.setdefault(type(without), set()).update(differing)
    for message, names in seen.items():
        assert names == set(message.__struct_fields__) - {"call", "deadline_ns"}, message


def test_unspecified_is_the_least_disruptive():
    assert requests.read(api.ResetPrefixCacheRequest()).mutation.running == "fail"
    assert requests.read(api.ReorderFreeQueueRequest()).mutation.scope == "idle"
    pause = api.PauseSchedulingRequest()
    pause.lease.seconds = 1
    assert requests.read(pause).mutation.resume_when_abandoned is False


def test_an_absent_request_id_is_made_and_a_present_one_has_one_spelling():
    made = {requests.read(api.RelieveAdmissionRequest()).request_id for _ in range(3)}
    assert len(made) == 3
    shouted = api.RelieveAdmissionRequest(request_id=f"{{{ID.upper()}}}")
    assert requests.read(shouted).request_id == ID


def test_every_capability_asked_for_is_one_the_protocol_knows():
    for request_type, field, value in CASES:
        base = {**BASE[request_type], **NEEDS.get(field, {})}
        mutation = requests.read(request_type(**{**base, field: value})).mutation
        assert set(requests.capabilities_needed(mutation)) <= set(protocol.CAPABILITIES)


@pytest.mark.parametrize(
    ("request_message", "fields"),
    [
        (api.GetOperationRequest(), ["request_id"]),
        (api.CancelOperationRequest(request_id="x"), ["request_id"]),
        (api.RenewPauseRequest(), ["pause_request_id", "lease"]),
        (api.ResumeSchedulingRequest(weight_version="v" * 300), ["weight_version"]),
        (api.ResumeSchedulingRequest(pause_request_id=ID, force=True), ["force"]),
        (api.WatchAdmissionRequest(interval={"nanos": 50_000_000}), ["interval"]),
        (api.WatchAdmissionRequest(interval={"seconds": -1}), ["interval"]),
        (api.PauseSchedulingRequest(lease={"seconds": 1}, on_abandon=9), ["on_abandon"]),
    ],
)
def test_a_broken_rule_names_its_field(request_message, fields):
    with pytest.raises(Failure) as caught:
        rules.check(request_message)
    assert [violation.field for violation in caught.value.violations] == fields


def test_keep_for_a_weight_update_needs_quarantine():
    update = {"running_requests": KEEP, "purpose": types.PURPOSE_WEIGHT_UPDATE}
    with pytest.raises(Failure, match="quarantine_running"):
        requests.read(api.ResetPrefixCacheRequest(**update))
    assert requests.read(api.ResetPrefixCacheRequest(**update, quarantine_running=True)).mutation.quarantine


@pytest.mark.parametrize("text", [ID, ID.upper(), ID.replace("-", ""), f"{{{ID}}}", f"urn:uuid:{ID}"])
def test_every_spelling_of_a_request_id_is_taken(text):
    assert requests.read(api.RelieveAdmissionRequest(request_id=text)).request_id == ID


@pytest.mark.parametrize(
    "text",
    [
        "x",
        ID[:-1],
        f"{ID}0",
        f" {ID}",
        ID.replace("-", "_"),
        ID.replace("6", "\uff16"),
        "+" + ID.replace("-", "")[1:],
        "1_2" + ID.replace("-", "")[3:],
        "\u0661" * 32,
    ],
)
def test_what_only_looks_like_a_request_id_is_refused(text):
    with pytest.raises(Failure, match="must be a UUID"):
        requests.read(api.RelieveAdmissionRequest(request_id=text))
