"""kvctl as a process, against sidecars behind real gRPC."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from fake_sidecar_server import FakeSidecar, refused, serving
from kvctl.v1 import types_pb2

from sidecar.cli import hooks
from sidecar.rpc.channels import ClientSecurity

ROOT = Path(__file__).parents[2]
KVCTL = [sys.executable, "-m", "sidecar.cli.main"]


@contextmanager
def fleet(tmp_path: Path, *fakes: FakeSidecar, extra: str = "") -> Iterator[Path]:
    """An inventory over fakes that run on a thread of this process."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    context = serving(*fakes)
    try:
        addresses = asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result()
        listed = [
            {"name": fake.name, "address": address, "labels": fake.labels}
            for fake, address in zip(fakes, addresses, strict=True)
        ]
        file = tmp_path / "fleet.yaml"
        file.write_text(yaml.safe_dump({"replicas": listed}) + extra)
        yield file
    finally:
        asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def environment(tmp_path: Path, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("KVCTL_", "LC_", "LANG"))}
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto' / 'gen'}", "HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    return {**kept, **paths, "XDG_CONFIG_HOME": str(tmp_path / "config"), "LANG": "C.UTF-8", "COLUMNS": "80", **more}


def kvctl(tmp_path: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*KVCTL, *arguments], capture_output=True, text=True, timeout=60, env=environment(tmp_path, **more), check=False
    )
    assert "Traceback" not in done.stderr
    return done


# --- operations ----------------------------------------------------------------------------------------------------


def test_a_keep_reset_of_all_prints_one_fleet_operation_as_json(tmp_path: Path) -> None:
    with fleet(tmp_path, FakeSidecar("r0", engines=2), FakeSidecar("r1")) as inventory:
        done = kvctl(tmp_path, "reset", "--mode", "keep", "--inventory", str(inventory), "-o", "json")
    content = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert content["state"] == "OPERATION_STATE_SUCCEEDED"
    assert [row["replica"] for row in content["results"]] == ["r0", "r1"]
    assert len(content["results"][0]["reset"]["engines"]) == 2
    assert content["spec"]["reset"]["runningRequests"] == "RUNNING_REQUESTS_KEEP"


def test_every_flag_of_reset_reaches_the_replica(tmp_path: Path) -> None:
    fake = FakeSidecar("r0")
    with fleet(tmp_path, fake) as inventory:
        flags = ["--mode", "keep", "--connector", "--mm", "--encoder", "--reorder", "--quarantine"]
        kvctl(tmp_path, "reset", *flags, "--for", "weight-update", "--inventory", str(inventory))
        kvctl(tmp_path, "reset", "--wait-for-idle", "--inventory", str(inventory))
    first, second = fake.requests
    assert first.reset_connector
    assert first.reset_mm_cache
    assert first.reset_encoder_cache
    assert first.reorder_free_queue
    assert first.quarantine_running
    assert first.purpose == types_pb2.PURPOSE_WEIGHT_UPDATE  # type: ignore[attr-defined]
    assert second.wait_for_idle  # type: ignore[attr-defined]
    assert second.running_requests == types_pb2.RUNNING_REQUESTS_FAIL  # type: ignore[attr-defined]


def test_refused_everywhere_exits_1_and_says_why_and_what_next(tmp_path: Path) -> None:
    fakes = [FakeSidecar("r0"), FakeSidecar("r1")]
    for fake in fakes:
        fake.fail_with = [refused()]
    with fleet(tmp_path, *fakes) as inventory:
        done = kvctl(tmp_path, "reset", "--mode", "fail", "--inventory", str(inventory))
    assert done.returncode == 1
    assert "FAILED_PRECONDITION BLOCKS_HELD_BY_REQUESTS: r0, r1" in done.stdout
    assert "--mode keep" in done.stdout


def test_one_gone_replica_exits_3_and_the_others_are_done(tmp_path: Path) -> None:
    fake = FakeSidecar("r0")
    with fleet(tmp_path, fake, extra="- {name: gone, address: '127.0.0.1:1'}\n") as inventory:
        done = kvctl(tmp_path, "reset", "--mode", "keep", "--inventory", str(inventory))
    assert done.returncode == 3
    assert len(fake.effects) == 1
    assert "UNAVAILABLE REPLICA_UNREACHABLE: gone" in done.stdout


