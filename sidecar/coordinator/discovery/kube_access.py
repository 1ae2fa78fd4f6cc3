"""Where the Kubernetes API is and who we are there: in a pod, or by a kubeconfig file.

Credentials are files that change under a running process: a projected service-account token lives for an hour, and a
client that read it once is turned away from then on (kubernetes-client/python#1768). So nothing here holds a token;
it is read for each request, and certificates when their file has changed.
"""

from __future__ import annotations

import base64
import os
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import yaml

from sidecar.coordinator.discovery import DiscoveryError
from sidecar.rpc import tls

SERVICE_ACCOUNT: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where kubelet mounts a pod's credentials."""


_Entry = dict[str, "str | dict[str, str]"]


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach the API server. Secrets are file names, or content where a kubeconfig file carries them inline."""

    server: str
    """e.g. "https://10.96.0.1:443", without a slash at the end."""
    namespace: str = "default"
    ca_file: Path | None = None
    ca_data: str = ""
    token_file: Path | None = None
    token: str = ""
    cert_file: Path | None = None
    key_file: Path | None = None
    cert_data: bytes = b""
    key_data: bytes = b""

    def headers(self) -> dict[str, str]:
        """Credentials of one request. DiscoveryError names the file that cannot be read, and the uid."""
        if self.token_file is not None:
            try:
                return {"Authorization": f"Bearer {tls.read_token(self.token_file)}"}
            except (OSError, ValueError) as error:
                told = error.strerror if isinstance(error, OSError) else error
                raise DiscoveryError(f"{told}; it comes with the pod's service account") from error
        return {"Authorization": f"Bearer {self.token.strip()}"} if self.token else {}

    @property
    def described(self) -> str:
        """What it shows of itself, in a few words."""
        if self.token_file is not None:
            return f"the token in {self.token_file}"
        if self.token:
            return "the token of the kubeconfig"
        return "the client certificate" if self.cert_file or self.cert_data else "a caller without credentials"

    def stamp(self) -> tuple[tuple[int, int, int], ...]:
        """Changes when a certificate was replaced: connect afresh then."""
        return tls.stamp(self.ca_file, self.cert_file, self.key_file)

    def ssl_context(self) -> ssl.SSLContext | None:
        """TLS as the files now have it; None for plain HTTP. DiscoveryError when a file cannot be used."""
        if not self.server.startswith("https://"):
            return None
        try:
            context = ssl.create_default_context(
                cafile=str(self.ca_file) if self.ca_file else None, cadata=self.ca_data or None
            )
            if self.cert_file is not None:
                context.load_cert_chain(self.cert_file, self.key_file)
            elif self.cert_data:
                _load_inline(context, self.cert_data, self.key_data)
        except (OSError, ssl.SSLError) as error:
            files = ", ".join(str(file) for file in (self.ca_file, self.cert_file, self.key_file) if file)
            raise DiscoveryError(
                f"certificates for {self.server} cannot be used by uid {os.getuid()} ({files or 'inline'}): {error}"
            ) from error
        return context


def _load_inline(context: ssl.SSLContext, cert: bytes, key: bytes) -> None:
    """OpenSSL takes a client certificate from a file only; it exists (0600) for as long as the call."""
    with tempfile.NamedTemporaryFile(suffix=".pem") as file:
        file.write(cert + b"\n" + key)
        file.flush()
        context.load_cert_chain(file.name)


def find() -> Access:
    """KUBECONFIG, else the pod's own service account, else ~/.kube/config. DiscoveryError when there is none."""
    named = os.environ.get("KUBECONFIG")
    if named:
        return from_kubeconfig(Path(named.split(os.pathsep)[0]))
    if os.environ.get("KUBERNETES_SERVICE_HOST"):
        return in_cluster()
    usual = Path.home() / ".kube/config"
    if usual.is_file():
        return from_kubeconfig(usual)
    raise DiscoveryError(
        "no way to a Kubernetes API: KUBECONFIG is not set, this is no pod (KUBERNETES_SERVICE_HOST is not set) and "
        f"{usual} does not exist"
    )


def in_cluster(folder: Path = SERVICE_ACCOUNT) -> Access:
    """The access every pod has, unless automountServiceAccountToken is false."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise DiscoveryError("KUBERNETES_SERVICE_HOST is not set: this is no pod")
    token = folder / "token"
    if not token.exists():
        raise DiscoveryError(f"{token} does not exist: set automountServiceAccountToken: true for this pod")
    namespace = folder / "namespace"
    return Access(
        server=f"https://{f'[{host}]' if ':' in host else host}:{port}",
        namespace=namespace.read_text(encoding="ascii").strip() if namespace.exists() else "default",
        ca_file=folder / "ca.crt",
        token_file=token,
    )


def from_kubeconfig(path: Path) -> Access:
    """The current context of a kubeconfig file."""
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
        context = _named(config, "contexts", config["current-context"], "context")
        cluster = _named(config, "clusters", context["cluster"], "cluster")
        user = _named(config, "users", context["user"], "user") if "user" in context else {}
        server = cluster["server"]
    except OSError as error:
        raise DiscoveryError(
            f"kubeconfig {path} cannot be read by uid {os.getuid()}: {error.strerror or error}"
        ) from error
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise DiscoveryError(f"kubeconfig {path} has no usable current context: {error!r}") from error
    if "exec" in user or "auth-provider" in user:
        raise DiscoveryError(f"kubeconfig {path}: its user logs in by a plugin, which is not supported; use a token")

    def file(where: dict[str, str], key: str) -> Path | None:
        return path.parent / where[key] if key in where else None

    return Access(
        server=server.rstrip("/"),
        namespace=context.get("namespace", "default"),
        ca_file=file(cluster, "certificate-authority"),
        ca_data=base64.b64decode(cluster.get("certificate-authority-data", "")).decode("ascii"),
        token_file=file(user, "tokenFile"),
        token=user.get("token", ""),
        cert_file=file(user, "client-certificate"),
        key_file=file(user, "client-key"),
        cert_data=base64.b64decode(user.get("client-certificate-data", "")),
        key_data=base64.b64decode(user.get("client-key-data", "")),
    )


def _named(config: dict[str, list[_Entry]], group: str, name: str, key: str) -> dict[str, str]:
    for entry in config[group]:
        if entry["name"] == name:
            found = entry[key]
            if isinstance(found, dict):
                return found
    raise ValueError(f"no {key} is named {name!r}")
