"""kvctl config: contexts."""

from __future__ import annotations

from typing import Any, cast

import click

from sidecar.cli.settings import Config, Settings


def _contexts(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from sidecar.cli.completing import context_names

    return context_names(incomplete)


@click.group()
def config() -> None:
    """Contexts: named ways to a fleet, in $KVCTL_CONFIG or ~/.config/kvctl/config.yaml."""


@config.command("get-contexts")
@click.option("-o", "--output", type=click.Choice(["table", "name"]), default="table", show_default=True)
def get_contexts(output: str) -> None:
    """List contexts; * marks the current one."""
    from sidecar.cli import output as out
    from sidecar.cli.printers import style
    from sidecar.cli.settings import config_path, load_config

    found = load_config(config_path())
    if output == "name":
        out.write("".join(f"{name}\n" for name in found.contexts))
        return
    if not found.contexts:
        out.note(f"no contexts in {found.path}; make one with `kvctl config set-context NAME --coordinator ADDRESS`")
        return
    made = style.table("CURRENT", "NAME", "FLEET", "SECURITY")
    for name, settings in found.contexts.items():
        made.add_row(
            "*" if name == found.current else "", style.words(name), style.words(_fleet(settings)), _security(settings)
        )
    out.show(lambda console: console.print(made))


@config.command("use-context")
@click.argument("name", shell_complete=_contexts)
def use_context(name: str) -> None:
    """Make a context the current one."""
    from dataclasses import replace

    from sidecar.cli.settings import config_path, load_config, save_config

    found = load_config(config_path())
    known_context(found, name)
    save_config(replace(found, current=name))
    click.echo(f"current context is {name}: {_fleet(found.contexts[name])}", err=True)


@config.command("set-context")
@click.argument("name", shell_complete=_contexts)
@click.option("--coordinator", metavar="ADDRESS", help="A coordinator.")
@click.option("--target", multiple=True, metavar="[NAME=]ADDRESS", help="A sidecar, repeatable.")
@click.option("--inventory", metavar="FILE", help="YAML list of replicas.")
@click.option("--ca", metavar="FILE", help="CA that signed the servers' certificates.")
@click.option("--cert", metavar="FILE", help="Client certificate.")
@click.option("--key", metavar="FILE", help="Key of the client certificate.")
@click.option("--token-file", metavar="FILE", help="File with a bearer token.")
@click.option("--server-name", metavar="NAME", help="Name expected in the server's certificate.")
@click.option("--insecure/--secure", default=None, help="Send a token without TLS beyond this machine.")
def set_context(name: str, target: tuple[str, ...], **given: str | bool | None) -> None:
    """Make a context, or change what is given of an existing one. Paths are kept as absolute ones."""
    import os
    from dataclasses import replace

    from sidecar.cli.failures import Refusal
    from sidecar.cli.settings import config_path, load_config, save_config

    if not name:
        raise Refusal("the name of the context is empty; expected one such as lab")
    found = load_config(config_path())
    old = found.contexts.get(name, Settings())
    changes: dict[str, object] = {key: value for key, value in given.items() if value is not None}
    for key in ("inventory", "ca", "cert", "key", "token_file"):
        if changes.get(key):
            changes[key] = os.path.abspath(str(changes[key]))
    if target:
        changes["targets"] = target
    fleets = [key for key in ("coordinator", "targets", "inventory") if changes.get(key)]
    if len(fleets) > 1:
        flags = " and ".join(f"--{'target' if key == 'targets' else key}" for key in fleets)
        raise Refusal(f"{flags} name two fleets; give one of them")
    if fleets:
        for key in {"coordinator", "targets", "inventory"} - set(fleets):
            changes[key] = () if key == "targets" else ""
    made = replace(old, **cast("dict[str, Any]", changes))
    if not made.names_a_fleet:
        raise Refusal(f"context {name!r} names no fleet; give --coordinator, --target or --inventory")
    save_config(replace(found, contexts={**found.contexts, name: made}, current=found.current or name))
    first = "" if found.current else " (the current one from now on: commands without a fleet talk to it)"
    click.echo(f"context {name}: {_fleet(made)}{first}", err=True)


@config.command("delete-context")
@click.argument("name", shell_complete=_contexts)
def delete_context(name: str) -> None:
    """Forget a context. No fleet is touched; where it was the current one, none is afterwards."""
    from dataclasses import replace

    from sidecar.cli.settings import config_path, load_config, save_config

    found = load_config(config_path())
    known_context(found, name)
    left = {each: settings for each, settings in found.contexts.items() if each != name}
    was_current = found.current == name
    save_config(replace(found, contexts=left, current="" if was_current else found.current))
    then = "; no context is current now, choose one with `kvctl config use-context`" if was_current else ""
    click.echo(f"context {name} is forgotten{then}", err=True)


def known_context(config: Config, name: str) -> None:
    """Refusal that names the contexts there are, unless this is one of them."""
    from sidecar.cli.failures import Refusal

    if name not in config.contexts:
        raise Refusal(f"no context {name!r} in {config.path}; {config.known}")


def _fleet(settings: Settings) -> str:
    if settings.coordinator:
        return f"coordinator {settings.coordinator}"
    if settings.inventory:
        return f"inventory {settings.inventory}"
    return ", ".join(settings.targets)


def _security(settings: Settings) -> str:
    parts = [name for name, given in (("TLS", settings.ca), ("certificate", settings.cert)) if given]
    if settings.token_file:
        parts.append("token")
    return ", ".join(parts) or "none"
