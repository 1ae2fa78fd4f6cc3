"""Which fleet a command talks to."""

from __future__ import annotations

from pathlib import Path

import pytest

from sidecar.cli.commands.config import set_context
from sidecar.cli.failures import Refusal
from sidecar.cli.options import Duration
from sidecar.cli.settings import Config, Settings, choose, config_path, load_config, local_inventory_path, save_config


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KVCTL_CONFIG", "KVCTL_INVENTORY", "KVCTL_COORDINATOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def contexts(**found: Settings) -> None:
    save_config(Config(config_path(), next(iter(found)), found))


def test_flags_go_before_environment_before_context_before_the_local_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Refusal, match="no replicas to talk to"):
        choose(Settings())
    local_inventory_path().parent.mkdir(parents=True)
    local_inventory_path().write_text("replicas: []")
    assert choose(Settings()).inventory == str(local_inventory_path())
    contexts(lab=Settings(targets=("a:1",), token_file="t"))
    assert choose(Settings()).targets == ("a:1",)
    monkeypatch.setenv("KVCTL_INVENTORY", "/env.yaml")
    assert choose(Settings()).inventory == "/env.yaml"
    assert choose(Settings(coordinator="c:1")).coordinator == "c:1"
    assert choose(Settings(), "lab").targets == ("a:1",)


def test_a_context_lends_its_security_and_a_flag_replaces_a_single_value() -> None:
    contexts(prod=Settings(coordinator="c:1", ca="ca.pem", token_file="t"))
    assert choose(Settings(token_file="other")) == Settings(coordinator="c:1", ca="ca.pem", token_file="other")
    there = choose(Settings(targets=("a:1",)), "prod")
    assert (there.coordinator, there.targets, there.ca) == ("", ("a:1",), "ca.pem")


def test_flags_that_name_a_fleet_do_not_send_a_contexts_token_there() -> None:
    contexts(prod=Settings(coordinator="c:1", token_file="secret"))
    assert choose(Settings(targets=("elsewhere:1",))).token_file == ""


def test_what_is_saved_is_what_is_loaded() -> None:
    found = {
        "lab": Settings(inventory="/x", insecure=True, source="context lab"),
        "b": Settings(targets=("a:1", "b:2"), source="context b"),
    }
    save_config(Config(config_path(), "b", found))
    loaded = load_config(config_path())
    assert (loaded.current, loaded.contexts) == ("b", found)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("contexts: [", "this is not YAML"),
        ("a: b", "expected the keys current-context and contexts"),
        ("contexts: {a: b}", "contexts is not a list"),
        ("contexts: [{coordinator: x}]", "context 1 has no name"),
        ("contexts: [{name: a, coordinater: x}]", "key 'coordinater' is not known"),
        ("contexts: [{name: a, targets: x}]", "targets is not a list"),
        ("contexts: [{name: a, insecure: 'yes'}]", "insecure is 'yes'"),
    ],
)
def test_a_config_that_makes_no_sense_is_one_line(text: str, words: str) -> None:
    config_path().parent.mkdir(parents=True, exist_ok=True)
    config_path().write_text(text)
    with pytest.raises(Refusal, match=words):
        load_config(config_path())


@pytest.mark.parametrize(
    ("text", "expected"), [("500ms", 0.5), ("30s", 30.0), ("2m", 120.0), ("1h", 3600.0), ("1.5", 1.5), (" 3 s ", 3.0)]
)
def test_durations_have_units(text: str, expected: float) -> None:
    assert Duration().convert(text, None, None) == expected


def test_the_flags_that_lead_back_to_a_coordinator_carry_the_credentials_of_its_context() -> None:
    context = Settings(coordinator="c:1", ca="a ca.pem", token_file="t", server_name="s", insecure=True)
    assert context.coordinator_flags == [
        *("--coordinator", "c:1", "--ca", "a ca.pem", "--token-file", "t", "--server-name", "s"),
        "--insecure",
    ]
    contexts(prod=context)
    assert choose(Settings(coordinator="c:1")).token_file == ""


def test_a_context_has_a_name_and_means_the_same_files_wherever_it_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Refusal, match="name of the context is empty"):
        set_context.main(["", "--coordinator", "c:1"], standalone_mode=False)
    assert not config_path().exists()
    set_context.main(["lab", "--inventory", "fleet.yaml", "--token-file", "/run/token"], standalone_mode=False)
    made = load_config(config_path()).contexts["lab"]
    assert (made.inventory, made.token_file) == (str(tmp_path / "fleet.yaml"), "/run/token")