def test_every_replica_out_of_reach_exits_4(tmp_path: Path) -> None:
    done = kvctl(tmp_path, "reset", "--target", "127.0.0.1:1", "--timeout", "2s")
    assert done.returncode == 4
    assert "connection refused" in done.stdout


def test_a_deadline_that_passes_exits_5(tmp_path: Path) -> None:
    fake = FakeSidecar("r0")

    async def hang(kind: str) -> None:
        await asyncio.sleep(30)

    fake.before = hang
    with fleet(tmp_path, fake) as inventory:
        done = kvctl(tmp_path, "reset", "--inventory", str(inventory), "--timeout", "3s")
    assert done.returncode == 5


def test_a_repeated_request_id_has_one_effect(tmp_path: Path) -> None:
    fake = FakeSidecar("r0")
    same = ["--request-id", "11111111-2222-3333-4444-555555555555"]
    with fleet(tmp_path, fake) as inventory:
        for _ in range(2):
            assert kvctl(tmp_path, "reset", "--mode", "keep", "--inventory", str(inventory), *same).returncode == 0
    assert len(fake.effects) == 1


def test_names_of_replicas_that_did_it_go_to_stdout_and_the_others_to_stderr(tmp_path: Path) -> None:
    good, bad = FakeSidecar("good"), FakeSidecar("bad")
    bad.fail_with = [refused()]
    with fleet(tmp_path, good, bad) as inventory:
        done = kvctl(tmp_path, "reset", "--inventory", str(inventory), "-o", "name")
    assert done.stdout == "good\n"
    assert done.stderr.startswith("bad: FAILED_PRECONDITION")


def test_a_rolling_reset_goes_one_by_one_and_stops_at_the_first_failure(tmp_path: Path) -> None:
    fakes = [FakeSidecar(f"r{number}") for number in range(3)]
    fakes[1].fail_with = [refused()]
    with fleet(tmp_path, *fakes) as inventory:
        done = kvctl(tmp_path, "reset", "--rolling", "--inventory", str(inventory), "-o", "json")
    outcomes = {
        row["replica"]: row["outcome"].removeprefix("TARGET_OUTCOME_") for row in json.loads(done.stdout)["results"]
    }
    assert outcomes == {"r0": "SUCCEEDED", "r1": "FAILED", "r2": "SKIPPED"}
    assert done.returncode == 3


def test_reorder_relieve_and_scheduling_reach_the_replica(tmp_path: Path) -> None:
    fake = FakeSidecar("r0")
    with fleet(tmp_path, fake) as inventory:
        where = ["--inventory", str(inventory)]
        assert "contiguity 0.08 -> 1.00" in kvctl(tmp_path, "reorder", "--scope", "all-free", *where).stdout
        assert "gave back 84 blocks" in kvctl(tmp_path, "relieve", *where).stdout
        paused = kvctl(tmp_path, "scheduling", "pause", "--lease", "30s", "-o", "json", *where)
        pause_id = json.loads(paused.stdout)["operationId"]
        assert fake.leases
        resumed = kvctl(tmp_path, "scheduling", "resume", "--pause", pause_id, "--weight-version", "v2", *where)
    assert resumed.returncode == 0
    assert not fake.leases


# --- reading ---------------------------------------------------------------------------------------------------------


def test_admission_exits_1_when_an_engine_stalls_and_says_what_to_do(tmp_path: Path) -> None:
    fake = FakeSidecar("r0")
    with fleet(tmp_path, fake) as inventory:
        assert kvctl(tmp_path, "admission", "--inventory", str(inventory)).returncode == 0
        fake.stalled, fake.verdict = True, types_pb2.VERDICT_HELD_BLOCKS_DEADLOCK
        done = kvctl(tmp_path, "admission", "--inventory", str(inventory))
    assert done.returncode == 1
    assert "kvctl relieve --replicas r0" in done.stdout


