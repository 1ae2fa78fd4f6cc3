"""The pool of channels: within its limit, never closing what is in use, taking up replaced certificates."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import grpc
import grpc.aio
import pytest

from sidecar.coordinator import channels as pool
from sidecar.coordinator import outcomes
from sidecar.coordinator.channels import Channels
from sidecar.coordinator.targets import Target
from sidecar.rpc.channels import ClientSecurity
from sidecar.rpc.tls import ClientTls
from tests.security.certificates import Authority

ROOT = Path(__file__).parents[2]


def target(number: int) -> Target:
    return Target(f"127.0.0.1:{10_000 + number}")


async def test_one_address_has_one_channel() -> None:
    channels = Channels(limit=4)
    async with channels.lease(target(1)) as first, channels.lease(target(1)) as second:
        assert first is second
    await channels.close()


async def test_the_longest_idle_channel_is_closed_first_and_one_in_use_never() -> None:
    channels = Channels(limit=2)
    async with channels.lease(target(0)) as used:
        for number in range(1, 5):
            async with channels.lease(target(number)):
                pass
        assert len(channels) == 2
        async with channels.lease(target(0)) as again:
            assert again is used
    await channels.close()


async def test_a_replaced_certificate_gives_a_new_channel_and_leaves_the_one_in_use(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "first")
    channels = Channels(ClientSecurity(tls=ClientTls(ca_file=authority.file)), limit=4)
    async with channels.lease(target(0)) as before:
        authority.file.write_bytes(Authority(tmp_path, "second").file.read_bytes())
        async with channels.lease(target(0)) as after:
            assert after is not before
        assert before.get_state() != grpc.ChannelConnectivity.SHUTDOWN
    assert before.get_state() == grpc.ChannelConnectivity.SHUTDOWN
    await channels.close()


async def test_a_certificate_that_is_half_written_or_before_its_key_leaves_the_channel_in_use(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    shown, other = authority.issue("shown"), authority.issue("other")
    channels = Channels(ClientSecurity(tls=ClientTls(authority.file, shown.cert, shown.key)), limit=4)
    async with channels.lease(target(0)) as before:
        pass
    for content in (other.cert.read_bytes()[:100], b"", other.cert.read_bytes()):
        shown.cert.write_bytes(content)
        async with channels.lease(target(0)) as meanwhile:
            assert meanwhile is before
    shown.key.write_bytes(other.key.read_bytes())
    async with channels.lease(target(0)) as after:
        assert after is not before
    await channels.close()


@pytest.mark.parametrize(
    ("limit", "expected"), [(1024, str(1024 - pool.RESERVED_DESCRIPTORS)), (100, "16"), (40, "at least 64")]
)
def test_the_pool_fits_the_limit_of_open_files(limit: int, expected: str) -> None:
    script = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({limit}, {limit}))\n"
        "from sidecar.coordinator.channels import channel_limit\n"
        "try:\n    print(channel_limit())\nexcept OSError as error:\n    print(error)\n"
    )
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto' / 'gen'}"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=paths, check=False)
    assert expected in done.stdout


def test_a_low_limit_is_raised_as_far_as_it_may_be() -> None:
    script = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 2000))\n"
        "from sidecar.coordinator.channels import channel_limit\n"
        "print(channel_limit(), resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    paths = {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto' / 'gen'}"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=paths, check=False)
    assert done.stdout.split() == [str(2000 - pool.RESERVED_DESCRIPTORS), "2000"]
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= 2000


# --- what gRPC's own errors come to ----------------------------------------------------------------------------------

REFUSED = (
    "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: "
    "Failed to connect to remote host: Connection refused"
)
HTTP1 = (
    "failed to connect to all addresses; last error: INTERNAL: ipv4:127.0.0.1:8000: Failed parsing HTTP/2 (Expected "
    "SETTINGS frame as the first frame, got frame type 80) (Trying to connect an http1.x server (HTTP status 400))"
)


@pytest.mark.parametrize(
    ("code", "text", "reason", "words"),
    [
        ("UNAVAILABLE", REFUSED, "REPLICA_UNREACHABLE", "connection refused"),
        ("UNAVAILABLE", HTTP1, "NOT_A_SIDECAR", "vLLM's own port"),
        ("UNAVAILABLE", "Received http2 header with status: 503", "NOT_A_SIDECAR", "HTTP status 503"),
        ("UNIMPLEMENTED", "Method not found!", "NOT_A_SIDECAR", "does not serve"),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", "REPLICA_UNREACHABLE", "no answer from a:1 within 5 s"),
        ("UNAVAILABLE", "errors resolving x:70: Domain name not found", "REPLICA_UNREACHABLE", "cannot be resolved"),
        ("UNAVAILABLE", "Ssl handshake failed: CERTIFICATE_VERIFY_FAILED", "REPLICA_UNREACHABLE", "TLS handshake"),
        ("UNAVAILABLE", "recvmsg:Connection reset by peer (104)", "REPLICA_UNREACHABLE", "connection reset by peer"),
    ],
)
def test_errors_of_the_transport_are_told_in_words(code: str, text: str, reason: str, words: str) -> None:
    told = outcomes.unreachable(outcomes.Failure(code, "", text), "a:1", 5.0)
    assert (told.code, told.reason) == ("UNAVAILABLE", reason)
    assert words in told.message


def test_a_coordinator_where_a_sidecar_is_expected_is_told_with_where_it_belongs() -> None:
    told = outcomes.unreachable(outcomes.Failure("UNIMPLEMENTED", "METHOD_NOT_SERVED", "not served here"), "a:1", 5.0)
    assert (told.code, told.reason) == ("UNAVAILABLE", "NOT_A_SIDECAR")
    assert "--coordinator" in told.message


@pytest.mark.parametrize("code", ["UNAVAILABLE", "DEADLINE_EXCEEDED", "INTERNAL", "UNKNOWN", "CANCELLED"])
def test_a_call_that_may_have_been_sent_is_unknown_and_one_that_was_not_is_not_executed(code: str) -> None:
    from kvctl.v1 import fleet_pb2, types_pb2

    lost = outcomes.of_failure(outcomes.Failure(code, "", "Socket closed"), sent=True)
    assert lost.outcome == fleet_pb2.TARGET_OUTCOME_UNKNOWN
    never = outcomes.of_failure(outcomes.Failure("UNAVAILABLE", "", REFUSED), sent=True)
    assert (never.outcome, never.execution) == (
        fleet_pb2.TARGET_OUTCOME_UNREACHABLE,
        types_pb2.EXECUTION_NOT_EXECUTED,
    )
