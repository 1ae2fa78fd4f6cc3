"""What vLLM's answer to POST /reset_prefix_cache means. Pure.

The shapes, from vLLM's sources 0.12 to 0.33:
- since 0.26, Python front end: 200 with {"success": true} or {"success": false}. False: blocks are held, or the
  connector said no; which of the two is not said. Before 0.32 with data parallel, the answer is the first rank's alone.
- before 0.26: 200 with an empty body, whether it was reset or refused (vllm#12284).
- the Rust front end, every version: 200 with an empty body.
- 404: the dev routes are off (VLLM_SERVER_DEV_MODE). 405 to a GET: they are on.
- 500: the engine raised. After a PREEMPT that means that requests were preempted and blocks are still held.
- {"success": true} for the connector also stands for "no connector" and for a connector that cannot be reset (its
  None counts as true, LMCache#4993), so over HTTP a connector is never more than unconfirmed.
- /reset_mm_cache and /reset_encoder_cache: an empty 200, of the first rank.

Anything else came from something else than vLLM (a router, a login page) and is never a success.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import Enum
from typing import Final

from sidecar.backends.http.client import Reply

_VERSION: Final = re.compile(r"(\d+)\.(\d+)")
ALL_RANKS_SINCE: Final = (0, 32)
"""vLLM version from which the answer stands for every rank."""


class Meaning(Enum):
    """What a reply says."""

    SUCCEEDED = "succeeded"
    REFUSED = "refused"
    UNCONFIRMED = "unconfirmed"
    NO_ROUTE = "no route"
    RAISED = "raised"
    DENIED = "denied"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class Reading:
    """A reply, read."""

    meaning: Meaning
    text: str
    """For a person; empty where the meaning says it all."""


def read_reset(reply: Reply) -> Reading:
    """The answer to /reset_prefix_cache."""
    early = _by_status(reply)
    if early is not None:
        return early
    if not reply.body.strip():
        return Reading(
            Meaning.UNCONFIRMED,
            "vLLM answered with an empty 200, which it also does when it refuses (before 0.26, and its Rust front end)",
        )
    try:
        value = json.loads(reply.body)
    except ValueError:
        return Reading(Meaning.UNCONFIRMED, f"the answer is no answer of vLLM: {_excerpt(reply.body)}")
    success = value.get("success") if isinstance(value, dict) else None
    if success is True:
        return Reading(Meaning.SUCCEEDED, "")
    if success is False:
        return Reading(Meaning.REFUSED, "")
    return Reading(
        Meaning.UNCONFIRMED,
        f"the answer has no `success` of true or false: {_excerpt(reply.body)}; a router or proxy may stand between",
    )


def read_empty(reply: Reply) -> Reading:
    """The answer to /reset_mm_cache or /reset_encoder_cache, which never says whether anything was cleared."""
    early = _by_status(reply)
    if early is not None:
        return early
    return Reading(Meaning.UNCONFIRMED, "vLLM's route answers 200 without looking whether the cache was cleared")


def has_dev_routes(reply: Reply) -> bool | None:
    """From the answer to a GET of a POST route; None when it cannot be told."""
    if reply.status == 405:
        return True
    return False if reply.status == 404 else None


def version_of(text: str) -> tuple[int, int] | None:
    """(major, minor) of a version text; None for a development build that names none."""
    match = _VERSION.match(text)
    return (int(match[1]), int(match[2])) if match else None


def stands_for_all_ranks(version: str, ranks: int) -> bool:
    """Whether one {"success": true} covers every data-parallel rank."""
    if ranks <= 1:
        return True
    known = version_of(version)
    return known is not None and known >= ALL_RANKS_SINCE


def _by_status(reply: Reply) -> Reading | None:
    """What the status alone says; None for 200."""
    status = reply.status
    if status == 200:
        return None
    excerpt = _excerpt(reply.body)
    if status == 404:
        return Reading(Meaning.NO_ROUTE, f"it answered 404 {excerpt}")
    if status in (401, 403):
        return Reading(Meaning.DENIED, f"it answered {status} {excerpt}")
    if status in (429, 502, 503, 504):
        return Reading(Meaning.UNAVAILABLE, f"it answered {status} {excerpt}")
    if status >= 500:
        return Reading(Meaning.RAISED, f"it answered {status} {excerpt}")
    return Reading(Meaning.UNCONFIRMED, f"it answered {status} {excerpt}, which vLLM never does")


def _excerpt(body: bytes) -> str:
    text = body[:200].decode("utf-8", "replace")
    return repr(" ".join(text.split())) if text.strip() else "with an empty body"
