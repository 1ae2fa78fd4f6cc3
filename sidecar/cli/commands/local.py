"""kvctl local and kvctl demo: what they do is in `sidecar.local`, which is imported when they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar, cast

import click

from sidecar.cli.options import Duration

if TYPE_CHECKING:
    from sidecar.local.programs import Settings

_F = TypeVar("_F", bound=Callable[..., object])


@click.group()
def local() -> None:
    """Run a small fleet of real vLLM engines on this machine's CPU, each with a sidecar."""


def boot_options(function: _F) -> _F:
    """How the fleet is booted."""
    options = [
        click.option("--replicas", type=int, help="How many. Default: 2."),
        click.option("--directory", metavar="DIR", help="Parent of the directory for sockets."),
        click.option(
            "--base-port", type=click.IntRange(1, 65000), help="First of three ports a replica. Default: free."
        ),
        click.option(
            "--kv-cache-mib", type=click.IntRange(1, 65536), default=128, show_default=True, help="A replica."
        ),
        click.option("--dev-mode", is_flag=True, help="Turn vLLM's development routes on."),
        click.option(
            "--boot-timeout", type=Duration(least_s=1), default="5m", show_default=True, help="For all to be ready."
        ),
        click.option("--engine-arg", multiple=True, metavar="ARG", help="Further argument for vLLM, repeatable."),
    ]
    for option in reversed(options):
        function = option(function)
    return function


def _settings(options: dict[str, object]) -> Settings:
    from sidecar.local.programs import Settings

    return Settings(
        replicas=2 if options["replicas"] is None else cast("int", options["replicas"]),
        directory=cast("str | None", options["directory"]),
        base_port=cast("int | None", options["base_port"]),
        kv_cache_mib=cast("int", options["kv_cache_mib"]),
        dev_mode=bool(options["dev_mode"]),
        boot_seconds=cast("float", options["boot_timeout"]),
        engine_arguments=cast("tuple[str, ...]", options["engine_arg"]),
    )


@local.command()
@boot_options
def up(**options: object) -> None:
    """Boot the fleet; later commands find it by themselves. Where a part of it has died, start that part again."""
    from sidecar.local import fleet

    _exit(fleet.up(_settings(options), cast("int | None", options["replicas"])))


@local.command()
def down() -> None:
    """End every process of the fleet and remove its sockets."""
    from sidecar.local import fleet

    _exit(fleet.down())


@local.command()
def status() -> None:
    """Say which processes of the fleet run."""
    from sidecar.local import fleet

    _exit(fleet.status())


@click.command()
@click.option("--json", "json_path", metavar="FILE", help="Write the figures there; - for stdout.")
@click.option("--keep-running", is_flag=True, help="Leave the fleet up at the end.")
@boot_options
def demo(json_path: str | None, keep_running: bool, **options: object) -> None:
    """Boot real engines, load them, run the three reset modes, and show from measurement what each one did."""
    from sidecar.local import demo as demonstration

    _exit(demonstration.run(_settings(options), json_path, keep_running=keep_running))


def _exit(code: int) -> None:
    if code:
        raise click.exceptions.Exit(code)
