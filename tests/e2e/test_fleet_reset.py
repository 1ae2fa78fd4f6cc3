"""The main job on real engines: resets across a fleet under load, told as they are."""

from __future__ import annotations

import json

import pytest

from sidecar.local.load import finish, prompt
from sidecar.local.streams import Generation, generate


async def test_keep_resets_every_replica_under_load_and_interrupts_no_stream(fleet, load):
    streams = [stream for each in load for stream in each.under_way()]
    done = await fleet.run_beside("reset", "--mode", "keep", "--replicas", "all", "-o", "json")
    assert done.code == 0, done.err
    result = json.loads(done.out)
    assert result["state"] == "OPERATION_STATE_SUCCEEDED"
    assert [row["replica"] for row in result["results"]] == ["r0", "r1"]
    for row in result["results"]:
        (engine,) = row["reset"]["engines"]
        assert engine["prefixCache"]["state"] == "TIER_STATE_DONE"
        assert engine["requestsKept"] == engine["requestsRunning"] == 4
        assert int(engine["cachedBlocksDropped"]) > 0
        assert engine["status"]["engine"]["incarnation"]
    await finish(streams)
    assert len(streams) == 8
    assert all(stream.finished for stream in streams), [stream.error for stream in streams]


async def test_fail_under_load_exits_1_and_names_the_running_requests(fleet, load):
    done = await fleet.run_beside("reset", "--mode", "fail", "--replicas", "all", "-o", "json")
    assert done.code == 1
    assert "Traceback" not in done.err
    result = json.loads(done.out)
    assert result["state"] == "OPERATION_STATE_FAILED"
    for row in result["results"]:
        assert row["code"] == "FAILED_PRECONDITION"
        assert row["reason"] == "BLOCKS_HELD_BY_REQUESTS"
        assert "4 running" in row["message"]
        assert row["reset"]["engines"][0]["holders"]["runningRequests"] == 4


async def test_fail_on_an_idle_fleet_resets_it(fleet):
    asked = Generation(prompt(lane=77, shared=7), max_tokens=1)
    replica = fleet.fleet.replicas[0]
    await generate(replica.api, asked)
    again = await generate(replica.api, Generation(asked.prompt, max_tokens=1))
    assert again.cached_tokens >= 512
    done = await fleet.run_beside("reset", "--mode", "fail", "--wait-for-idle", "--replicas", "all")
    assert done.code == 0, done.err
    after = await generate(replica.api, Generation(asked.prompt, max_tokens=1))
    assert (after.error, after.cached_tokens) == ("", 0)


@pytest.mark.parametrize("scope", ["uncached", "all-free"])
async def test_reorder_while_serving_leaves_streams_alone(fleet, load, scope):
    streams = [stream for each in load for stream in each.under_way()]
    done = await fleet.run_beside("reorder", "--scope", scope, "-o", "json")
    assert done.code == 0, done.err
    engines = [row["reorder"]["engines"][0] for row in json.loads(done.out)["results"]]
    assert all(engine["after"]["ratio"] >= engine["before"].get("ratio", 0) for engine in engines)
    await finish(streams)
    assert all(stream.finished for stream in streams)


async def test_reorder_idle_is_refused_while_blocks_are_held(fleet, load):
    done = await fleet.run_beside("reorder", "--scope", "idle", "-o", "json")
    assert done.code == 1
    assert {row["code"] for row in json.loads(done.out)["results"]} == {"FAILED_PRECONDITION"}


async def test_admission_says_that_tokens_flow(fleet, load):
    done = await fleet.run_beside("admission", "-o", "json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["replicas"]
    verdicts = [engine["verdict"] for row in rows for engine in row["admission"]["engines"]]
    assert verdicts == ["VERDICT_FLOWING"] * 2


def test_replicas_lists_both_with_their_engines(fleet):
    done = fleet.run("replicas", "-o", "json")
    assert done.code == 0, done.err
    rows = json.loads(done.out)["replicas"]
    assert [row["name"] for row in rows] == ["r0", "r1"]
    assert all(row["info"]["engines"][0]["connected"] for row in rows)


def test_one_replica_by_name_and_by_label_leaves_the_other_alone(fleet):
    named = json.loads(fleet.run("reset", "--mode", "keep", "--replicas", "r1", "-o", "json").out)
    assert [row["replica"] for row in named["results"]] == ["r1"]
    labelled = json.loads(fleet.run("reset", "--mode", "keep", "--replicas", "fleet=local", "-o", "json").out)
    assert [row["replica"] for row in labelled["results"]] == ["r0", "r1"]


def test_a_dry_run_changes_nothing(fleet):
    done = fleet.run("reset", "--mode", "keep", "--replicas", "all", "--dry-run", "-o", "json")
    assert done.code == 0, done.err
    engines = [engine for row in json.loads(done.out)["results"] for engine in row.get("reset", {}).get("engines", [])]
    assert all(int(engine.get("cachedBlocksDropped", 0)) == 0 for engine in engines)


def test_status_shows_that_all_of_it_serves(fleet):
    done = fleet.run("local", "status")
    assert done.code == 0, done.err
    assert done.out.count("serving") == 2


def test_a_second_fleet_is_refused_while_one_is_up(fleet):
    done = fleet.run("local", "up")
    assert done.code == 2
    assert "kvctl local down" in done.one_line_on_stderr()
