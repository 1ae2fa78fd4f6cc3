"""kvctl scheduling: who may end a pause, and what a resume says of weights that may be half written."""

from __future__ import annotations

import json
import re
import subprocess
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from fake_sidecar_server import FakeSidecar
from kvctl.v1 import types_pb2
from test_cli_commands import KVCTL, environment, fleet, kvctl

from sidecar.cli.abandoned import TOLD_BY
from sidecar.client import Fleet, errors
from sidecar.replica import explain
from sidecar.rpc.errors import abort, failure
from tests.contract.sidecar_process import SidecarProcess, wait_until
from tests.fake_engine.process import spawn_engine


class LeasedSidecar(FakeSidecar):
    """Keeps a live lease from whoever neither names nor forces it, as an engine does."""

    async def ResumeScheduling(self, request, context):  # noqa: N802
        if self.leases and not request.force and request.pause_request_id not in self.leases:
            [holder] = self.leases
            text = f"pause {holder} holds the lease for another 29 s"
            await abort(context, failure(grpc.StatusCode.FAILED_PRECONDITION, "WRONG_SCHEDULING_STATE", text))
        answer = await super().ResumeScheduling(request, context)
        self.leases.clear()
        return answer


def paused(tmp_path: Path, where: list[str]) -> str:
    done = kvctl(tmp_path, "scheduling", "pause", "--lease", "30s", "-o", "json", *where)
    return str(json.loads(done.stdout)["operationId"])


def test_a_bare_resume_does_not_end_a_live_lease_and_says_who_holds_it_and_what_would(tmp_path: Path) -> None:
    fake = LeasedSidecar("r0")
    with fleet(tmp_path, fake) as inventory:
        where = ["--inventory", str(inventory)]
        paused(tmp_path, where)
        [holder] = fake.leases
        done = kvctl(tmp_path, "scheduling", "resume", *where)
        assert done.returncode == 1
        told = " ".join(done.stdout.split())
        assert f"pause {holder} holds the lease for another 29 s" in told
        assert "end it with --pause and the id shown (or its operation's), or --force" in told
        assert fake.leases


@pytest.mark.parametrize("how", ["--pause", "--force"])
def test_the_id_of_the_pause_or_force_ends_a_live_lease(tmp_path: Path, how: str) -> None:
    fake = LeasedSidecar("r0")
    with fleet(tmp_path, fake) as inventory:
        where = ["--inventory", str(inventory)]
        operation_id = paused(tmp_path, where)
        named = ["--pause", operation_id] if how == "--pause" else ["--force"]
        assert kvctl(tmp_path, "scheduling", "resume", *named, *where).returncode == 0
    assert not fake.leases


def test_a_pause_says_how_it_is_ended(tmp_path: Path) -> None:
    with fleet(tmp_path, FakeSidecar("r0")) as inventory:
        done = kvctl(tmp_path, "scheduling", "pause", "--lease", "30s", "--inventory", str(inventory))
    assert done.stdout.endswith("  -> `kvctl scheduling resume --pause` with this id ends it\n")


def test_pause_and_force_exclude_each_other_and_an_empty_id_names_no_pause(tmp_path: Path) -> None:
    both = kvctl(tmp_path, "scheduling", "resume", "--force", "--pause", "7", "--target", "h:1")
    empty = kvctl(tmp_path, "scheduling", "resume", "--pause", "", "--target", "h:1")
    assert (both.returncode, empty.returncode) == (2, 2)
    assert "give one of them" in both.stderr
    assert "'' is not a UUID" in empty.stderr


class AbandonedSidecar(FakeSidecar):
    def admission(self):
        answer = super().admission()
        for engine in answer.engines:
            engine.verdict, engine.weight_version = types_pb2.VERDICT_PAUSED, "unknown"
            engine.explanation = explain._ABANDONED
        return answer


def test_resuming_an_abandoned_update_warns_that_weights_may_be_half_written(tmp_path: Path) -> None:
    with fleet(tmp_path, AbandonedSidecar("r0"), FakeSidecar("r1")) as inventory:
        done = kvctl(tmp_path, "scheduling", "resume", "--inventory", str(inventory))
    assert done.returncode == 0
    [line] = done.stderr.splitlines()
    assert line.startswith("warning: r0 engine 0: its weight update was abandoned; the weights may be half written")


def test_the_sidecars_words_for_an_abandoned_update_are_the_ones_that_are_looked_for() -> None:
    assert TOLD_BY in explain._ABANDONED


def test_the_client_names_a_pause_or_forces_its_end(tmp_path: Path) -> None:
    fake = LeasedSidecar("r0")
    with fleet(tmp_path, fake) as inventory, Fleet(inventory=inventory) as clients:
        operation_id = paused(tmp_path, ["--inventory", str(inventory)])
        refused = clients.resume_scheduling().replicas[0].error
        assert isinstance(refused, errors.PreconditionFailed)
        with pytest.raises(errors.RequestInvalid, match="give one"):
            clients.resume_scheduling(force=True, pause_operation_id=operation_id)
        assert clients.resume_scheduling(pause_operation_id=operation_id).ok
        paused(tmp_path, ["--inventory", str(inventory)])
        assert clients.resume_scheduling(force=True).ok


def test_a_pause_that_was_accepted_after_a_refusal_is_ended_by_its_operation_and_by_the_id_that_its_holder_shows(
    tmp_path: Path,
) -> None:
    (tmp_path / "e").mkdir()
    with spawn_engine(tmp_path / "e") as engine, ExitStack() as stack:
        sidecar = SidecarProcess(tmp_path / "e", tmp_path)
        stack.callback(sidecar.end)
        sidecar.wait_ready(60)
        where = ["--target", sidecar.address, "--timeout", "60s"]
        engine.do("sleep")
        pausing = subprocess.Popen(
            [*KVCTL, "scheduling", "pause", "--lease", "10m", "--wait", "-o", "json", *where],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(tmp_path),
        )  # fmt: skip
        wait_until(lambda: "ENGINE_SLEEPING" in sidecar.audit_file.read_text(), 60)
        engine.do("sleep", on=False)
        output, _ = pausing.communicate(timeout=60)
        [row] = json.loads(output)["results"]
        assert (row["outcome"], row["attempts"] > 1) == ("TARGET_OUTCOME_SUCCEEDED", True)
        resumed = kvctl(tmp_path, "scheduling", "resume", "--pause", json.loads(output)["operationId"], *where)
        assert resumed.returncode == 0, resumed.stdout

        paused(tmp_path, where)
        refused = kvctl(tmp_path, "scheduling", "resume", *where)
        [holder] = re.findall(r"pause ([0-9a-f-]{36}) holds the lease", " ".join(refused.stdout.split()))
        assert kvctl(tmp_path, "scheduling", "resume", "--pause", holder, *where).returncode == 0
