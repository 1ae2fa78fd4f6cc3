"""docs/reliability.md: words by people, tables by programs, between `<!-- NAME -->` and `<!-- end -->`."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"


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
