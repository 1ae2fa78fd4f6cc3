"""docs/reliability.md: words by people, tables by programs, between `<!-- NAME -->` and `<!-- end -->`.

python -m tests.robustness.reliability_page     the figures that tests/e2e/test_real_inference.py left, into the page
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
INFERENCE = Path(__file__).resolve().parents[2] / "build" / "robustness" / "inference.json"


def between(page: str, name: str, text: str) -> str:
    """The page with `text` in its block `name`. ValueError when it has no such block, or several."""
    pattern = re.compile(rf"<!-- {re.escape(name)} -->\n.*?<!-- end -->", re.DOTALL)
    found = len(pattern.findall(page))
    if found != 1:
        raise ValueError(f"{found} blocks '<!-- {name} -->' in the page; expected one")
    return pattern.sub(lambda _: f"<!-- {name} -->\n{text.strip()}\n<!-- end -->", page)


def write_between(name: str, text: str) -> None:
    """Put `text` into block `name` of docs/reliability.md."""
    PAGE.write_text(between(PAGE.read_text(), name, text))


def inference(stored: dict[str, Any]) -> str:
    """What streams saw of an engine that was busy with operations, from the test's file."""
    done = ", ".join(f"{count} {name}" for name, count in stored["operations"].items())
    rows = ["| the engine was | p50, ms between tokens | p99 | longest |", "| --- " * 4 + "|"]
    for name, key in (("left alone", "alone"), ("busy with operations", "busy")):
        p50, p99, longest = stored[f"ms_between_tokens_{key}_p50_p99_longest"]
        rows.append(f"| {name} | {p50:.1f} | {p99:.1f} | {longest:.1f} |")
    return "\n".join(
        [
            f"{stored['stretches']} stretches of {stored['stretch_s']:.0f} s taking turns; {done}.",
            "",
            *rows,
            "",
            f"A stretch's median over those around it (quartiles): busy over alone {stored['busy_over_alone']}; alone "
            f"over alone, which is the machine's noise, {stored['alone_over_alone']}. "
            f"Load of the machine before and after: {stored['load'][0]:.1f} and {stored['load'][1]:.1f}.",
        ]
    )


if __name__ == "__main__":
    if not INFERENCE.exists():
        sys.exit(f"no figures at {INFERENCE}: run pytest tests/e2e/test_real_inference.py first")
    write_between("inference", inference(json.loads(INFERENCE.read_text())))
