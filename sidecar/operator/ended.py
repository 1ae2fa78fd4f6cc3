"""The targets that have ended, kept as the status shows them: counted, in order, and cut to the first hundred.

Each of thousands of targets goes on record with its end, so recording one must not cost as much as all of them do: its
row is put into its place, the counts follow, and only the rows that are shown are written.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec
from kvctl.v1 import fleet_pb2

from sidecar.operator import status
from sidecar.operator.resource import Entry, Row
from sidecar.operator.status import Patch


class EndedTargets:
    """See the module. `put` each target when it has ended; `patch` is what the status then says of all of them."""

    def __init__(self, total: int) -> None:
        """`total`: targets of the operation, those apart that have not ended."""
        self._total = total
        self._rows: dict[str, Row] = {}
        self._order: list[tuple[int, str]] = []
        self._counts: Counter[str] = Counter()

    @classmethod
    def of(cls, ledger: Mapping[str, Entry], results: Iterable[fleet_pb2.TargetResult]) -> EndedTargets:
        """Those of a plan that have ended so far."""
        ended = cls(len(ledger))
        for result in results:
            ended.put(result, ledger[result.replica].uid)
        return ended

    def put(self, result: fleet_pb2.TargetResult, uid: str) -> None:
        """A target has ended, or its end is known better than before; `uid`: its pod's."""
        row = status.shown(result, uid)
        before = self._rows.get(row.replica)
        if before is not None:
            del self._order[bisect_left(self._order, _place(before))]
            self._counts[before.outcome] -= 1
        insort(self._order, _place(row))
        self._counts[row.outcome] += 1
        self._rows[row.replica] = row

    def patch(self) -> Patch:
        """counts, progress, results (at most MAX_RESULTS, those that did not succeed first) and resultsOmitted."""
        first = [self._rows[name] for _, name in self._order[: status.MAX_RESULTS]]
        return {
            "counts": {"total": self._total, **{name.lower(): self._counts[name] for name in status.ORDER}},
            "progress": f"{len(self._order)}/{self._total}",
            "results": msgspec.to_builtins(first),
            "resultsOmitted": len(self._order) - len(first),
        }


def _place(row: Row) -> tuple[int, str]:
    return status.ORDER.index(row.outcome), row.replica
