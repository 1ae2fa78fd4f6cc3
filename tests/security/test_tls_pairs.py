"""A certificate and a key that do not fit are told by their files, before gRPC can blame the port."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sidecar.coordinator import main as coordinator
from sidecar.replica import main as replica
from sidecar.rpc.tls import ClientTls, ServerTls, check_pair
from tests.security.certificates import Authority, Pair

GARBAGE = "-----BEGIN CERTIFICATE-----\nbm90IGEgY2VydGlmaWNhdGU=\n-----END CERTIFICATE-----\n"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def pair(authority: Authority) -> Pair:
    return authority.issue("sidecar")


def test_a_pair_that_belongs_together_is_taken(authority: Authority, pair: Pair):
    ServerTls(pair.cert, pair.key, authority.file).credentials()
    ClientTls(authority.file, pair.cert, pair.key).check()


def test_the_key_of_another_certificate_is_told_by_both_files(authority: Authority, pair: Pair):
    other = authority.issue("other")
    with pytest.raises(ValueError, match=f"^key {other.key} does not belong to certificate {pair.cert}$"):
        ServerTls(pair.cert, other.key).credentials()
    with pytest.raises(ValueError, match="does not belong to certificate"):
        ClientTls(None, pair.cert, other.key).check()


def test_what_is_no_certificate_is_told_by_its_file(tmp_path: Path, authority: Authority, pair: Pair):
    bad = tmp_path / "bad.crt"
    bad.write_text(GARBAGE)
    with pytest.raises(ValueError, match=f"{bad} contains no certificate"):
        ServerTls(bad, pair.key).credentials()
    with pytest.raises(ValueError, match=f"client CA file {bad} contains no certificate"):
        ServerTls(pair.cert, pair.key, bad).credentials()
    with pytest.raises(ValueError, match=f"CA file {bad} contains no certificate"):
        ClientTls(bad).check()


def test_what_is_no_key_is_told_by_its_file(tmp_path: Path, pair: Pair):
    bad = tmp_path / "bad.key"
    bad.write_text(GARBAGE.replace("CERTIFICATE", "PRIVATE KEY"))
    with pytest.raises(ValueError, match=f"key file {bad} contains no usable private key"):
        check_pair(pair.cert, bad)


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("program", ["sidecar", "coordinator"])
def test_a_server_ends_with_2_and_one_line(tmp_path, authority, pair, program, check, monkeypatch, capsys):
    other = authority.issue("other")
    words = ["--tls-cert", str(pair.cert), "--tls-key", str(other.key), "--listen", "127.0.0.1:0", "--metrics", "off"]
    if program == "sidecar":
        words += ["--engine-dir", str(tmp_path / "engines")]
    else:
        words += ["--targets", "127.0.0.1:1", "--store", str(tmp_path / "ops.db")]
    main = replica if program == "sidecar" else coordinator
    monkeypatch.setattr("sys.argv", [program, *words, *(["--check"] if check else [])])
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], "HOME": str(tmp_path)})
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert main.main() == 2
    told = capsys.readouterr().err.strip()
    assert told.splitlines()[-1] == f"kvctl-{program}: key {other.key} does not belong to certificate {pair.cert}"
