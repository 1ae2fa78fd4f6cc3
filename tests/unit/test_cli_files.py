"""Files that flags name and that are not what they should be: one line, exit code 2, no call to anybody."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sidecar.cli.failures import Refusal
from sidecar.cli.main import run
from sidecar.cli.settings import load_config
from sidecar.coordinator import inventory
from sidecar.coordinator.inventory import InventoryError

DEEP = "[" * 20_000
TARGET = ["replicas", "--target", "127.0.0.1:1"]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run([*arguments]) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert "Errno" not in text
    return text


@pytest.mark.parametrize("content", ["hello", "-----BEGIN PRIVATE KEY-----\nMIIB\n-----END PRIVATE KEY-----\n"])
def test_a_ca_file_without_a_certificate_is_refused_before_any_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    file = tmp_path / "ca.pem"
    file.write_text(content)
    assert f"{file} contains no certificate" in refused(capsys, *TARGET, "--ca", str(file))


@pytest.mark.parametrize("flag", ["--ca", "--token-file"])
def test_a_missing_file_of_a_flag_is_a_usage_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flag: str
) -> None:
    assert "No such file" in refused(capsys, *TARGET, flag, str(tmp_path / "none"))


def test_a_malformed_dns_target_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert "is not a DNS target" in refused(capsys, "replicas", "--target", "dns:27710")


def test_a_missing_inventory_is_told_without_an_error_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "No such file" in refused(capsys, "replicas", "--inventory", str(tmp_path / "none"))


def test_an_inventory_nested_too_deeply_is_refused() -> None:
    with pytest.raises(InventoryError, match="nested too deeply"):
        inventory.parse_inventory(DEEP, "x.yaml")


def test_an_inventory_that_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InventoryError, match="not a regular file"):
        inventory.load_inventory(tmp_path / "pipe")


def test_an_inventory_that_is_too_large_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "large.yaml"
    with file.open("wb") as opened:
        opened.truncate(inventory.MAX_FILE_BYTES + 1)
    with pytest.raises(InventoryError, match="larger than 16 MiB"):
        inventory.load_inventory(file)


def test_a_config_nested_too_deeply_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(DEEP)
    with pytest.raises(Refusal, match="nested too deeply"):
        load_config(file)


def test_a_config_that_is_no_regular_file_or_too_large_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="not a regular file"):
        load_config(tmp_path)
    file = tmp_path / "config.yaml"
    with file.open("wb") as opened:
        opened.truncate(inventory.MAX_FILE_BYTES + 1)
    with pytest.raises(Refusal, match="larger than 16 MiB"):
        load_config(file)