def test_watching_admission_prints_a_json_line_a_sample_and_ends_well_at_ctrl_c(tmp_path: Path) -> None:
    with fleet(tmp_path, FakeSidecar("r0")) as inventory:
        process = subprocess.Popen(
            [*KVCTL, "admission", "--watch", "-o", "json", "--inventory", str(inventory)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(tmp_path),
        )  # fmt: skip
        assert process.stdout is not None
        line = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=30)
    assert line["replica"]["replica"] == "r0"
    assert (process.returncode, errors) == (0, "")


def test_replicas_lists_who_answers_and_who_does_not(tmp_path: Path) -> None:
    with fleet(tmp_path, FakeSidecar("r0"), extra="- {name: gone, address: '127.0.0.1:1'}\n") as inventory:
        done = kvctl(tmp_path, "replicas", "--inventory", str(inventory))
    assert done.returncode == 3
    assert "ready" in done.stdout
    assert "connection refused" in done.stdout


def test_top_without_a_terminal_prints_plain_lines(tmp_path: Path) -> None:
    with fleet(tmp_path, FakeSidecar("r0")) as inventory:
        done = kvctl(tmp_path, "top", "--once", "--inventory", str(inventory))
    assert done.returncode == 0
    assert "1 replica, 1 engine, 0 stalled" in done.stdout
    assert "\x1b" not in done.stdout


@pytest.mark.parametrize("how", ["q", "SIGTERM"])
def test_top_on_a_terminal_shows_a_screen_and_gives_it_back(tmp_path: Path, how: str) -> None:
    with fleet(tmp_path, FakeSidecar("r0")) as inventory:
        master, slave = pty.openpty()
        process = subprocess.Popen(
            [*KVCTL, "top", "--inventory", str(inventory), "--interval", "200ms"],
            stdin=slave, stdout=slave, stderr=slave, env=environment(tmp_path, TERM="xterm-256color"),
        )  # fmt: skip
        os.close(slave)
        shown = read_until(master, b"FLOWING", 30)
        if how == "q":
            os.write(master, b"q")
        else:
            process.terminate()
        given_back = read_until(master, b"\x1b[?1049l", 30)
        drain(master, process, 30)
        os.close(master)
    assert b"FLOWING" in shown
    assert b"\x1b[?1049l" in given_back
    assert process.returncode == 0


def read_until(master: int, wanted: bytes, timeout_s: float, seen: bytes = b"") -> bytes:
    until = time.monotonic() + timeout_s
    while wanted not in seen and time.monotonic() < until:
        ready, _, _ = select.select([master], [], [], 0.2)
        if ready:
            seen += os.read(master, 65536)
    return seen


def drain(master: int, process: subprocess.Popen[bytes], timeout_s: float) -> None:
    until = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < until:
        ready, _, _ = select.select([master], [], [], 0.1)
        if ready:
            try:
                os.read(master, 65536)
            except OSError:
                break
    process.wait(timeout=5)


def test_doctor_says_what_is_wrong_and_what_to_do(tmp_path: Path) -> None:
    with fleet(tmp_path, FakeSidecar("r0"), extra="- {name: gone, address: '127.0.0.1:1'}\n") as inventory:
        done = kvctl(tmp_path, "doctor", "--inventory", str(inventory), KVCTL_ENGINE_DIR=str(tmp_path / "engines"))
    assert done.returncode == 1
    flat = " ".join(done.stdout.split())
    assert "start kvctl-sidecar there, or mend the address" in flat
    assert "1 wrong" in done.stdout


