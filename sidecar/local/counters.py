"""An engine's own counters, read from its memory-mapped page: they say what it did, whatever an operation claims."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from engine_bridge.page import PageError, PageReader
from sidecar.local.layout import LocalError


@dataclass(frozen=True, slots=True)
class Counters:
    """Sums over the engines of one replica, since they started."""

    tokens_scheduled: int
    """Tokens that engines computed, prompts and answers."""
    tokens_given: int
    """Tokens that engines gave out."""
    preemptions: int

    @property
    def not_given(self) -> int:
        """Tokens computed and not given out: prompts, and whatever is computed again."""
        return self.tokens_scheduled - self.tokens_given


def read_counters(engine_directory: Path) -> Counters:
    """Read every page in a replica's engine directory. LocalError when there is none that can be read."""
    pages = sorted(engine_directory.glob("engine-*.page"))
    if not pages:
        raise LocalError(f"no engine page in {engine_directory}; did the bridge attach? see the engine's log", 1)
    scheduled = given = preemptions = 0
    for path in pages:
        try:
            reader = PageReader(path)
            try:
                counters = reader.read().counters
            finally:
                reader.close()
        except PageError as error:
            raise LocalError(str(error), exit_code=1) from error
        scheduled += counters.tokens_scheduled
        given += counters.outputs
        preemptions += counters.preemptions
    return Counters(scheduled, given, preemptions)
