"""What vLLM's log tells of a boot: how far it is, and why it ended."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_STAGES: Final = (
    ("Initializing a V1 LLM engine", "starting the engine"),
    ("Loading weights took", "filling in the weights"),
    ("KV cache size", "allocating the KV cache"),
    ("Starting vLLM server", "opening the API"),
    ("Application startup complete", "waiting for the sidecar to find the engine"),
)
"""Lines of vLLM's log that tell how far it is, in their order, and what they mean to a person."""


def stage_of(log: Path) -> str:
    """How far the boot is."""
    text = _read(log)
    reached = [meaning for mark, meaning in _STAGES if mark in text]
    return reached[-1] if reached else "importing vLLM, the longest part"


def last_error(log: Path) -> str:
    """The line of a log that most likely says why its program ended."""
    lines = [line.strip() for line in _read(log).splitlines() if line.strip()]
    telling = [line for line in lines if "Error" in line or "error:" in line]
    return (telling or lines or ["it wrote nothing"])[-1][:300]


def begin_anew(log: Path) -> None:
    """An empty log for a program that starts again; the one before is kept beside it, with `.1` at its end."""
    if log.exists():
        log.replace(log.with_name(f"{log.name}.1"))


def _read(log: Path) -> str:
    try:
        return log.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