# --- wrong input: one clear line -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["reset", "--mode", "soft", "--target", "127.0.0.1:1"], 2, "'soft' is not one of 'fail', 'preempt', 'keep'"),
        (["reset", "--mode", "keep", "--wait-for-idle", "--target", "h:1"], 2, "--wait-for-idle goes with --mode fail"),
        (["reset", "--mode", "keep", "--for", "weight-update", "--target", "h:1"], 2, "needs --quarantine"),
        (["reset", "--quarantine", "--target", "h:1"], 2, "--quarantine goes with --mode keep"),
        (["reset", "--canary", "1", "--target", "h:1"], 2, "--canary needs --rolling"),
        (["reset", "--rolling", "--canary", "99999999999", "--target", "h:1"], 2, "is not in the range"),
        (["reset", "--max-failures", "99999999999", "--target", "h:1"], 2, "is not in the range"),
        (
            ["reset", "--rolling", "--max-unavailable", "many", "--target", "127.0.0.1:1"],
            2,
            "max_unavailable is 'many'",
        ),
        (["reset", "--timeout", "soon", "--target", "h:1"], 2, "'soon' is not a duration"),
        (["reset", "--request-id", "7", "--target", "h:1"], 2, "'7' is not a UUID"),
        (["reset", "--target", "nowhere"], 2, "has no port"),
        (["reset", "--target", "http://h:1"], 2, "is a URL"),
        (["reset", "--target", f"unix:/tmp/{'x' * 120}"], 2, "Linux allows 107"),
        (["reset", "--inventory", "/no/such/file.yaml"], 2, "cannot be read: No such file"),
        (["reset", "--inventory", "f", "--target", "h:1"], 2, "name two fleets"),
        (["reset", "--cert", "c.pem", "--target", "h:1"], 2, "needs both a certificate file and a key file"),
        (["reset", "--ca", "/no/ca.pem", "--target", "h:1"], 2, "/no/ca.pem cannot be read"),
        (["reset"], 2, "no replicas to talk to"),
        (["reset", "--context", "prod"], 2, "there are none, make one with `kvctl config set-context"),
        (["config", "use-context", "prod"], 2, "there are none, make one with `kvctl config set-context"),
        (["rest"], 2, "did you mean 'reset'?"),
        (["admission", "--interval", "1s", "--target", "h:1"], 2, "--interval goes with --watch"),
        (["ops", "list", "--target", "127.0.0.1:1"], 2, "needs a coordinator"),
        (["reset", "--coordinator", "127.0.0.1:1"], 4, "connection refused"),
        (["reset", "--target", "dns:///no-such-name.invalid:1"], 4, "gives no address"),
        (["scheduling", "pause", "--target", "h:1"], 2, "Missing option '--lease'"),
    ],
)
def test_wrong_input_is_one_clear_line(tmp_path: Path, arguments: list[str], code: int, text: str) -> None:
    done = kvctl(tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (code, "")
    assert text in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("kvctl: ")


def test_an_unknown_replica_is_named_with_the_known_ones(tmp_path: Path) -> None:
    with fleet(tmp_path, FakeSidecar("r0")) as inventory:
        done = kvctl(tmp_path, "reset", "--replicas", "r9", "--inventory", str(inventory))
    assert (done.returncode, done.stderr) == (2, "kvctl: no replica matches 'r9'; known: r0\n")


# --- terminals, pipes, signals ---------------------------------------------------------------------------------------


def test_a_reader_that_goes_away_is_no_error(tmp_path: Path) -> None:
    fakes = [FakeSidecar(f"r{number:02}") for number in range(40)]
    with fleet(tmp_path, *fakes) as inventory:
        command = " ".join([*KVCTL, "reset", "--mode", "keep", "-o", "json", "--inventory", str(inventory)])
        script = f"{command} | head -c 20 >/dev/null; echo ${{PIPESTATUS[0]}}"
        done = subprocess.run(
            ["bash", "-c", script], capture_output=True, text=True, timeout=60, env=environment(tmp_path), check=False
        )
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_an_ascii_locale_gets_ascii_and_the_same_exit_code(tmp_path: Path) -> None:
    fake = FakeSidecar("r0")
    fake.fail_with = [refused()]
    fake.fail_with[0].message = "ブロック"
    with fleet(tmp_path, fake) as inventory:
        done = subprocess.run(
            [*KVCTL, "reset", "--inventory", str(inventory)],
            capture_output=True, timeout=60, env=environment(tmp_path, LC_ALL="C", PYTHONUTF8="0"), check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout.isascii()
    assert b"\\u30d6" in done.stdout


def test_ctrl_c_cancels_a_direct_operation_and_prints_what_is_known(tmp_path: Path) -> None:
    done_one, slow = FakeSidecar("r0"), FakeSidecar("r1")
    under_way = threading.Event()

    async def hang(kind: str) -> None:
        under_way.set()
        await asyncio.sleep(60)

    slow.before = hang
    with fleet(tmp_path, done_one, slow) as inventory:
        process = subprocess.Popen(
            [*KVCTL, "reset", "--mode", "keep", "--inventory", str(inventory), "-o", "json"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment(tmp_path),
        )  # fmt: skip
        assert under_way.wait(30)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)
    outcomes = {row["replica"]: row["outcome"] for row in json.loads(output)["results"]}
    assert outcomes["r0"] == "TARGET_OUTCOME_SUCCEEDED"
    assert outcomes["r1"] == "TARGET_OUTCOME_UNKNOWN"
    assert len(slow.cancelled) == 1
    assert process.returncode == 3
    assert "Traceback" not in errors
    assert f"stopping {json.loads(output)['operationId']}:" in errors
    assert "interrupted" in errors


def test_a_token_is_sent_and_never_printed(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret-token\n")
    token.chmod(0o600)
    fake = FakeSidecar("r0")
    with fleet(tmp_path, fake) as inventory:
        done = kvctl(tmp_path, "reset", "--inventory", str(inventory), "--token-file", str(token), "-o", "json")
    assert ("authorization", "Bearer s3cret-token") in fake.metadata
    assert "s3cret" not in done.stdout + done.stderr


def test_a_token_does_not_leave_the_machine_in_plain_text(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret-token\n")
    done = kvctl(tmp_path, "reset", "--target", "192.0.2.1:7700", "--token-file", str(token))
    assert done.returncode == 2
    assert "unencrypted" in done.stderr


# --- contexts, completion, hooks -------------------------------------------------------------------------------------


def test_contexts_can_be_made_chosen_and_used(tmp_path: Path) -> None:
    with fleet(tmp_path, FakeSidecar("r0")) as inventory:
        first = kvctl(tmp_path, "config", "set-context", "lab", "--inventory", str(inventory))
        assert (first.returncode, "the current one from now on" in first.stderr) == (0, True)
        more = kvctl(tmp_path, "config", "set-context", "prod", "--coordinator", "h:7710", "--ca", "c")
        assert (more.returncode, more.stderr) == (0, "context prod: coordinator h:7710\n")
        assert kvctl(tmp_path, "config", "use-context", "prod").returncode == 0
        listed = kvctl(tmp_path, "config", "get-contexts").stdout.splitlines()
        assert [line.split()[1] for line in listed if line.startswith("*")] == ["prod"]
        assert kvctl(tmp_path, "config", "get-contexts", "-o", "name").stdout == "lab\nprod\n"
        done = kvctl(tmp_path, "replicas", "--context", "lab", "-o", "name")
    assert done.stdout == "r0\n"
    assert (tmp_path / "config" / "kvctl" / "config.yaml").stat().st_mode & 0o077 == 0


def test_a_context_can_be_deleted_and_an_unknown_one_is_named_with_the_known_ones(tmp_path: Path) -> None:
    for name in ("lab", "prod"):
        kvctl(tmp_path, "config", "set-context", name, "--target", "127.0.0.1:1")
    other = kvctl(tmp_path, "config", "delete-context", "prod")
    assert (other.returncode, other.stderr) == (0, "context prod is forgotten\n")
    current = kvctl(tmp_path, "config", "delete-context", "lab")
    assert "no context is current now" in current.stderr
    assert kvctl(tmp_path, "config", "get-contexts", "-o", "name").stdout == ""
    assert "no replicas to talk to" in kvctl(tmp_path, "replicas").stderr
    unknown = kvctl(tmp_path, "config", "delete-context", "lab")
    assert (unknown.returncode, "no context 'lab'" in unknown.stderr) == (2, True)


def test_the_inventory_of_the_local_fleet_is_found_last(tmp_path: Path) -> None:
    with fleet(tmp_path, FakeSidecar("r0")) as inventory:
        home = tmp_path / "kvctl" / "local"
        home.mkdir(parents=True)
        (home / "inventory.yaml").write_text(inventory.read_text())
        assert kvctl(tmp_path, "replicas", "-o", "name").stdout == "r0\n"
        inventory.write_text("replicas: []")
        other = kvctl(tmp_path, "replicas", "-o", "name", KVCTL_INVENTORY=str(inventory))
    assert other.stdout == ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_script_of_each_shell_is_printed(tmp_path: Path, shell: str) -> None:
    done = kvctl(tmp_path, "completion", shell)
    assert "_KVCTL_COMPLETE" in done.stdout


def test_the_shell_completes_names_of_replicas_and_commands(tmp_path: Path) -> None:
    with fleet(tmp_path, FakeSidecar("prefill-0"), FakeSidecar("decode-0")) as inventory:
        found = kvctl(
            tmp_path,
            _KVCTL_COMPLETE="bash_complete",
            COMP_WORDS=f"kvctl reset --inventory {inventory} --replicas pre",
            COMP_CWORD="5",
        )
        commands = kvctl(tmp_path, _KVCTL_COMPLETE="bash_complete", COMP_WORDS="kvctl re", COMP_CWORD="1")
    assert found.stdout == "plain,prefill-0\n"
    assert [line.split(",")[1] for line in commands.stdout.splitlines()] == ["reset", "reorder", "relieve", "replicas"]


def test_the_pre_stop_hook_waits_for_requests_within_its_limit_and_never_fails_a_pod(tmp_path: Path) -> None:
    fake = FakeSidecar("r0")
    with fleet(tmp_path, fake) as inventory:
        address = yaml.safe_load(inventory.read_text())["replicas"][0]["address"]
        busy = kvctl(tmp_path, "hook", "pre-stop", "--sidecar", address, "--timeout", "1s")
        ready = kvctl(tmp_path, "hook", "post-start", "--sidecar", address, "--timeout", "10s")
        lost = kvctl(tmp_path, "hook", "post-start", "--sidecar", address, "--ca", "/no/ca.crt")
    gone = kvctl(tmp_path, "hook", "pre-stop", "--sidecar", "127.0.0.1:1", "--timeout", "20s")
    assert (busy.returncode, busy.stderr) == (0, "pre-stop: gave up after 1 s: 4 requests still run or wait\n")
    assert (ready.returncode, ready.stderr) == (0, "post-start: the sidecar r0 answers\n")
    assert (lost.returncode, gone.returncode) == (0, 0)
    assert "not waiting: CA file /no/ca.crt cannot be read" in lost.stderr
    assert "not waiting: 127.0.0.1:1: connection refused" in gone.stderr


async def test_the_pre_stop_hook_does_not_take_one_idle_moment_for_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = iter([0, 3, *[0] * 1000])
    monkeypatch.setattr(hooks, "requests", lambda _: next(seen))
    monkeypatch.setattr(hooks, "QUIET_S", 0.3)
    monkeypatch.setattr(hooks, "LOOK_EVERY_S", 0.05)
    async with serving(FakeSidecar("r0")) as (address,):
        assert await hooks.until_idle(address, ClientSecurity(), 10) == "no request runs or waits"
    assert next(seen) == 0, "the 3 requests after the first idle moment were seen"


# --- start-up --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["version"], ["--version"]])
def test_help_and_version_import_neither_grpc_nor_rich_nor_yaml(tmp_path: Path, arguments: list[str]) -> None:
    script = (
        "import sys\nfrom sidecar.cli.main import run\n"
        f"code = run({arguments!r})\n"
        "print(code, sorted({name.split('.')[0] for name in sys.modules} & {'grpc', 'rich', 'yaml', 'google'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        env=environment(tmp_path),
        timeout=60,
        check=False,
    )
    assert done.stdout.splitlines()[-1] == "0 []"


def test_every_command_shows_its_help_without_a_fleet(tmp_path: Path) -> None:
    from sidecar.cli.main import COMMANDS

    for name in COMMANDS:
        done = kvctl(tmp_path, name, "--help")
        assert done.returncode == 0
        assert done.stdout.startswith("Usage: kvctl ")


def test_a_port_that_is_held_by_nobody_can_be_told(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        done = kvctl(tmp_path, "replicas", "--target", f"127.0.0.1:{listener.getsockname()[1]}")
    assert done.returncode == 4
