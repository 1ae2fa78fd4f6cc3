"""Settings of kvctl-sidecar: one table, one precedence, errors that name their layer."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from sidecar.coordinator import config as coordinator
from sidecar.replica import config as settings
from sidecar.replica.config import load
from sidecar.replica.service import ACCESS
from sidecar.rpc.auth import Role
from sidecar.rpc.settings import ConfigError


def write(tmp_path, text):
    path = tmp_path / "sidecar.yaml"
    path.write_text(text)
    return str(path)


def test_flags_win_over_the_environment_over_the_file_over_defaults(tmp_path):
    path = write(tmp_path, "name: from-file\ngrace: 3s\nlog_level: error\n")
    env = {"KVCTL_SIDECAR_NAME": "from-env", "KVCTL_SIDECAR_GRACE": "4s"}
    config = load(["--config", path, "--name", "from-flag"], env)
    assert (config.name, config.grace, config.log_level, config.log_format) == ("from-flag", 4.0, "error", "logfmt")


def test_every_setting_can_be_given_in_every_layer(tmp_path):
    values = {
        "name": "x",
        "labels": "a=b",
        "engine_dir": str(tmp_path),
        "engine_url": "http://127.0.0.1:8000",
        "engine_token_file": "/t",
        "engine_ca": "/c",
        "listen": "127.0.0.1:1",
        "metrics": "off",
        "tls_cert": "/c",
        "tls_key": "/k",
        "tls_client_ca": "/a",
        "client_role": "coordinator=admin",
        "token_file": "viewer=/t",
        "insecure": "true",
        "expect_engines": "2",
        "audit_log": "/l",
        "log_format": "json",
        "log_level": "debug",
        "grace": "1s",
        "max_calls": "7",
        "stall_after": "3s",
        "hung_after": "5m",
        "ready_file": "/r",
    }
    assert values.keys() == settings._TABLE.keys()
    flags = []
    for name, value in values.items():
        flag = f"--{name.replace('_', '-')}"
        flags += [flag] if value == "true" else [flag, value]
    by_flag = load(flags, {})
    by_env = load([], {f"KVCTL_SIDECAR_{name.upper()}": value for name, value in values.items()})
    by_file = load(["--config", write(tmp_path, "".join(f"{n}: {v!r}\n" for n, v in values.items()))], {})
    assert by_flag == by_env == by_file
    assert by_flag.client_role == {"coordinator": Role.ADMIN}


def test_a_hung_threshold_below_the_stall_threshold_is_refused():
    with pytest.raises(ConfigError, match="--hung-after 4 s"):
        load(["--stall-after", "10s", "--hung-after", "4s"], {})
    with pytest.raises(ConfigError, match="1 s or more"):
        load(["--stall-after", "100ms"], {})


def test_lists_and_mappings_in_the_file(tmp_path):
    path = write(tmp_path, "labels: {pool: a, zone: z}\nlisten: ['127.0.0.1:1', 'unix:/tmp/x']\n")
    config = load(["--config", path], {})
    assert config.labels == {"pool": "a", "zone": "z"}
    assert [str(address) for address in config.listen] == ["127.0.0.1:1", "unix:/tmp/x"]


def test_words_of_yaml_in_a_mapping_are_what_a_flag_would_say(tmp_path):
    path = write(tmp_path, "labels: {canary: true, drained: no, zone: }")
    assert load(["--config", path], {}).labels == {"canary": "true", "drained": "false", "zone": ""}


def test_a_setting_that_is_given_twice_names_both_lines(tmp_path):
    path = write(tmp_path, "token_file: admin=a\nname: r\ntoken_file: viewer=b")
    with pytest.raises(ConfigError, match="line 3: token_file is given before, in line 1"):
        load(["--config", path], {})


def test_an_unknown_key_names_its_line(tmp_path):
    path = write(tmp_path, "name: x\n\ntoken_flie: admin=/t\n")
    with pytest.raises(ConfigError, match=r"line 3: token_flie is not a setting"):
        load(["--config", path], {})


def test_a_misspelt_variable_is_an_error():
    with pytest.raises(ConfigError, match="KVCTL_SIDECAR_TOKEN_FLIE"):
        load([], {"KVCTL_SIDECAR_TOKEN_FLIE": "admin=/t"})


@pytest.mark.parametrize(
    "name",
    ["PORT", "SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_GRPC", "PORT_7700_TCP", "PORT_7700_TCP_ADDR", "X_PORT"],
)
def test_service_links_are_left_alone(name):
    load([], {f"KVCTL_SIDECAR_{name}": "tcp://10.0.0.1:7700"})


def test_the_layer_of_a_bad_value_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"^KVCTL_SIDECAR_LISTEN: "):
        load([], {"KVCTL_SIDECAR_LISTEN": "x"})
    with pytest.raises(ConfigError, match=r"^--listen: "):
        load(["--listen", "x"], {})
    path = write(tmp_path, "listen: x\n")
    with pytest.raises(ConfigError, match=r"sidecar\.yaml: listen: "):
        load(["--config", path], {})


@pytest.mark.parametrize("text", ["- a\n", "name: [1, 2]\n", "name: {a: b}\n", "a: b: c\n", "\x00"])
def test_a_malformed_file_is_one_sentence(tmp_path, text):
    with pytest.raises(ConfigError) as caught:
        load(["--config", write(tmp_path, text)], {})
    assert "\n" not in str(caught.value)


def test_the_engine_directory_falls_back_to_the_engines_own_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCTL_ENGINE_DIR", str(tmp_path))
    assert load([], {}).engine_dir == tmp_path


def test_an_empty_variable_is_as_if_it_were_not_set():
    assert load([], {"KVCTL_SIDECAR_GRACE": ""}).grace == 20.0


def test_an_empty_engine_directory_is_not_the_folder_one_stands_in():
    with pytest.raises(ConfigError, match="--engine-dir: no directory"):
        load(["--engine-dir", ""], {})


PROGRAMS = [load, lambda words, env: coordinator.load(["--targets", "127.0.0.1:1", *words], env)]


@pytest.mark.parametrize("load", PROGRAMS, ids=["sidecar", "coordinator"])
def test_a_server_without_an_address_is_refused(load, tmp_path):
    with pytest.raises(ConfigError, match="listen: no address is given"):
        load(["--config", write(tmp_path, "listen: []\n")], {})


@pytest.mark.parametrize("load", PROGRAMS, ids=["sidecar", "coordinator"])
@pytest.mark.parametrize("word", ["off", '"off"', '""'])
def test_metrics_are_switched_off_in_a_file_by_the_word_of_the_documentation(load, word, tmp_path):
    assert load(["--config", write(tmp_path, f"metrics: {word}\n")], {}).metrics is None


def test_a_list_variable_with_nothing_in_it_does_not_switch_off_the_tokens_of_the_file(tmp_path):
    path = write(tmp_path, "token_file: viewer=/tokens\n")
    with pytest.raises(ConfigError, match="KVCTL_SIDECAR_TOKEN_FILE=',' has nothing in it"):
        load(["--config", path], {"KVCTL_SIDECAR_TOKEN_FILE": ","})


@pytest.mark.parametrize("load", PROGRAMS, ids=["sidecar", "coordinator"])
def test_listen_and_metrics_on_one_port_fail_early(load):
    with pytest.raises(ConfigError, match="different ports"):
        load(["--listen", "[::]:7700", "--metrics", "127.0.0.1:7700"], {})
    with pytest.raises(ConfigError, match="twice"):
        load(["--listen", "127.0.0.1:7700", "--listen", "127.0.0.1:7700"], {})


@pytest.mark.parametrize("load", PROGRAMS, ids=["sidecar", "coordinator"])
def test_a_unix_socket_where_only_certificates_count_is_refused_with_what_to_do(load):
    words = ["--listen", "unix:/run/kvctl/api.sock", "--listen", "127.0.0.1:7700"]
    mutual = ["--tls-cert", "/c", "--tls-key", "/k", "--tls-client-ca", "/a"]
    with pytest.raises(ConfigError, match=r"--listen unix:/run/kvctl/api\.sock: .* add --token-file ROLE=FILE"):
        load([*words, *mutual], {})
    load([*words, *mutual, "--token-file", "admin=/t"], {})
    load([*words, *mutual[:4]], {})


def test_the_documentation_names_every_setting_and_every_role_as_they_are():
    text = (Path(__file__).resolve().parents[2] / "docs" / "sidecar.md").read_text()
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    documented = {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)}
    assert documented == set(settings._TABLE)
    for method, role in ACCESS.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| {role.name.lower()} |"))
        assert f"`{method.rpartition('/')[2]}`" in row


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--label", "a=1", "--label", "a=2"], "label 'a' is given twice: '1' and '2'"),
        (["--label", "ä=1"], "label key 'ä'"),
        (["--label", "a=ü"], "value 'ü' of label 'a'"),
        (["--label", "a" * 254 + "=1"], "(254 characters) is not one"),
        (["--label", "a=" + "b" * 254], "(254 characters) of label 'a'"),
        (["--name", "r\u0660"], "is not a replica name"),
        (["--name", "all"], "'all' means every replica"),
        (["--grace", "\u0661s"], "is not a duration"),
        (["--grace", "\uff15s"], "is not a duration"),
    ],
)
def test_a_label_name_or_duration_that_others_could_not_use_is_refused(words, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        load(words, {})


def test_labels_of_ordinary_kinds_are_taken():
    words = ["--label", "app.kubernetes.io/name=vllm-0.32_a", "--label", "empty="]
    assert load(words, {}).labels == {"app.kubernetes.io/name": "vllm-0.32_a", "empty": ""}


def test_a_long_value_is_cut_in_the_error():
    with pytest.raises(ConfigError) as caught:
        load(["--name", "x" * 5000], {})
    assert len(str(caught.value)) < 300
    assert "(5000 characters)" in str(caught.value)


def test_a_file_nested_deeply_is_told_in_one_line(tmp_path):
    path = write(tmp_path, "labels: " + "[" * 3000)
    with pytest.raises(ConfigError, match=f"^--config {path}: nested too deeply$"):
        load(["--config", path], {})


def test_a_file_without_an_end_is_not_read(tmp_path):
    with pytest.raises(ConfigError, match="/dev/zero is not a regular file"):
        load(["--config", "/dev/zero"], {})
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe is not a regular file"):
        load(["--config", str(tmp_path / "pipe")], {})
    with (tmp_path / "large.yaml").open("wb") as file:
        file.truncate(17 << 20)
    with pytest.raises(ConfigError, match=r"large.yaml is larger than 16 MiB"):
        load(["--config", str(tmp_path / "large.yaml")], {})
