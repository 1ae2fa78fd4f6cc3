"""Where the Kubernetes API is and who we are there: in a pod, or by a kubeconfig file.

Credentials are files that change under a running process: a projected service-account token lives for an hour, and a
client that read it once is turned away from then on (kubernetes-client/python#1768). So nothing here holds a token;
it is read for each request, and certificates when their file has changed.
"""

from __future__ import annotations

import base64
import os
import re
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

_WORD: Final = re.compile(r"[!-~]+")


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
    """KUBECONFIG, else the pod's own service account, else ~/.kube/config. DiscoveryError when there is none.

    KUBECONFIG may list several files, of which the first that is there is used.
    """
    named = [Path(one) for one in os.environ.get("KUBECONFIG", "").split(os.pathsep) if one]
    if named:
        return from_kubeconfig(next((path for path in named if path.exists()), named[0]))
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
    """The current context of a kubeconfig file. DiscoveryError names the file, what was found and what was expected."""
    config = _Kubeconfig(path)
    context = config.entry("context", config.current)
    cluster = config.entry("cluster", context.text("cluster"))
    user = config.entry("user", context.text("user")) if "user" in context.fields else _Entry(path, "no user", {})
    if "exec" in user.fields or "auth-provider" in user.fields:
        raise DiscoveryError(f"kubeconfig {path}: its user logs in by a plugin, which is not supported; use a token")
    server = cluster.text("server")
    if not server.startswith(("https://", "http://")):
        raise cluster.wrong(f"server is {server!r}; expected a URL, e.g. https://10.0.0.1:6443")
    return Access(
        server=server.rstrip("/"),
        namespace=context.text("namespace", "default"),
        ca_file=cluster.file("certificate-authority"),
        # Only comments around a certificate are ever anything but ASCII.
        ca_data=cluster.pem("certificate-authority-data").decode("ascii", "ignore"),
        token_file=user.file("tokenFile"),
        token=user.token(),
        cert_file=user.file("client-certificate"),
        key_file=user.file("client-key"),
        cert_data=user.pem("client-certificate-data"),
        key_data=user.pem("client-key-data"),
    )


@dataclass(frozen=True, slots=True)
class _Entry:
    """A context, cluster or user of a kubeconfig file."""

    path: Path
    called: str
    """As in: cluster 'prod'."""
    fields: dict[str, object]

    def wrong(self, what: str) -> DiscoveryError:
        return DiscoveryError(f"kubeconfig {self.path}: {self.called}: {what}")

    def text(self, key: str, otherwise: str | None = None) -> str:
        """A field that is text; missing, it is `otherwise`, or wrong where that is None."""
        found = self.fields.get(key)
        if isinstance(found, str) and (found or otherwise is not None):
            return found
        if found is not None and found != "":
            raise self.wrong(f"{key} is no text but {type(found).__name__}; put it in quotes")
        if otherwise is None:
            raise self.wrong(f"it has no {key}")
        return otherwise

    def token(self) -> str:
        """A bearer token; empty where there is none."""
        found = self.text("token", "").strip()
        if found and not _WORD.fullmatch(found):
            raise self.wrong("token is not one word of ASCII; expected it in one piece, without line breaks")
        return found

    def file(self, key: str) -> Path | None:
        """A file name, taken from where the kubeconfig file is."""
        name = self.text(key, "")
        return self.path.parent / name if name else None

    def pem(self, key: str) -> bytes:
        """What an inline certificate or key is; empty where there is none."""
        try:
            content = base64.b64decode(self.text(key, ""))
        except ValueError as error:
            raise self.wrong(f"{key} is not base64 ({error}); expected a PEM file, encoded") from error
        if content and b"-----BEGIN " not in content:
            raise self.wrong(f"{key} is base64 of something that is no PEM file; expected -----BEGIN ... in it")
        return content


class _Kubeconfig:
    """A kubeconfig file, read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise self._wrong(f"it cannot be read by uid {os.getuid()}: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise self._wrong("it is not UTF-8 text; expected YAML") from error
        except (yaml.YAMLError, RecursionError) as error:
            mark = getattr(error, "problem_mark", None)
            line = f", line {mark.line + 1}" if mark else ""
            raise self._wrong(f"it is not YAML{line}: {getattr(error, 'problem', None) or 'too deep'}") from error
        if not isinstance(content, dict):
            found = "it is empty" if content is None else f"it holds a {type(content).__name__}, not a mapping"
            raise self._wrong(f"{found}; expected clusters, users, contexts and current-context")
        self._content: dict[str, object] = content
        current = content.get("current-context")
        if not isinstance(current, str) or not current:
            raise self._wrong(f"it names no current-context; {self._choose()}")
        self.current = current

    def entry(self, key: str, name: str) -> _Entry:
        """The context, cluster or user of that name."""
        named = self._named(key)
        if name not in named:
            there = self._choose() if key == "context" else f"there: {', '.join(sorted(named)) or 'none'}"
            raise self._wrong(f"no {key} is named {name!r}; {there}")
        found = named[name]
        if not isinstance(found, dict):
            raise self._wrong(f"{key} {name!r} is {'empty' if found is None else 'no mapping'}")
        return _Entry(self._path, f"{key} {name!r}", found)

    def _named(self, key: str) -> dict[str, object]:
        listed = self._content.get(f"{key}s") or []
        if not isinstance(listed, list):
            raise self._wrong(f"{key}s is no list; expected '- name: ...' items")
        return {str(each.get("name")): each.get(key) for each in listed if isinstance(each, dict)}

    def _choose(self) -> str:
        names = ", ".join(sorted(self._named("context")))
        return f"choose one with `kubectl config use-context NAME`: {names}" if names else "it has no contexts at all"

    def _wrong(self, what: str) -> DiscoveryError:
        return DiscoveryError(f"kubeconfig {self._path}: {what}")
