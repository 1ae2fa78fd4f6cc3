"""Which pause a resume means, at one replica.

A person names a fleet-wide pause by its operation, and each replica took it under an id of its own: the one derived for
the first try or, where that was refused and the operation waited, one of those that followed. An id that the replica
itself knows is taken as it is: a refusal shows the holder's, and a weight update's pauses have no operation.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

from sidecar.coordinator.port import Asked
from sidecar.coordinator.targets import derive_request_id, next_request_id

MOST_TRIES: Final = 1000
"""A pause that waits for an hour, with the longest backoff between its tries, makes fewer."""

Ask = Callable[[str], Awaitable[Asked]]
"""What the replica has on record for a request id."""


async def pause_meant(named: str, replica: str, ask: Ask) -> str:
    """The request id that the replica knows the pause by. `replica`: the name that request ids are derived from."""
    first = tried = derive_request_id(named, replica)
    for _ in range(MOST_TRIES):
        asked = await ask(tried)
        if not asked.known:
            break
        if asked.answer is None or asked.answer.result.code != "FAILED_PRECONDITION":
            return tried
        tried = next_request_id(tried)
    return named if tried == first and (await ask(named)).known else first
