"""`kvctl demo` itself, once, as a newcomer runs it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

from sidecar.local.layout import read_record
from sidecar.local.processes import alive
from tests.e2e.fleet_program import left_behind
from tests.e2e.test_fleet_faults import wait_for


def test_the_demo_holds_every_claim_and_leaves_nothing(scratch, tmp_path):
    figures = tmp_path / "figures.json"
    done = scratch.run("demo", "--json", str(figures), timeout=450)
    written = json.loads(figures.read_text())
    assert done.code == 0, (done.out, done.err, written["claims"])
    assert written["held"] is True
    assert all(claim["held"] for claim in written["claims"])
    modes = {mode["mode"]: mode for mode in written["figures"]["modes"]}
    assert {row["code"] for row in modes["fail"]["answers"]} == {"FAILED_PRECONDITION"}
    assert modes["preempt"]["preemptions"] == 8
    assert modes["keep"]["preemptions"] == 0
    assert modes["keep"]["streams"]["identical"] == 8
    assert [(p["first_after"], p["second_after"]) for p in modes["keep"]["probes"]] == [(0, 512), (0, 512)]
    assert "claims held" in done.out
    assert not Path(scratch.state / "fleet.json").exists()


def test_ctrl_c_while_the_demo_measures_leaves_nothing(scratch):
    process = scratch.start("demo", "--replicas", "1")
    fleet = wait_for("the fleet to serve", lambda: (f := read_record(scratch.state)) and f.booted and f, seconds=280)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, (out, err)
    assert "Traceback" not in err
    assert not alive(fleet.keeper)
    assert left_behind(scratch, fleet.directory) == []
