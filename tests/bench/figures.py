"""What a benchmark hands back: tables, and aims that were met or fell short, with the reason.

A figure that depends on how fast this machine is says little by itself, so nothing here asserts one: an aim that is
missed is printed as short and the run goes on. Every module is a program: `python -m tests.bench.bench_NAME [--quick]
[--json FILE]`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Cell = str | float | int | None


@dataclass
class Table:
    title: str
    columns: tuple[str, ...]
    rows: list[list[Cell]] = field(default_factory=list)


@dataclass
class Aim:
    """Something an issue asked for."""

    text: str
    found: str
    met: bool
    reason: str = ""
    """Why it fell short; empty when it did not."""


@dataclass
class Report:
    name: str
    tables: list[Table] = field(default_factory=list)
    aims: list[Aim] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    quick: bool = False
    took_s: float = 0
    load: tuple[float, float] = (0, 0)
    """Processes that wanted to run, averaged over a minute, before and after."""

    def aim(self, text: str, found: float, limit: float, unit: str, reason: str, *, least: bool = False) -> None:
        """Hold a figure against its aim; `reason` is told only when it fell short."""
        met = found >= limit if least else found <= limit
        self.aims.append(Aim(text, f"{number(found)} {unit}".strip(), met, "" if met else reason))


def report_from(stored: dict[str, Any]) -> Report:
    """A report as it was written to a file."""
    tables = [Table(each["title"], tuple(each["columns"]), each["rows"]) for each in stored["tables"]]
    aims = [Aim(**each) for each in stored["aims"]]
    return Report(**{**stored, "tables": tables, "aims": aims, "load": tuple(stored["load"])})


# --- showing ------------------------------------------------------------------------------------------------------


def number(value: Cell) -> str:
    """Three digits that mean something."""
    if value is None:
        return "-"
    if not isinstance(value, float):
        return str(value)
    if value == 0:
        return "0"
    magnitude = abs(value)
    if magnitude >= 100:
        return f"{value:,.0f}"
    if magnitude >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if magnitude >= 1 else f"{value:.3f}" if magnitude >= 0.01 else f"{value:.2g}"


def text_table(table: Table) -> str:
    lines = [list(table.columns), *[[number(cell) for cell in row] for row in table.rows]]
    widths = [max(len(line[index]) for line in lines) for index in range(len(table.columns))]
    shown = []
    for line in lines:
        first, *others = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        shown.append("  ".join([first, *others]).rstrip())
    return "\n".join([table.title, *(f"  {line}" for line in shown)])


def markdown_table(table: Table) -> str:
    lines = [list(table.columns), ["---"] * len(table.columns), *[[number(cell) for cell in row] for row in table.rows]]
    return "\n".join([f"*{table.title}*", "", *("| " + " | ".join(line) + " |" for line in lines)])


def aim_line(aim: Aim) -> str:
    return f"{aim.text}: {aim.found}, {'met' if aim.met else f'SHORT: {aim.reason}'}"


def as_text(report: Report) -> str:
    parts = [text_table(table) for table in report.tables]
    parts += ["\n".join(f"aim: {aim_line(aim)}" for aim in report.aims)] if report.aims else []
    before, after = report.load
    took = f"took {report.took_s:.0f} s; load {before:.1f} before, {after:.1f} after, on {os.cpu_count()} CPUs"
    return "\n\n".join([*parts, "\n".join([*report.notes, took])])


def as_markdown(report: Report) -> str:
    parts = [markdown_table(table) for table in report.tables]
    parts += ["\n".join(f"- Aim: {aim_line(aim)}" for aim in report.aims)] if report.aims else []
    before, after = report.load
    ran = f"Load of the machine before and after this run: {before:.1f} and {after:.1f}."
    quick = ["A quick run: few repetitions."] if report.quick else []
    return "\n\n".join([*parts, " ".join([*report.notes, ran, *quick])])


# --- a module as a program ----------------------------------------------------------------------------------------


def run(measure: Callable[[bool], Report], quick: bool) -> Report:
    load = os.getloadavg()[0]
    began = time.monotonic()
    report = measure(quick)
    report.took_s = time.monotonic() - began
    report.load = (load, os.getloadavg()[0])
    report.quick = quick
    return report


def main(measure: Callable[[bool], Report], arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--quick", action="store_true", help="small sizes and few repetitions")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args(arguments)
    report = run(measure, options.quick)
    print(as_text(report))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(asdict(report), indent=1) + "\n")
    return 0


def progress(text: str) -> None:
    """What is being measured, for whoever waits."""
    sys.stderr.write(f"  {text}\n")
    sys.stderr.flush()
