"""Every kvctl command that an alert, a runbook, a hook or the installation page names is one that kvctl takes."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import grpc
import kubernetes_validate
import pytest
import yaml
from apiserver import CRD
from crd_validation import admit
from kvctl.v1 import errors_pb2, fleet_pb2, replica_pb2, types_pb2

from deploy.observability.alerts import ALERTS
from sidecar.cli.main import cli
from sidecar.coordinator.config import Config

ROOT = Path(__file__).resolve().parents[2]
HOOKS = ROOT / "deploy/hooks"
RECORDED = Path(__file__).parent / "recorded"
PAGES = [*sorted((ROOT / "docs/runbooks").glob("*.md")), ROOT / "docs/install.md", HOOKS / "README.md"]
COMMAND = re.compile(r"`(kvctl [^`]+)`|^ {4}(?:\$ )?(kvctl [^\n]+)$", re.MULTILINE)


def commands_in(text: str) -> list[str]:
    text = text.replace("{{ or $labels.pod $labels.instance }}", "POD")
    found = [a or b for a, b in COMMAND.findall(text)]
    return [re.sub(r"\s*(#|;|&&|\|).*", "", command) for command in found]


def documented() -> list[tuple[str, str]]:
    found = [(page.name, command) for page in PAGES if page.is_file() for command in commands_in(page.read_text())]
    found += [
        (alert.name, command) for alert in ALERTS for command in commands_in(f"{alert.first_step} {alert.remedy}")
    ]
    return sorted(set(found))


def parse(words: list[str]) -> None:
    """Let click read a command line to its end without running it."""
    context = click.Context(cli, info_name="kvctl")
    command: click.Command = cli
    while isinstance(command, click.Group) and words:
        name, found, words = command.resolve_command(context, words)
        assert found is not None, name
        command = found
    if not isinstance(command, click.Group):  # a bare group's name only leads to its help
        command.make_context(command.name, list(words), parent=context)


@pytest.mark.parametrize(("where", "command"), documented(), ids=str)
def test_a_documented_command_is_one_that_kvctl_takes(where: str, command: str) -> None:
    try:
        parse(shlex.split(command)[1:])
    except (click.UsageError, click.exceptions.Exit) as error:
        pytest.fail(f"{where}: `{command}`: {error}")


def test_runbooks_and_alerts_do_name_commands() -> None:
    assert len(documented()) > 40


def test_a_command_that_kvctl_does_not_take_would_be_caught() -> None:
    with pytest.raises(click.UsageError):
        parse(["reset", "--no-such-option"])


ELSEWHERE = {
    "kvctl-coordinator": {"--store"},
    "vLLM": {"--enforce-eager", "--gpu-memory-utilization", "--max-model-len", "--max-num-seqs"},
}
"""Options that runbooks name and that are not kvctl's."""


def advice() -> list[tuple[str, str]]:
    """(where, text) of all that somebody reads whom an alert has called."""
    pages = [(page.name, page.read_text()) for page in (ROOT / "docs/runbooks").glob("*.md")]
    return pages + [(alert.name, f"{alert.first_step} {alert.remedy}") for alert in ALERTS]


def options(command: click.Command, context: click.Context) -> list[click.Parameter]:
    """Of a command and all below it."""
    found = list(command.params)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            found += options(below, context)
    return found


def takes(option: click.Parameter, value: str) -> bool:
    if getattr(option, "is_flag", False):
        return False
    try:
        option.type.convert(value, option, None)
    except click.BadParameter:
        return False
    return True


def test_a_documented_option_is_one_that_some_command_takes_with_that_value() -> None:
    known = options(cli, click.Context(cli, info_name="kvctl"))
    named = {(where, found) for where, text in advice() for found in re.findall(r"`(--[a-z][^`]*)`", text)}
    assert len(named) > 10
    for where, text in sorted(named):
        option, _, value = text.partition(" ")
        if any(option in theirs for theirs in ELSEWHERE.values()):
            continue
        of_that_name = [one for one in known if option in one.opts]
        assert of_that_name, f"{where}: no command has {option}"
        assert not value or any(takes(one, value) for one in of_that_name), f"{where}: {text} is not taken"
    assert "store" in {one.name for one in fields(Config)}


