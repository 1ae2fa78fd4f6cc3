"""Targets behind a DNS name: `dns:///name:port`, such as a headless Kubernetes service.

Every address of both families is a target, and the name is resolved anew for each operation: a client library that
resolves once never sees a scale-up. The two families are asked for apart, because one of them failing for a moment
would otherwise look like a complete answer of the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, InvalidStateError
from typing import Final

from sidecar.coordinator.discovery import DiscoveryError, SourceError
from sidecar.coordinator.targets import Discovered, Target

Resolver = Callable[[str, socket.AddressFamily], Awaitable[list[str]]]
"""Addresses of a host in one family; raises socket.gaierror as getaddrinfo does."""

RESOLVE_TIMEOUT_S: Final = 5.0
"""Longest wait for one lookup. glibc's own default is 5 s a try with 2 tries, which would eat the operation's time."""

_FORM: Final = re.compile(r"dns:///(?P<host>[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?):(?P<port>[0-9]{1,5})")
_NO_SUCH_RECORD: Final = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", -5), socket.EAI_ADDRFAMILY})


class DnsDiscovery:
    """All A and AAAA records of one name."""

    def __init__(self, url: str, resolver: Resolver | None = None) -> None:
        """SourceError when `url` is not dns:///name:port."""
        found = _FORM.fullmatch(url)
        if found is None or not 0 < int(found["port"]) < 65536:
            raise SourceError(f"{url!r} is not a DNS target; expected dns:///name:port, e.g. dns:///vllm:7700")
        self._host, self._port = found["host"], int(found["port"])
        self._resolver = resolver or _system_resolver

    async def targets(self) -> Discovered:
        """One target an address, sorted; incomplete when one family could not be asked."""
        answers = await asyncio.gather(self._ask(socket.AF_INET), self._ask(socket.AF_INET6))
        addresses = sorted({address for found, _ in answers for address in found})
        troubles = [trouble for _, trouble in answers if trouble]
        if not addresses:
            found = "; ".join(troubles) or "it has no A and no AAAA record"
            raise DiscoveryError(f"DNS name {self._host} gives no address: {found}. Check the name and the resolver.")
        targets = tuple(Target(address=_join(address, self._port), server_name=self._host) for address in addresses)
        return Discovered(targets, incomplete=bool(troubles), warnings=tuple(troubles))

    def describe(self) -> str:
        """The name."""
        return f"DNS name {self._host}"

    async def _ask(self, family: socket.AddressFamily) -> tuple[list[str], str]:
        record = "A" if family == socket.AF_INET else "AAAA"
        try:
            return await asyncio.wait_for(self._resolver(self._host, family), RESOLVE_TIMEOUT_S), ""
        except TimeoutError:
            return [], f"no answer for {record} records of {self._host} within {RESOLVE_TIMEOUT_S:g} s"
        except socket.gaierror as error:
            if error.errno in _NO_SUCH_RECORD:
                return [], ""
            return [], f"{record} records of {self._host} could not be asked for: {error.strerror or error}"


async def _system_resolver(host: str, family: socket.AddressFamily) -> list[str]:
    """In a daemon thread: a lookup cannot be stopped, and one of the loop's own threads would be waited for at the end
    of the program, and be missing to whoever else needs them.
    """
    done: Future[list[str]] = Future()

    def look() -> None:
        try:
            found = socket.getaddrinfo(host, None, family=family, type=socket.SOCK_STREAM)
            answer = [str(address[0]) for *_, address in found]
        except Exception as error:  # noqa: BLE001 - whatever it is, it is for whoever waits
            with contextlib.suppress(InvalidStateError):
                done.set_exception(error)
        else:
            with contextlib.suppress(InvalidStateError):
                done.set_result(answer)

    threading.Thread(target=look, name=f"lookup {host}", daemon=True).start()
    return await asyncio.wrap_future(done)


def _join(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
