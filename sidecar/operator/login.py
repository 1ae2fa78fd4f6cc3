"""How kopf gets its credentials: the same files as everything else here, read again before a token runs out.

kopf asks again as soon as they are refused. It would take the same ones at once, dozens of times a second and for as
long as they are refused, because it knows those that were refused by all of their fields, and the time at which they
are to be read again always differs. So it gets them again after a pause, and at once when the files have changed.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import ssl
from typing import Final

import kopf

from sidecar.coordinator.discovery import DiscoveryError
from sidecar.coordinator.discovery.kube_access import Access

READ_AGAIN_AFTER: Final = datetime.timedelta(minutes=5)
"""kubelet replaces a projected token at 80% of its life, which is at least ten minutes."""

PAUSES_S: Final = (1.0, 2.0, 4.0, 8.0, 15.0)
"""Before the same credentials are given again; the last one is repeated."""
LOOK_EVERY_S: Final = 0.5
"""How often the files are read meanwhile."""
HELD_S: Final = 60.0
"""Credentials that were good for so long are given again at once the first time."""

LOG: Final = logging.getLogger(__name__)

_Files = tuple[dict[str, str], tuple[tuple[int, int, int], ...]]


class Login:
    """Credentials as often as kopf asks for them. Belongs to one loop."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._given: _Files | None = None
        self._given_at = 0.0
        self._pauses = 0

    async def again(self) -> kopf.ConnectionInfo:
        """Credentials as the files now have them. Waits while they cannot be read, or were refused a moment ago."""
        clock = asyncio.get_running_loop().time
        refused = self._given if clock() - self._given_at < HELD_S else None
        due = clock() + self._pause(refused)
        told = ""
        while True:
            try:
                files = self._access.headers(), self._access.stamp()
                if files != refused or clock() >= due:
                    info = connection(self._access)
                    self._pauses = self._pauses if files == refused else 0
                    self._given, self._given_at = files, clock()
                    return info
            except DiscoveryError as error:
                if str(error) != told:
                    told = str(error)
                    LOG.warning("no credentials for %s yet: %s", self._access.server, told)
            await asyncio.sleep(LOOK_EVERY_S)

    def _pause(self, refused: _Files | None) -> float:
        if refused is None:
            return 0.0
        pause_s = PAUSES_S[min(self._pauses, len(PAUSES_S) - 1)]
        self._pauses += 1
        what = self._access.described
        LOG.warning("%s refuses %s; trying again in %g s, or once it changes", self._access.server, what, pause_s)
        return pause_s


def connection(access: Access) -> kopf.ConnectionInfo:
    """Credentials as the files now have them. DiscoveryError names a file that cannot be read."""
    token = access.headers().get("Authorization", "").removeprefix("Bearer ")
    expires = datetime.datetime.now(datetime.UTC) + READ_AGAIN_AFTER
    context: ssl.SSLContext | None = access.ssl_context()
    return kopf.ConnectionInfo(
        server=access.server,
        ca_path=str(access.ca_file) if access.ca_file else None,
        ca_data=access.ca_data.encode() if access.ca_data else None,
        certificate_path=str(access.cert_file) if access.cert_file else None,
        private_key_path=str(access.key_file) if access.key_file else None,
        certificate_data=access.cert_data or None,
        private_key_data=access.key_data or None,
        insecure=False if context is not None else None,
        token=token or None,
        scheme="Bearer" if token else None,
        default_namespace=access.namespace,
        expiration=expires.replace(tzinfo=None),
    )
