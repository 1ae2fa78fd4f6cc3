"""One thing that `kvctl doctor` looked at."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "wrong"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found, and what to do about it."""

    level: Level
    subject: str
    found: str
    advice: str = ""
    unreachable: bool = False
