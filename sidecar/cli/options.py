"""Options that several commands share. Only click is imported: help and completion stay fast."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import click

from sidecar.cli.settings import Settings

_F = TypeVar("_F", bound=Callable[..., object])

OPERATION_FORMATS = ("table", "wide", "json", "yaml", "name")
DURATION_HELP = "e.g. 500ms, 30s, 2m"
COUNT = click.IntRange(0, 1_000_000)
"""Of replicas; what the API's numbers hold, and more than any fleet has."""


class Duration(click.ParamType[float]):
    """A time with a unit, in seconds: 500ms, 30s, 1.5m, 1h. A bare number is seconds."""

    name = "duration"
    _units = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}  # noqa: RUF012 - never changed

    def __init__(self, least_s: float = 0.0, most_s: float = 86400.0) -> None:
        self._least_s = least_s
        self._most_s = most_s

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Seconds."""
        import re

        if isinstance(value, int | float):
            return float(value)
        found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|s|m|h|)\s*", str(value))
        if found is None:
            self.fail(f"{value!r} is not a duration; expected {DURATION_HELP}", param, ctx)
        seconds = float(found[1]) * self._units[found[2]]
        if not self._least_s <= seconds <= self._most_s:
            self.fail(f"{value!r} is out of range; expected {self._least_s:g}s to {self._most_s:g}s", param, ctx)
        return seconds


def _stack(options: list[Callable[[_F], _F]]) -> Callable[[_F], _F]:
    def decorate(function: _F) -> _F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def complete_replicas(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Names of replicas, for the shell. Never fails and never prints: a completion that errs completes nothing."""
    from sidecar.cli.completing import replica_names

    return replica_names(ctx, incomplete)


def _complete_contexts(ctx: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    from sidecar.cli.completing import context_names

    return context_names(incomplete)


def connection_options(function: _F) -> _F:
    """Whom to call and how. The command gets one argument, `settings`, already chosen and checked."""
    import functools

    @functools.wraps(function)
    def with_settings(*args: object, **given: object) -> object:
        from sidecar.cli.settings import choose

        flags = Settings(
            coordinator=str(given.pop("coordinator") or ""),
            targets=cast("tuple[str, ...]", given.pop("target")),
            inventory=str(given.pop("inventory") or ""),
            ca=str(given.pop("ca") or ""),
            cert=str(given.pop("cert") or ""),
            key=str(given.pop("key") or ""),
            token_file=str(given.pop("token_file") or ""),
            server_name=str(given.pop("server_name") or ""),
            insecure=bool(given.pop("insecure")),
        )
        return function(*args, settings=choose(flags, str(given.pop("context") or "")), **given)

    return _stack(
        [
            click.option(
                "--target",
                "--replica",
                multiple=True,
                metavar="[NAME=]ADDRESS",
                help="A sidecar to call, repeatable: host:port, unix:/path, or dns:///name:port for every address.",
            ),
            click.option("--inventory", metavar="FILE", help="YAML list of replicas.", type=click.Path()),
            click.option("--coordinator", metavar="ADDRESS", help="Let a coordinator run it."),
            click.option(
                "--context", metavar="NAME", help="A context of the config.", shell_complete=_complete_contexts
            ),
            click.option("--ca", metavar="FILE", help="CA that signed the server's certificate; turns TLS on."),
            click.option("--cert", metavar="FILE", help="Client certificate; needs --key."),
            click.option("--key", metavar="FILE", help="Key of the client certificate."),
            click.option("--token-file", metavar="FILE", help="File with a bearer token."),
            click.option("--server-name", metavar="NAME", help="Name expected in the server's certificate."),
            click.option("--insecure", is_flag=True, help="Send a token without TLS beyond this machine."),
        ]
    )(cast("_F", with_settings))


def selection_options(function: _F) -> _F:
    """On which replicas."""
    return _stack(
        [
            click.option(
                "--replicas",
                default="all",
                show_default=True,
                metavar="WHICH",
                help="all, names and globs (r0,r1*), or labels (pool=a, 'zone in (x,y)').",
                shell_complete=complete_replicas,
            ),
            click.option("--selector", "-l", metavar="LABELS", help="A label selector, also `key` and `!key`."),
        ]
    )(function)


def output_option(*formats: str) -> Callable[[_F], _F]:
    """-o."""
    return click.option(
        "-o",
        "--output",
        type=click.Choice(formats),
        default=formats[0],
        show_default=True,
        help="How to print the result.",
    )


def rollout_options(function: _F) -> _F:
    """In which order, and when to stop."""
    return _stack(
        [
            click.option(
                "--rolling", is_flag=True, help="Wave by wave, looking at health; same as --strategy rolling."
            ),
            click.option(
                "--strategy", type=click.Choice(["all-at-once", "rolling"]), help="Order. Default: all-at-once."
            ),
            click.option("--max-unavailable", metavar="N|N%", help="Rolling: replicas disrupted at once. Default: 1."),
            click.option("--canary", type=COUNT, metavar="N", help="Rolling: replicas of the first wave."),
            click.option("--min-healthy-time", type=Duration(), help="Rolling: how long a wave must stay healthy."),
            click.option("--max-failures", type=COUNT, metavar="N", help="Stop after N failures."),
            click.option("--concurrency", type=click.IntRange(1, 1024), help="Calls in flight. Default: 64."),
        ]
    )(function)


def running_options(function: _F) -> _F:
    """How long, how often, under which id."""
    return _stack(
        [
            click.option(
                "--timeout",
                type=Duration(least_s=0.05, most_s=3600.0),
                default="30s",
                show_default=True,
                help="For one replica, retries included.",
            ),
            click.option("--wait", is_flag=True, help="Try refused replicas again until the timeout."),
            click.option("--dry-run", is_flag=True, help="Check everything, change nothing."),
            click.option(
                "--request-id", metavar="UUID", help="Repeat or follow up an operation: it runs at most once."
            ),
        ]
    )(function)
