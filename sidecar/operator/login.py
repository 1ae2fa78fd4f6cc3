"""How kopf gets its credentials: the same files as everything else here, read again before a token runs out."""

from __future__ import annotations

import datetime
import ssl
from typing import Final

import kopf

from sidecar.coordinator.discovery.kube_access import Access

READ_AGAIN_AFTER: Final = datetime.timedelta(minutes=5)
"""kubelet replaces a projected token at 80% of its life, which is at least ten minutes."""


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
