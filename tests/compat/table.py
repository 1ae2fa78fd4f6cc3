"""What came out of each vLLM version, as a table of operation x version.

A cell says "works" when the bridge switches the operation on there and every test file that it needs passed, "off: why"
when it is switched off, and "FAILS: which" when a test failed. Where only tests on a whole engine core have not been
run it says "works*", where others have not been "found*", and below the table stands which.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

TESTS_OF = {
    "reset.fail": ("test_pools_drop", "test_pools_properties"),
    "reset.preempt": ("test_aux_guard", "test_preempt_forecast"),
    "reset.keep": ("test_pools_drop", "test_pools_properties", "test_offload_guard", "test_aux_guard"),
    "reset.quarantine": ("test_quarantine", "test_offload_guard"),
    "reset.connector": ("test_connector_reset",),
    "reset.mm": ("test_tiers",),
    "reset.encoder": ("test_tiers",),
    "events.publish": ("test_kv_events",),
    "reorder.idle": ("test_pools_properties", "test_lazy_offload"),
    "reorder.uncached": ("test_pools_properties",),
    "reorder.all_free": ("test_pools_properties", "test_lazy_offload"),
    "admission": ("test_evidence", "test_evidence_remembered", "test_deadlock_relief"),
    "relieve": ("test_deadlock_relief", "test_deadlock_operation"),
    "pause": ("test_vllm_pauses",),
}
"""Test files that an operation needs to pass, beside WHOLE_ENGINE; of operations without an entry that is all."""

WHOLE_ENGINE = ("test_attach_contract", "test_lifecycle_in_process", "test_state_machine")
"""Test files in which every operation is asked for at vLLM's whole engine core, over its socket."""

_BLOCK = re.compile(r"(<!-- versions -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass
class Report:
    """What came out of one version."""

    version: str
    capabilities: dict[str, str] = field(default_factory=dict)
    passed: dict[str, int] = field(default_factory=dict)
    """Test file -> tests that passed."""
    failed: dict[str, list[str]] = field(default_factory=dict)
    """Test file -> tests that did not."""
    trouble: str = ""
    """Why nothing could be found out."""

    @property
    def ok(self) -> bool:
        return not self.trouble and not self.failed

    def cell(self, capability: str) -> str:
        if self.trouble:
            return f"FAILS: {self.trouble}"
        if why := self.capabilities.get(capability, "unknown"):
            return f"off: {why}"
        own = TESTS_OF.get(capability, ())
        files = (*own, *WHOLE_ENGINE)
        broken = [name for file in files for name in self.failed.get(file, ())]
        if broken:
            return f"FAILS: {broken[0]}" + (f" and {len(broken) - 1} more" if len(broken) > 1 else "")
        ran = {file for file in files if self.passed.get(file)}
        if len(ran) == len(files):
            return "works"
        return "works*" if own and ran.issuperset(own) else "found*"

    @property
    def not_run(self) -> list[str]:
        """Files that some operation needs."""
        needed = dict.fromkeys(file for files in (*TESTS_OF.values(), WHOLE_ENGINE) for file in files)
        return [file for file in needed if file not in self.passed]

    @property
    def tests(self) -> str:
        failed = sum(map(len, self.failed.values()))
        counted = f"{sum(self.passed.values())} passed"
        return f"{counted}, {failed} failed" if failed else counted


def table(reports: Sequence[Report]) -> str:
    """Markdown: a row an operation, a column a version."""
    operations = dict.fromkeys(name for report in reports for name in report.capabilities)
    return _markdown(reports, [(name, tuple(report.cell(name) for report in reports)) for name in operations])


def short_table(reports: Sequence[Report]) -> str:
    """The same with one row for all operations of a kind of which there is nothing different to say."""
    together: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name in dict.fromkeys(name for report in reports for name in report.capabilities):
        kind, _, which = name.partition(".")
        together.setdefault((kind, tuple(report.cell(name) for report in reports)), []).append(which)
    rows = [(f"{kind}: {', '.join(which)}" if any(which) else kind, cells) for (kind, cells), which in together.items()]
    return _markdown(reports, rows)


def _markdown(reports: Sequence[Report], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    lines = ["| operation | " + " | ".join(report.version for report in reports) + " |"]
    lines.append("| --- " * (len(reports) + 1) + "|")
    lines += [f"| {name} | " + " | ".join(cells) + " |" for name, cells in rows]
    lines.append("| tests | " + " | ".join(report.tests for report in reports) + " |")
    missing: dict[str, list[str]] = {}
    for report in reports:
        if report.not_run:
            missing.setdefault(", ".join(report.not_run), []).append(report.version)
    if missing:
        told = (f"{files} on {', '.join(versions)}" for files, versions in missing.items())
        lines += ["", f"\\* Not run here: {'; '.join(told)}."]
    return "\n".join([*lines, ""])


def rewrite(page: str, text: str) -> str:
    """The page with `text` between its marks `<!-- versions -->` and `<!-- end -->`; ValueError without such marks."""
    if not _BLOCK.search(page):
        raise ValueError("the page has no <!-- versions --> ... <!-- end -->")
    return _BLOCK.sub(lambda found: f"{found[1]}{text.strip()}\n{found[2]}", page, count=1)