def test_a_documented_reason_state_or_verdict_is_one_that_is_sent() -> None:
    files = (errors_pb2, types_pb2, replica_pb2, fleet_pb2)
    enums = [enum for file in files for enum in file.DESCRIPTOR.enum_types_by_name.values()]
    sent = {value for enum in enums for value in enum.values_by_name}
    sent |= {code.name for code in grpc.StatusCode}
    for where, text in advice():
        for word in re.findall(r"\b[A-Z]+(?:_[A-Z]+)+\b", text):
            if word.startswith(("KVCTL_", "VLLM_")):  # variables of the environment
                continue
            assert any(name == word or name.endswith(f"_{word}") for name in sent), f"{where}: nothing sends {word}"


def test_a_documented_series_is_one_that_is_exposed() -> None:
    exposed = "".join(page.read_text() for page in RECORDED.glob("*.2.prom"))
    for where, text in advice():
        for name in re.findall(r"\b(?:kvctl_|vllm:)[a-z_]+", text):
            assert f"# TYPE {name} " in exposed, f"{where}: {name} is not exposed"


def documents(name: str) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all((HOOKS / name).read_text()) if one]


def words_in(node: Any) -> list[list[str]]:
    """Every command line of a manifest that starts with kvctl."""
    if isinstance(node, list):
        return [found for one in node for found in words_in(one)]
    if not isinstance(node, dict):
        return []
    found = [words for inner in node.values() for words in words_in(inner)]
    command = node.get("command")
    if isinstance(command, list) and command[:1] == ["kvctl"]:
        found.append([*command[1:], *node.get("args", [])])
    for value in node.values():
        if isinstance(value, str) and value.startswith("kvctl "):
            found.append(shlex.split(value)[1:])
    return found


@pytest.mark.parametrize("name", ["lifecycle.yaml", "job.yaml"])
def test_a_hook_runs_commands_that_kvctl_takes_and_needs_no_curl(name: str) -> None:
    lines = [line for document in documents(name) for line in words_in(document)]
    assert lines
    for line in lines:
        parse(line)
    assert "curl" not in (HOOKS / name).read_text()


def test_the_job_satisfies_the_schemas_of_kubernetes() -> None:
    for document in documents("job.yaml"):
        kubernetes_validate.validate(document, "1.37", strict=True)


def pods_in(node: Any) -> list[dict[str, Any]]:
    """Every pod template of a manifest, whatever kind it is in."""
    if isinstance(node, list):
        return [found for one in node for found in pods_in(one)]
    if not isinstance(node, dict):
        return []
    found = [found for inner in node.values() for found in pods_in(inner)]
    template = node.get("template")
    if isinstance(template, dict) and "containers" in template.get("spec", {}):
        found.append(template)
    return found


@pytest.mark.parametrize("name", ["lifecycle.yaml", "job.yaml", "rayjob.yaml"])
def test_the_pods_of_hooks_satisfy_the_schemas_of_kubernetes(name: str) -> None:
    templates = [template for document in documents(name) for template in pods_in(document)]
    assert templates
    for template in templates:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": template.get("metadata", {}), "spec": template["spec"]}
        kubernetes_validate.validate(pod, "1.37", strict=True)


def test_the_cacheoperations_in_hooks_are_accepted_by_the_definition() -> None:
    schema = yaml.safe_load(CRD.read_text())["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    argo = documents("argo-workflow.yaml")[0]
    inner = yaml.safe_load(next(t for t in argo["spec"]["templates"] if t["name"] == "reset")["resource"]["manifest"])
    for body in (documents("cacheoperation.yaml")[0], inner):
        stored = admit(schema, body)
        assert stored["spec"]["reset"]["quarantineRunning"] is True
        unknown = set(body["spec"]) - set(stored["spec"])
        assert not unknown, f"pruned: {unknown}"


def test_the_workflow_knows_every_phase_that_is_an_end() -> None:
    from sidecar.operator.resource import FINAL

    template = next(t for t in documents("argo-workflow.yaml")[0]["spec"]["templates"] if t["name"] == "reset")
    failed = re.findall(r"\w+", template["resource"]["failureCondition"].partition(" in ")[2])
    assert {"Succeeded", *failed} == FINAL
