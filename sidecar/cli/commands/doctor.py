"""kvctl doctor."""

from __future__ import annotations

import click

from sidecar.cli.options import connection_options, output_option
from sidecar.cli.settings import Settings


@click.command()
@output_option("table", "json")
@connection_options
def doctor(settings: Settings, output: str) -> None:
    """Check everything between here and the engines: files, sockets, certificates, replicas, versions, clocks.

    Each line says what was found and, where something is wrong, what to do. Exit code 0 when nothing is wrong, 1 when
    something is, 4 when no replica could be reached.
    """
    from sidecar.cli.checkup import examine, print_findings
    from sidecar.cli.operating import exit_with
    from sidecar.cli.reaching import told_plainly

    with told_plainly():
        findings = examine(settings)
    exit_with(print_findings(findings, output))
