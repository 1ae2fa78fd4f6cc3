"""kvctl hook: what Kubernetes runs in a container when it starts and before it stops.

A hook must never hold a pod up: it has a time limit of its own, and it exits 0 unless its options cannot be read. What
it found goes to stderr, which Kubernetes shows in the pod's events when a hook fails, and to PID 1's log otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping

import click

from sidecar.cli.options import Duration


@click.group()
def hook() -> None:
    """Container hooks for Kubernetes. They call the sidecar in the same pod and never fail a pod."""


@hook.command("pre-stop")
@click.option("--sidecar", default="127.0.0.1:7700", show_default=True, metavar="ADDRESS", help="The pod's sidecar.")
@click.option("--timeout", type=Duration(most_s=3600), default="30s", show_default=True, help="Longest wait.")
@click.option("--token-file", metavar="FILE", help="File with a bearer token.")
@click.option("--ca", metavar="FILE", help="CA that signed the sidecar's certificate.")
@click.option("--cert", metavar="FILE", help="Client certificate.")
@click.option("--key", metavar="FILE", help="Key of the client certificate.")
@click.option("--server-name", metavar="NAME", help="Name expected in the sidecar's certificate.")
def pre_stop(sidecar: str, timeout: float, **trust: str | None) -> None:
    """Wait until no request runs or waits, then let the container stop. Ends at once when the sidecar is gone."""
    _wait("pre-stop", sidecar, timeout, trust)


@hook.command("post-start")
@click.option("--sidecar", default="127.0.0.1:7700", show_default=True, metavar="ADDRESS", help="The pod's sidecar.")
@click.option("--timeout", type=Duration(most_s=3600), default="60s", show_default=True, help="Longest wait.")
@click.option("--token-file", metavar="FILE", help="File with a bearer token.")
@click.option("--ca", metavar="FILE", help="CA that signed the sidecar's certificate.")
@click.option("--cert", metavar="FILE", help="Client certificate.")
@click.option("--key", metavar="FILE", help="Key of the client certificate.")
@click.option("--server-name", metavar="NAME", help="Name expected in the sidecar's certificate.")
def post_start(sidecar: str, timeout: float, **trust: str | None) -> None:
    """Wait until the sidecar answers, so that a container started after it finds it."""
    _wait("post-start", sidecar, timeout, trust)


def _wait(which: str, address: str, timeout_s: float, trust: Mapping[str, str | None]) -> None:
    import asyncio

    from sidecar.cli import hooks, output
    from sidecar.cli.failures import Refusal
    from sidecar.cli.reaching import security_of, told_plainly
    from sidecar.cli.settings import Settings

    ca, cert, key, token_file, name = (trust[one] or "" for one in ("ca", "cert", "key", "token_file", "server_name"))
    settings = Settings(targets=(address,), ca=ca, cert=cert, key=key, token_file=token_file, server_name=name)
    try:
        with told_plainly():
            security = security_of(settings)
            wait = hooks.until_idle if which == "pre-stop" else hooks.until_answering
            output.note(f"{which}: {asyncio.run(wait(address, security, timeout_s))}")
    except Refusal as refused:
        output.note(f"{which}: not waiting: {refused}")
