"""`kvctl demo`: what the product promises, shown on real engines and judged from measurement."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import click
import msgspec

from sidecar.local.figures import Claim, Figures, judge
from sidecar.local.fleet import booted
from sidecar.local.layout import Fleet, LocalError
from sidecar.local.load import LoadError
from sidecar.local.programs import Settings


class _Written(msgspec.Struct):
    """What --json writes."""

    held: bool
    claims: list[Claim]
    figures: Figures


def run(settings: Settings, json_path: str | None = None, *, keep_running: bool = False) -> int:
    """Boot, measure, tell. 0 when every claim held, 1 when one did not or something broke, 2 for bad options.

    `json_path`: file for the figures, "-" for stdout (the summary then goes to stderr).
    """
    try:
        _check_writable(json_path)
        with booted(settings) as booting:
            figures = _measure(booting.fleet)
            claims = judge(figures)
            if keep_running:
                booting.stay()
    except LocalError as error:
        click.echo(f"kvctl: {error}", err=True)
        return error.exit_code
    except (LoadError, TimeoutError) as error:
        click.echo(f"kvctl: the demo could not be measured: {str(error) or 'an engine stood still'}", err=True)
        return 1
    except KeyboardInterrupt:
        click.echo("kvctl: interrupted; nothing is left running", err=True)
        return 130
    return _report(figures, claims, json_path, keep_running=keep_running)


def _measure(fleet: Fleet) -> Figures:
    # gRPC is slow to import, and a boot that fails should say so at once.
    from sidecar.local.measure import measure

    return asyncio.run(measure(fleet, lambda text: click.echo(text, err=True)))


def _report(figures: Figures, claims: list[Claim], json_path: str | None, *, keep_running: bool) -> int:
    from sidecar.local.story import tell

    held = all(claim.held for claim in claims)
    for line in tell(figures, claims):
        click.echo(line, err=json_path == "-")
    if keep_running:
        click.echo(
            "The fleet stays up: try `kvctl reset --mode keep --replicas all`; end it with `kvctl local down`.",
            err=True,
        )
    if json_path:
        text = msgspec.json.format(msgspec.json.encode(_Written(held, claims, figures)), indent=2)
        try:
            _write(json_path, text)
        except OSError as error:
            click.echo(f"kvctl: the figures cannot be written to {json_path}: {error.strerror}", err=True)
            return 1
    return 0 if held else 1


def _check_writable(json_path: str | None) -> None:
    """LocalError now rather than after a minute of measuring."""
    if json_path is None or json_path == "-":
        return
    try:
        with Path(json_path).open("ab"):
            pass
    except OSError as error:
        raise LocalError(f"--json {json_path}: {error.strerror}; name a file that can be written") from error


def _write(json_path: str, text: bytes) -> None:
    if json_path == "-":
        sys.stdout.buffer.write(text + b"\n")
    else:
        Path(json_path).write_bytes(text + b"\n")
