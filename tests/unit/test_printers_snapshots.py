"""What people see, byte for byte. KVCTL_UPDATE_SNAPSHOTS=1 writes the files anew; read what changed before a commit."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from kvctl.v1 import fleet_pb2, types_pb2
from rich.console import Console

from sidecar.cli import checkup, live
from sidecar.cli.finding import Finding
from sidecar.cli.printers import admission, effects, encoding, operation, operations, replicas, style
from sidecar.cli.printers.operation import told
from sidecar.client import errors
from sidecar.client.results import fleet_result
from sidecar.coordinator import outcomes
from sidecar.operator import status

SNAPSHOTS = Path(__file__).parent / "snapshots"
OPERATION_ID = "35b002b1-9e3c-4e95-8fce-673a72e0eb01"


def engine_status(rank: int, code: int = 0, reason: str = "", message: str = "") -> types_pb2.EngineStatus:
    engine = types_pb2.EngineRef(data_parallel_rank=rank, incarnation="ab" * 16)
    return types_pb2.EngineStatus(engine=engine, code=code, reason=reason, message=message)


def reset_engine(
    rank: int, dropped: int = 812, connector: int = types_pb2.TIER_STATE_NOT_REQUESTED
) -> types_pb2.EngineReset:
    engine = types_pb2.EngineReset(
        status=engine_status(rank), cached_blocks_dropped=dropped, requests_running=3, requests_kept=3,
        prefix_caching_enabled=True, event_published=True, event_tiers=["GPU"],
    )  # fmt: skip
    engine.prefix_cache.state = types_pb2.TIER_STATE_DONE
    engine.connector.state = connector
    engine.multimodal.state = engine.encoder.state = types_pb2.TIER_STATE_NOT_REQUESTED
    engine.pause.longest_us = 400
    return engine


def row(name: str, outcome: int, code: str, reason: str = "", message: str = "") -> fleet_pb2.TargetResult:
    made = fleet_pb2.TargetResult(
        replica=name, address="127.0.0.1:9001", outcome=outcome, code=code, reason=reason, message=message, attempts=1
    )
    made.took.FromMilliseconds(31)
    return made


def a_reset() -> fleet_pb2.FleetOperation:
    made = fleet_pb2.FleetOperation(operation_id=OPERATION_ID, kind=types_pb2.OPERATION_KIND_RESET)
    made.spec.reset.running_requests = types_pb2.RUNNING_REQUESTS_KEEP
    done = row("r0", fleet_pb2.TARGET_OUTCOME_SUCCEEDED, "OK")
    done.reset.engines.append(reset_engine(0))
    nothing = row("r1", fleet_pb2.TARGET_OUTCOME_SUCCEEDED, "OK")
    nothing.reset.engines.extend([reset_engine(0, 0), reset_engine(1, 0)])
    held = "12 blocks are held by 3 running and 0 waiting requests"
    refused = row("r2", fleet_pb2.TARGET_OUTCOME_FAILED, "FAILED_PRECONDITION", "BLOCKS_HELD_BY_REQUESTS", held)
    refused.reset.engines.add().status.CopyFrom(engine_status(0, 9, "BLOCKS_HELD_BY_REQUESTS", held))
    partly = row(
        "r3", fleet_pb2.TARGET_OUTCOME_FAILED, "FAILED_PRECONDITION", "CONNECTOR_BUSY", "4 transfers in flight"
    )
    partly.reset.engines.append(reset_engine(0))
    partly.reset.engines.append(reset_engine(1, connector=types_pb2.TIER_STATE_PENDING))
    partly.reset.engines[1].status.CopyFrom(engine_status(1, 9, "CONNECTOR_BUSY", "4 transfers in flight"))
    rows = [
        done, nothing, refused,
        row("r2b", fleet_pb2.TARGET_OUTCOME_FAILED, "FAILED_PRECONDITION", "BLOCKS_HELD_BY_REQUESTS", held),
        partly,
        row("r4", fleet_pb2.TARGET_OUTCOME_UNREACHABLE, "UNAVAILABLE", "REPLICA_UNREACHABLE", "connection refused"),
        row("r5", fleet_pb2.TARGET_OUTCOME_UNKNOWN, "DEADLINE_EXCEEDED", "OUTCOME_UNKNOWN", "the answer was lost"),
        row("r6", fleet_pb2.TARGET_OUTCOME_SKIPPED, "CANCELLED", "TARGET_NOT_READY", "not called: terminating"),
        row("r7", fleet_pb2.TARGET_OUTCOME_CANCELLED, "CANCELLED", "CANCELLED", "cancelled before its turn"),
        row("ŕ8", fleet_pb2.TARGET_OUTCOME_FAILED, "INTERNAL", "OPERATION_RAISED", "evil \x1b[31mtext\nハッシュ" * 3),
    ]  # fmt: skip
    made.results.extend(rows)
    made.counts.CopyFrom(outcomes.count(rows))
    outcomes.conclude(made)
    made.state = fleet_pb2.OPERATION_STATE_PARTIAL
    made.started_at.FromJsonString("2026-01-02T03:04:05Z")
    made.took.FromMilliseconds(412)
    made.targets_incomplete = True
    return made


def a_dry_run() -> fleet_pb2.FleetOperation:
    made = fleet_pb2.FleetOperation(operation_id=OPERATION_ID, state=fleet_pb2.OPERATION_STATE_SUCCEEDED)
    made.spec.validate_only = True
    one = row("r0", fleet_pb2.TARGET_OUTCOME_SUCCEEDED, "OK")
    one.reset.validate_only = True
    made.results.append(one)
    made.counts.CopyFrom(outcomes.count(made.results))
    return made


def a_reorder() -> fleet_pb2.FleetOperation:
    made = fleet_pb2.FleetOperation(operation_id=OPERATION_ID, state=fleet_pb2.OPERATION_STATE_SUCCEEDED)
    one = row("r0", fleet_pb2.TARGET_OUTCOME_SUCCEEDED, "OK")
    engine = one.reorder.engines.add(status=engine_status(0), blocks_moved=4000)
    engine.before.ratio, engine.after.ratio, engine.pause.longest_us = 0.084, 1.0, 27000
    relieved = row("r1", fleet_pb2.TARGET_OUTCOME_SUCCEEDED, "OK")
    relieved.relieve.engines.add(
        status=engine_status(0), request_ids=["req-7"], blocks_freed=84, attempts=1, max_attempts=3
    )
    paused = row("r2", fleet_pb2.TARGET_OUTCOME_SUCCEEDED, "OK")
    lease = paused.pause.engines.add(status=engine_status(0), state=types_pb2.SCHEDULING_STATE_PAUSED)
    lease.lease_remaining.seconds = 30
    made.results.extend([one, relieved, paused])
    made.counts.CopyFrom(outcomes.count(made.results))
    made.took.FromMilliseconds(60)
    return made


def an_admission() -> fleet_pb2.FleetAdmissionResponse:
    made = fleet_pb2.FleetAdmissionResponse(stalled=True, incomplete=True)
    for name, verdict, stalled in (
        ("r0", types_pb2.VERDICT_FLOWING, False),
        ("r1", types_pb2.VERDICT_HELD_BLOCKS_DEADLOCK, True),
    ):
        replica = made.replicas.add(replica=name, address="127.0.0.1:9001", code="OK")
        engine = replica.admission.engines.add(verdict=verdict, stalled=stalled, steps=1000, tokens_per_second=250.0)
        engine.verdict_for.seconds, engine.oldest_waiting.nanos = 12, 250_000_000
        engine.requests.running, engine.requests.waiting = 3, 1
        engine.blocks.total, engine.blocks.free, engine.blocks.cached, engine.blocks.orphaned = 1000, 700, 250, -1
        engine.contiguity.ratio = 0.93
        engine.since_last_reset.seconds, engine.last_reset_mode = 42, types_pb2.RUNNING_REQUESTS_KEEP
        if stalled:
            engine.head.blocks_needed = 32
            engine.explanation = "nothing runs, 2 waiting requests hold 973 blocks, the head needs 32 and 27 are free"
            engine.warnings.append("woke without a reset")
    made.replicas.add(replica="r2", address="127.0.0.1:9003", code="UNAVAILABLE", message="connection refused")
    return made


def a_listing() -> fleet_pb2.ListReplicasResponse:
    made = fleet_pb2.ListReplicasResponse(incomplete=True)
    info = types_pb2.ReplicaInfo(name="r0", version="0.1.0", labels={"pool": "a"})
    info.engines.add(
        engine=types_pb2.EngineRef(data_parallel_rank=0), backend=types_pb2.BACKEND_KIND_BRIDGE, connected=True, pid=77,
        vllm_version="0.32.0", bridge_version="0.1.0", model="tiny", block_size=16, blocks=1000,
        prefix_caching_enabled=True,
        capabilities=[types_pb2.Capability(name="reset.keep", available=True),
                      types_pb2.Capability(name="reset.connector", reason="no connector")],
    )  # fmt: skip
    made.replicas.add(name="r0", address="127.0.0.1:9001", reachable=True, code="OK", info=info)
    lost = types_pb2.ReplicaInfo(name="r1", version="0.1.0")
    lost.engines.add(
        engine=types_pb2.EngineRef(data_parallel_rank=0), unavailable_reason="the engine's process is gone"
    )
    made.replicas.add(name="r1", address="127.0.0.1:9002", reachable=True, code="OK", info=lost)
    made.replicas.add(name="r2", address="127.0.0.1:9003", code="UNAVAILABLE", message="connection refused")
    leaving = "not called: the pod is terminating"
    made.replicas.add(
        name="r4", address="127.0.0.1:9005", code="UNAVAILABLE", reason="TARGET_NOT_READY", message=leaving
    )
    empty = types_pb2.ReplicaInfo(name="r3", version="0.1.0")
    made.replicas.add(name="r3", address="127.0.0.1:9004", reachable=True, code="OK", info=empty)
    return made


def a_checkup() -> list[Finding]:
    return [
        Finding("ok", "kvctl", "0.1.0 on Python 3.11.2"),
        Finding("wrong", "replica gone", "127.0.0.1:1: connection refused", "start kvctl-sidecar there", True),
        Finding("warning", "token t", "mode 0644: others may read it", "chmod 600 t"),
        Finding("ok", "replica r0", "evil \x1b[31mname"),
    ]


def printed(print_to: Callable[[Console], None], width: int) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=width, color_system=None, highlight=False, emoji=False, markup=False)
    print_to(console)
    return "".join(f"{line.rstrip()}\n" for line in stream.getvalue().splitlines())


CASES: dict[str, Callable[[], str]] = {
    "reset.table": lambda: printed(lambda c: operation.print_table(c, a_reset()), 80),
    "reset.wide": lambda: printed(lambda c: operation.print_wide(c, a_reset()), style.WIDE),
    "reset.json": lambda: encoding.encode(a_reset(), "json"),
    "reset.yaml": lambda: encoding.encode(a_reset(), "yaml"),
    "dry_run.table": lambda: printed(lambda c: operation.print_table(c, a_dry_run()), 80),
    "reorder.table": lambda: printed(lambda c: operation.print_table(c, a_reorder()), 80),
    "reorder.wide": lambda: printed(lambda c: operation.print_wide(c, a_reorder()), style.WIDE),
    "admission.table": lambda: printed(lambda c: admission.print_table(c, an_admission()), 80),
    "admission.wide": lambda: printed(lambda c: admission.print_wide(c, an_admission()), style.WIDE),
    "admission.json": lambda: encoding.encode(an_admission(), "json"),
    "admission.watch": lambda: "".join(
        f"{line}\n"
        for one in an_admission().replicas
        for line in admission.change_line("03:04:05", fleet_pb2.WatchFleetAdmissionResponse(replica=one))
    ),
    "replicas.table": lambda: printed(lambda c: replicas.print_table(c, a_listing()), 80),
    "replicas.wide": lambda: printed(lambda c: replicas.print_wide(c, a_listing()), style.WIDE),
    "operations.table": lambda: printed(lambda c: operations.print_table(c, [a_reset(), a_dry_run()]), 80),
    "top.screen": lambda: printed(lambda c: c.print(live.screen(an_admission(), "03:04:05", "q quits")), 80),
    "top.narrow": lambda: printed(lambda c: c.print(live.screen(an_admission(), "03:04:05", "q quits", width=40)), 40),
    "doctor.table": lambda: printed(lambda c: checkup.print_table(c, a_checkup()), 80),
}


@pytest.mark.parametrize("name", CASES)
def test_the_printed_form_is_as_recorded(name: str) -> None:
    file = SNAPSHOTS / f"{name}.txt"
    text = CASES[name]()
    if os.environ.get("KVCTL_UPDATE_SNAPSHOTS"):
        SNAPSHOTS.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith((".table", ".screen"))])
def test_tables_fit_eighty_columns(name: str) -> None:
    assert max(len(line) for line in CASES[name]().splitlines()) <= 80


@pytest.mark.parametrize("name", [name for name in CASES if not name.endswith((".json", ".yaml"))])
def test_text_of_a_replica_cannot_control_the_terminal(name: str) -> None:
    assert not [character for character in CASES[name]() if ord(character) < 32 and character != "\n"]


def test_long_names_of_replicas_fold_and_leave_the_outcome_readable() -> None:
    made = fleet_pb2.FleetOperation(operation_id=OPERATION_ID)
    name = "vllm-llama-3-70b-instruct-prefill-" + "a" * 40
    made.results.append(row(name, fleet_pb2.TARGET_OUTCOME_FAILED, "FAILED_PRECONDITION", "CONNECTOR_BUSY", "4 left"))
    text = printed(lambda c: operation.print_table(c, made), 80)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert "failed" in text
    assert "FAILED_PRECONDITION" in text
    shown = "".join(line.split()[0] for line in text.splitlines()[1:] if line.strip() and line[0] != " ")
    assert shown.startswith("vllm-llama")


def test_json_and_yaml_say_the_same() -> None:
    assert json.loads(CASES["reset.json"]()) == yaml.safe_load(CASES["reset.yaml"]())


def test_json_has_counts_that_are_zero_and_keeps_the_declared_order() -> None:
    content = json.loads(encoding.encode(a_dry_run(), "json"))
    assert content["counts"]["failed"] == 0
    assert list(content)[:3] == ["operationId", "kind", "spec"]


def test_every_reason_that_gets_advice_is_one_of_the_api() -> None:
    from kvctl.v1 import errors_pb2

    from sidecar.cli.printers.advice import NEXT

    known = {name.removeprefix("REASON_") for name in errors_pb2.Reason.keys()}  # noqa: SIM118
    assert set(NEXT) <= known


def test_values_that_only_a_newer_replica_knows_are_shown_by_number() -> None:
    made = fleet_pb2.FleetOperation(operation_id=OPERATION_ID, state=99)
    newer = row("r0", fleet_pb2.TARGET_OUTCOME_SUCCEEDED, "OK")
    newer.reset.engines.append(reset_engine(0, connector=98))
    made.results.extend([newer, row("r1", 97, "OK")])
    tables = (lambda c: operation.print_table(c, made), lambda c: operations.print_table(c, [made]))
    text = " ".join(" ".join(printed(each, style.WIDE) for each in tables).split())
    assert "connector in state 98" in text
    assert "outcome 97" in text
    assert "value_99" in text
    fleet = an_admission()
    fleet.replicas[0].admission.engines[0].verdict = 96
    assert "VALUE_96" in printed(lambda c: admission.print_table(c, fleet), 80)
    assert fleet_result(made).state == "value_99"


def test_a_failure_group_names_at_most_six_replicas() -> None:
    made = fleet_pb2.FleetOperation(operation_id=OPERATION_ID)
    for number in range(300):
        made.results.append(row(f"r{number:03}", fleet_pb2.TARGET_OUTCOME_FAILED, "INTERNAL", "OPERATION_RAISED", "x"))
    made.counts.CopyFrom(outcomes.count(made.results))
    lines = operation.summary(made)
    assert lines[1] == "  INTERNAL OPERATION_RAISED: r000, r001, r002, r003, r004, r005 and 294 more"
    assert lines[2] == "    300 say: x"


def test_a_result_on_record_says_that_nothing_ran_now() -> None:
    operation = a_reset()
    first = next(row for row in operation.results if row.outcome == fleet_pb2.TARGET_OUTCOME_SUCCEEDED)
    assert "recorded earlier" not in told(first)
    for engine in first.reset.engines:
        engine.status.replayed = True
    assert told(first).endswith("(recorded earlier, nothing ran now)")


def test_after_two_hundred_rows_the_two_that_refused_are_the_last() -> None:
    made = fleet_pb2.FleetOperation(operation_id=OPERATION_ID, state=fleet_pb2.OPERATION_STATE_PARTIAL)
    for number in range(200):
        if number in (17, 90):
            made.results.append(
                row(f"r{number:03}", fleet_pb2.TARGET_OUTCOME_FAILED, "FAILED_PRECONDITION", "CONNECTOR_BUSY", "4 left")
            )
        else:
            made.results.append(row(f"r{number:03}", fleet_pb2.TARGET_OUTCOME_SUCCEEDED, "OK"))
    made.counts.CopyFrom(outcomes.count(made.results))
    for print_to in (operation.print_table, operation.print_wide):
        lines = printed(lambda c, each=print_to: each(c, made), 100).splitlines()
        rows = [line for line in lines if line.startswith("r") and line[1:4].isdigit()]
        assert len(rows) == 200
        assert [line[:4] for line in rows[-2:]] == ["r017", "r090"]
        assert lines[-1] == f"operation {OPERATION_ID} (partial)"


@pytest.mark.parametrize("name", ["r{}", "vllm-llama-70b-{}", "vllm-prefill-6d8f7b9c5d-p9{}"])
def test_at_eighty_columns_a_replica_that_succeeded_has_one_line_with_the_blocks_and_requests_it_was_about(
    name: str,
) -> None:
    made = fleet_pb2.FleetOperation(operation_id=OPERATION_ID)
    for number in range(200):
        done = row(name.format(f"{number:03}"), fleet_pb2.TARGET_OUTCOME_SUCCEEDED, "OK")
        done.reset.engines.append(reset_engine(0, 1812))
        made.results.append(done)
    held = "12 blocks are held by 3 running and 0 waiting requests"
    made.results.append(row("x", fleet_pb2.TARGET_OUTCOME_FAILED, "FAILED_PRECONDITION", "BLOCKS_HELD", held))
    made.counts.CopyFrom(outcomes.count(made.results))
    lines = printed(lambda c: operation.print_table(c, made), 80).splitlines()
    assert max(map(len, lines)) <= 80
    for line, done in zip(lines[1:], made.results[:200], strict=False):
        shown = line.split()
        assert shown[:3] == [done.replica, "succeeded", "1812"]
        assert "blocks dropped, 3 requests kept" in line
    assert lines[201].split()[:2] == ["x", "failed"]


@pytest.mark.parametrize("name", ["r0", "r000", "replica-0"])
@pytest.mark.parametrize("dropped", [1, 12, 812, 1812, 98123, 998123])
def test_a_success_has_one_line_also_where_its_name_is_shorter_than_the_head_of_the_column(
    name: str, dropped: int
) -> None:
    made = fleet_pb2.FleetOperation(operation_id=OPERATION_ID)
    done = row(name, fleet_pb2.TARGET_OUTCOME_SUCCEEDED, "OK")
    done.reset.engines.append(reset_engine(0, dropped))
    made.results.append(done)
    made.counts.CopyFrom(outcomes.count(made.results))
    lines = printed(lambda c: operation.print_table(c, made), 80).splitlines()
    assert lines[2].startswith("1 replica: 1 succeeded")


def test_a_quarantine_takes_no_second_line_and_other_tiers_no_third() -> None:
    made = fleet_pb2.FleetOperation(operation_id=OPERATION_ID)
    done = row("vllm-70b-0", fleet_pb2.TARGET_OUTCOME_SUCCEEDED, "OK")
    engine = done.reset.engines.add(prefix_caching_enabled=True, requests_kept=3, requests_quarantined=3)
    made.results.append(done)
    lines = printed(lambda c: operation.print_table(c, made), 80).splitlines()
    assert lines[1].split("succeeded")[1].strip() == "0 blocks were cached, 3 requests kept, 3 quarantined"
    for tier in ("connector", "multimodal", "encoder"):
        getattr(engine, tier).state = types_pb2.TIER_STATE_NOT_CONFIGURED
    engine.encoder.state = types_pb2.TIER_STATE_DONE
    made.results[0].CopyFrom(done)
    lines = printed(lambda c: operation.print_table(c, made), 80).splitlines()
    assert lines[2].strip() == "connector/multimodal not configured, encoder done"


def test_a_roomy_terminal_has_every_word_and_the_code_of_each_replica() -> None:
    lines = printed(lambda c: operation.print_table(c, a_reset()), operation.ROOMY).splitlines()
    assert lines[0].split() == ["REPLICA", "OUTCOME", "CODE", "WHAT", "HAPPENED"]
    assert "OK                   812 cached blocks dropped, 3 requests kept, engine paused 0.40 ms" in lines[1]


def test_a_narrow_list_of_operations_leaves_columns_out_and_cuts_no_id() -> None:
    for width, last in ((80, "STARTED"), (40, "OPERATION")):
        lines = printed(lambda c: operations.print_table(c, [a_reset()]), width).splitlines()
        assert lines[0].split()[-1] == last
        assert lines[1].split()[0] == OPERATION_ID


def test_operations_with_chosen_ids_that_begin_alike_are_told_apart() -> None:
    found = [fleet_pb2.FleetOperation(operation_id=f"{OPERATION_ID[:-1]}{end}", why=f"why {end}") for end in "12"]
    lines = printed(lambda c: operations.print_table(c, found), 80).splitlines()
    assert lines[3:] == [f"  {each.operation_id}  {each.why}" for each in found]


def test_a_text_that_many_replicas_share_is_printed_once_with_how_many_say_it() -> None:
    made = fleet_pb2.FleetOperation(operation_id=OPERATION_ID)
    text = "ブロックが解放されていません。" * 10
    for number in range(300):
        made.results.append(row(f"r{number:03}", fleet_pb2.TARGET_OUTCOME_FAILED, "INTERNAL", "OPERATION_RAISED", text))
    for number in range(8):
        lost = row(f"u{number}", fleet_pb2.TARGET_OUTCOME_UNREACHABLE, "UNAVAILABLE", "REPLICA_UNREACHABLE")
        lost.address = f"10.0.0.{number}:7700"
        lost.message = f"no answer from {lost.address} within 5 s"
        made.results.append(lost)
    made.counts.CopyFrom(outcomes.count(made.results))
    shown = printed(lambda c: operation.print_table(c, made), 80)
    assert shown.count("OPERATION_RAISED") == 301
    assert "".join(shown.split()).count(text) == 1
    assert "    300 say:" in shown
    assert "    8 say: no answer within 5 s\n" in shown


def test_texts_that_differ_stay_with_their_replica() -> None:
    made = fleet_pb2.FleetOperation(operation_id=OPERATION_ID)
    for number in range(5):
        text = f"{number + 1} blocks are held"
        made.results.append(row(f"r{number}", fleet_pb2.TARGET_OUTCOME_FAILED, "FAILED_PRECONDITION", "HELD", text))
    shown = printed(lambda c: operation.print_table(c, made), 80)
    assert all(f"HELD: {number + 1} blocks are held" in shown for number in range(5))
    assert " say: " not in shown


def test_an_operation_that_is_held_says_so_and_how_it_goes_on() -> None:
    made = fleet_pb2.FleetOperation(operation_id=OPERATION_ID, state=fleet_pb2.OPERATION_STATE_PAUSED)
    assert operation.summary(made)[-2:] == [
        f"operation {OPERATION_ID} (paused)",
        "  -> `kvctl ops resume` with this id lets it go on",
    ]


def test_admission_shows_what_stalls_after_what_is_well_and_a_shared_reason_once() -> None:
    fleet = an_admission()
    for number in range(20):
        address = f"10.0.0.{number}:7700"
        fleet.replicas.add(
            replica=f"a{number}", address=address, code="UNAVAILABLE", message=f"{address}: connection refused"
        )
    shown = printed(lambda c: admission.print_table(c, fleet), 80)
    assert [line.split()[0] for line in shown.splitlines()[1:4]] == ["r0", "r1", "a0"]
    assert shown.count("connection refused") == 1
    assert "and 15 more: connection refused" in " ".join(shown.split())


def test_a_full_screen_of_top_keeps_what_stalls_and_who_is_lost_and_lines_end_with_them() -> None:
    fleet = an_admission()
    for number in range(50):
        engine = fleet.replicas.add(replica=f"a{number:02}", code="OK").admission.engines.add()
        engine.verdict = types_pb2.VERDICT_FLOWING
    screen = printed(lambda c: c.print(live.screen(fleet, "03:04:05", "q quits", rows=4)), 80).splitlines()
    assert [line.split()[0] for line in screen[2:6]] == ["r1/0", "r2", "a00/0", "a01/0"]
    assert screen[6] == "49 more rows; --replicas shows a part"
    lines = printed(lambda c: c.print(live.screen(fleet, "03:04:05", "", worst_last=True)), 80).splitlines()
    shown = [line.split()[0] for line in lines[2:55]]
    assert (shown[:2], shown[-2:]) == (["a00/0", "a01/0"], ["r2", "r1/0"])


def test_long_names_that_begin_alike_are_told_apart_in_top() -> None:
    fleet = fleet_pb2.FleetAdmissionResponse()
    for name in ("vllm-prefill-6d8f7b9c5d-p9qrz", "vllm-prefill-6d8f7b9c5d-x2x4k"):
        replica = fleet.replicas.add(replica=name, code="OK")
        for rank in range(2):
            replica.admission.engines.add().engine.data_parallel_rank = rank
    lines = printed(lambda c: c.print(live.screen(fleet, "03:04:05", "")), 80).splitlines()
    assert [line.split()[0] for line in lines[2:6]] == [
        "vllm..-p9qrz/0", "vllm..-p9qrz/1", "vllm..-x2x4k/0", "vllm..-x2x4k/1",
    ]  # fmt: skip


def test_on_a_narrow_terminal_tables_leave_columns_out_before_they_break_what_is_said() -> None:
    lines = printed(lambda c: operation.print_table(c, a_reset()), 40).splitlines()
    assert lines[0].split() == ["REPLICA", "OUTCOME", "WHAT", "HAPPENED"]
    assert lines[1].startswith("r0       succeeded    812 blocks")
    assert max(len(line) for line in lines) <= 40
    lines = printed(lambda c: admission.print_table(c, an_admission()), 40).splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["REPLICA", "ENGINE", "VERDICT"],
        ["r0", "0", "FLOWING"],
        ["r1", "0", "HELD_BLOCKS_DEADLOCK"],
    ]


def test_a_replica_that_a_rollout_waits_for_comes_after_those_that_are_well_and_says_what_is_seen_of_it() -> None:
    made = a_reset()
    made.results[0].health = "waiting for it to be healthy (58 s left): HELD_BLOCKS_DEADLOCK for 12 s"
    for print_to in (operation.print_table, operation.print_wide):
        shown = printed(lambda c, each=print_to: each(c, made), style.WIDE)
        rows = [line.split()[0] for line in shown.splitlines()[1:] if " succeeded " in line or " failed " in line]
        assert rows.index("r1") < rows.index("r0") < rows.index("r2")
        assert "HELD_BLOCKS_DEADLOCK for 12 s" in next(line for line in shown.splitlines() if line.startswith("r0"))


def test_a_narrow_screen_shows_the_columns_that_fit_and_no_half_of_one() -> None:
    lines = CASES["top.narrow"]().splitlines()
    assert lines[2].split() == ["ENGINE", "VERDICT", "RUN", "WAIT"]
    assert max(len(line) for line in lines) <= 40
    assert any(line.split() == ["r1/0", "HELD_BLOCKS_DEADLOCK", "3", "1"] for line in lines)


def test_wide_is_as_wide_as_it_needs_whatever_columns_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    stream = io.StringIO()
    replicas.print_wide(style.console(stream, wide=True), a_listing())
    assert stream.getvalue().startswith("REPLICA  ADDRESS         LABELS")
    assert "the engine's process is gone" in stream.getvalue()


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.0004, "0.40 ms"), (0.031, "31 ms"), (0.9994, "999 ms"), (0.99996, "1.0 s"), (119.9, "119.9 s"), (240, "4 min")],
)
def test_a_time_is_told_in_the_unit_that_people_would_use(value: float, shown: str) -> None:
    assert style.seconds(value) == shown


def test_wide_says_of_an_only_engine_without_words_what_its_replica_said() -> None:
    made = fleet_pb2.FleetOperation(operation_id=OPERATION_ID)
    refused = row("r0", fleet_pb2.TARGET_OUTCOME_FAILED, "FAILED_PRECONDITION", "CONNECTOR_BUSY", "4 transfers left")
    refused.reset.engines.add(status=engine_status(0, 9, "CONNECTOR_BUSY"))
    made.results.append(refused)
    assert "CONNECTOR_BUSY: 4 transfers left" in printed(lambda c: operation.print_wide(c, made), style.WIDE)


def test_a_replica_known_by_its_address_alone_is_not_told_twice() -> None:
    lost = row("127.0.0.1:9001", fleet_pb2.TARGET_OUTCOME_UNREACHABLE, "UNAVAILABLE", "REPLICA_UNREACHABLE")
    lost.message = "127.0.0.1:9001: connection refused"
    assert told(lost) == "REPLICA_UNREACHABLE: connection refused"
    assert str(errors.error_for(lost.code, lost.reason, lost.message, lost.replica)) == lost.message


def test_an_engine_that_refuses_a_resume_is_not_another_engine() -> None:
    made = row("r0", fleet_pb2.TARGET_OUTCOME_FAILED, "FAILED_PRECONDITION", "WRONG_SCHEDULING_STATE", "leased")
    made.resume.engines.add(status=engine_status(0, 9), state=types_pb2.SCHEDULING_STATE_PAUSED)
    assert told(made) == "WRONG_SCHEDULING_STATE: leased"


def a_forecast(mode: int, *, idle: bool = False, wait: bool = False) -> fleet_pb2.FleetOperation:
    made = fleet_pb2.FleetOperation(operation_id=OPERATION_ID, state=fleet_pb2.OPERATION_STATE_SUCCEEDED)
    made.spec.validate_only = True
    made.spec.reset.running_requests = mode  # type: ignore[assignment]
    made.spec.reset.wait_for_idle = wait
    for number in range(2):
        one = row(f"r{number}", fleet_pb2.TARGET_OUTCOME_SUCCEEDED, "OK")
        one.reset.validate_only = True
        engine = one.reset.engines.add(status=engine_status(0), requests_running=0 if idle else number + 3)
        engine.holders.held_blocks = 0 if idle else 64
        made.results.append(one)
    made.counts.CopyFrom(outcomes.count(made.results))
    return made


def test_a_dry_run_of_preempt_says_how_many_requests_it_would_restart_per_replica_and_in_all() -> None:
    made = a_forecast(types_pb2.RUNNING_REQUESTS_PREEMPT)
    assert [told(each, made.spec) for each in made.results] == [
        "would restart 3 running requests, then reset",
        "would restart 4 running requests, then reset",
    ]
    assert "it would restart 7 running requests, whose tokens are computed again" in operation.summary(made)
    assert "would restart 4 running requests" in printed(lambda c: operation.print_wide(c, made), style.WIDE)


def test_a_dry_run_of_the_other_modes_says_what_each_would_do() -> None:
    keep = a_forecast(types_pb2.RUNNING_REQUESTS_KEEP)
    assert told(keep.results[0], keep.spec) == "would reset; 3 running requests would go on undisturbed"
    idle = a_forecast(types_pb2.RUNNING_REQUESTS_FAIL, idle=True)
    assert told(idle.results[0], idle.spec) == "would reset: nothing runs now and no block is held"
    waiting = a_forecast(types_pb2.RUNNING_REQUESTS_FAIL, wait=True)
    text = "would wait for an idle moment, then reset: 3 running requests and 64 blocks held now"
    assert told(waiting.results[0], waiting.spec) == text
    assert not any("restart" in line for made in (keep, idle, waiting) for line in operation.summary(made))


def a_pod(number: int) -> fleet_pb2.FleetReplica:
    name = f"vllm-llama-3-70b-instruct-prefill-{number}"
    made = fleet_pb2.FleetReplica(name=name, address=f"{name}.vllm.prod.svc.cluster.local:7700", reachable=True)
    made.info.engines.add(connected=True, vllm_version="0.32.0", model="/models/meta-llama/Llama-3.3-70B-Instruct")
    return made


def test_a_pod_that_is_not_called_is_shown_as_skipped_by_admission_and_top_and_counts_as_no_outage() -> None:
    fleet = an_admission()
    del fleet.replicas[1:]
    fleet.replicas.add(
        replica="p1", code="UNAVAILABLE", reason="TARGET_NOT_READY", message="not called: the pod is terminating"
    )
    for print_to in (
        lambda c: admission.print_table(c, fleet),
        lambda c: admission.print_wide(c, fleet),
        lambda c: c.print(live.screen(fleet, "03:04:05", "")),
    ):
        shown = printed(print_to, style.WIDE)
        assert "SKIPPED" in shown
        assert "p1: not called: the pod is terminating" in shown
        assert "UNAVAILABLE" not in shown
    assert "0 not reached, 1 skipped" in shown
    [line] = admission.change_line("03:04:05", fleet_pb2.WatchFleetAdmissionResponse(replica=fleet.replicas[1]))
    assert line == "03:04:05  p1  SKIPPED  not called: the pod is terminating"


def test_the_names_of_pods_are_readable_at_eighty_columns() -> None:
    fleet = fleet_pb2.ListReplicasResponse(replicas=[a_pod(number) for number in range(3)])
    lines = printed(lambda c: replicas.print_table(c, fleet), 80).splitlines()
    assert max(len(line) for line in lines) <= 80
    assert [line.split()[0] for line in lines[1:4]] == [
        "vllm-llama-3-70b-instruct-pref",
        "ill-0",
        "c.cluster.local:7700",
    ]
    assert all("0.32.0  ready" in line for line in lines[1::3])
    wide = printed(lambda c: replicas.print_table(c, fleet), 200)
    assert "Llama-3.3-70B-Instruct" in wide
    assert "/models" not in wide


def test_why_replicas_are_not_reached_is_said_once_under_the_table() -> None:
    fleet = a_listing()
    for number in range(9):
        address = f"10.0.0.{number}:7700"
        fleet.replicas.add(
            name=f"u{number}", address=address, code="UNAVAILABLE", message=f"no answer from {address} within 5 s"
        )
    shown = printed(lambda c: replicas.print_table(c, fleet), 80)
    assert shown.count("no answer within 5 s") == 1
    assert "u0, u1, u2, u3, u4, u5 and 3 more: no answer within 5 s\n" in shown
    assert "r1: the engine's process is gone\n" in shown


def test_what_cannot_be_known_over_http_is_no_number() -> None:
    """-1 is the wire's word for it; nobody dropped minus one block in no time."""
    over_http = types_pb2.EngineReset(
        prefix_cache=types_pb2.TierResult(state=types_pb2.TIER_STATE_DONE),
        prefix_caching_enabled=True,
        cached_blocks_dropped=-1,
        requests_preempted=-1,
    )
    text = "reset, number of cached blocks dropped not known, number of requests preempted not known"
    assert effects.reset([over_http]) == text
    row = fleet_pb2.TargetResult(replica="r0", outcome=fleet_pb2.TARGET_OUTCOME_SUCCEEDED, code="OK")
    row.reset.engines.append(over_http)
    assert status.shown(row, "uid").cached_blocks_dropped is None
    row.reset.engines[0].cached_blocks_dropped = 0
    assert status.shown(row, "uid").cached_blocks_dropped == 0
