"""Certificates that are replaced again and again while operations run: nobody notices."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from kvctl.v1 import fleet_pb2

from sidecar.rpc.channels import ClientSecurity
from sidecar.rpc.tls import ClientTls
from tests.contract.sidecar_process import wait_until
from tests.robustness.recorded_fleet import LONG_S, RecordedFleet, recorded_fleet
from tests.security.certificates import Authority, Pair

ROTATIONS = 20


@dataclass
class Mounted:
    """A certificate and its key as Kubernetes mounts a Secret: `live` is a symlink that is swapped."""

    authority: Authority
    name: str
    serial: int = 0

    def __post_init__(self) -> None:
        self.live = self.authority.directory / self.name
        self.cert, self.key = self.live / "tls.crt", self.live / "tls.key"
        self._issued = 0
        self.swap()

    def swap(self) -> None:
        """Both files at once."""
        fresh = self._issue()
        folder = self.authority.directory / f"{self.name}-{self._issued}"
        folder.mkdir()
        (folder / "tls.crt").write_bytes(fresh.cert.read_bytes())
        (folder / "tls.key").write_bytes(fresh.key.read_bytes())
        link = self.authority.directory / f"{self.name}.next"
        link.symlink_to(folder.name)
        link.replace(self.live)

    def rewrite(self, in_between: Callable[[], None]) -> None:
        """One file after the other, in place, half of the first to begin with."""
        fresh = self._issue()
        whole = fresh.cert.read_bytes()
        for content in (whole[: len(whole) // 2], whole):
            self.cert.write_bytes(content)
            in_between()
        self.key.write_bytes(fresh.key.read_bytes())

    def _issue(self) -> Pair:
        self._issued += 1
        pair = self.authority.issue(self.name, f"{self.name}-issued-{self._issued}")
        self.serial = pair.serial
        return pair


@contextmanager
def fleet_with_tls(authority: Authority, server: Mounted, client: Mounted) -> Iterator[RecordedFleet]:
    tester = authority.issue("tester")
    admits = ["--tls-cert", str(server.cert), "--tls-key", str(server.key), "--tls-client-ca", str(authority.file)]
    shows = ["--replica-ca", str(authority.file), "--replica-cert", str(client.cert), "--replica-key", str(client.key)]
    with recorded_fleet(
        replicas=1,
        sidecar_arguments=[*admits, "--client-role", f"{client.name}=operator"],
        coordinator_arguments=shows,
        security=ClientSecurity(ClientTls(authority.file, tester.cert, tester.key)),
    ) as fleet:
        yield fleet


def test_certificates_of_both_sides_are_replaced_twenty_times_under_load_without_a_failed_call(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    server, client = Mounted(authority, "replica"), Mounted(authority, "coordinator")
    with fleet_with_tls(authority, server, client) as fleet:
        fleet.new_run(floor=2)
        fleet.load(2)
        done = threading.Semaphore(0)
        replaced: list[int] = []

        def operations_pass() -> None:
            """At least one begins and ends."""
            while done.acquire(blocking=False):
                pass
            for _ in range(2):
                assert done.acquire(timeout=LONG_S), "the load has stopped"

        def replace_them() -> None:
            for turn in range(ROTATIONS):
                for mounted in (server, client):
                    if turn % 4 == 3:
                        mounted.rewrite(operations_pass)
                    else:
                        mounted.swap()
                    operations_pass()
                replaced.append(turn)

        replacing = threading.Thread(target=replace_them, daemon=True)
        fleet.fault("replace certificates", "r0 and coordinator")
        replacing.start()
        while replacing.is_alive():
            ended = fleet.run()
            assert ended.state == fleet_pb2.OPERATION_STATE_SUCCEEDED, ended
            assert [row.attempts for row in ended.results] == [1], ended
            done.release()
        assert len(replaced) == ROTATIONS
        sidecar = fleet.replicas["r0"].sidecar
        wait_until(lambda: served_serial(sidecar.address, authority, client) == server.serial, LONG_S, sidecar.log)
        fleet.load(1)
        fleet.check()


def served_serial(address: str, authority: Authority, client: Mounted) -> int:
    """Serial number of the certificate that a fresh handshake shows."""
    context = ssl.create_default_context(cafile=str(authority.file))
    context.set_alpn_protocols(["h2"])
    context.load_cert_chain(client.cert, client.key)
    host, _, port = address.rpartition(":")
    with (
        socket.create_connection((host, int(port)), timeout=LONG_S) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as wrapped,
    ):
        shown = wrapped.getpeercert(binary_form=True)
    assert shown is not None
    return x509.load_der_x509_certificate(shown).serial_number
