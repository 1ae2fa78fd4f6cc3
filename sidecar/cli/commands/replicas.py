"""kvctl replicas."""

from __future__ import annotations

import click

from sidecar.cli.options import connection_options, output_option, selection_options
from sidecar.cli.settings import Settings


@click.command()
@selection_options
@output_option("table", "wide", "json", "yaml", "name")
@connection_options
def replicas(settings: Settings, replicas: str, selector: str | None, output: str) -> None:
    """List replicas: address, engines, versions, model; -o wide also what each engine cannot do."""
    from sidecar.cli import exitcodes, reaching
    from sidecar.cli import output as out
    from sidecar.cli.operating import exit_with
    from sidecar.cli.printers import encoding
    from sidecar.cli.printers import replicas as printer
    from sidecar.cli.reaching import targets_of

    targets = targets_of(replicas, selector)
    fleet = reaching.run(settings, lambda reach: reach.replicas(targets))
    out.warn(fleet.warnings)
    out.tell_of_nobody(fleet.replicas)
    if output == "table":
        out.show(lambda console: printer.print_table(console, fleet))
    elif output == "wide":
        out.show(lambda console: printer.print_wide(console, fleet), wide=True)
    elif output == "name":
        out.write(encoding.names([row.name for row in fleet.replicas if row.reachable]))
    else:
        out.encoded(fleet, output)
    exit_with(exitcodes.of_reads((row.code for row in fleet.replicas), incomplete=fleet.incomplete))
