"""Addresses people type: `host:port`, `[v6]:port`, `unix:/path`, `dns:///name:port`.

gRPC accepts nearly any string as a target and complains much later, in a call, with a resolver's error. Here a wrong
address is a ValueError with one clear sentence before anything is opened. The variables that Kubernetes injects for a
Service named like this program (`KVCTL_PORT=tcp://10.0.0.1:7700`) are recognised and named, because they reach people
as "bad port" otherwise.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

MAX_SOCKET_PATH_BYTES: Final = 107
"""Linux's limit on the path of a Unix socket."""

_HOST_NAME: Final = re.compile(
    r"(?=.{1,253}\Z)[A-Za-z0-9_]([A-Za-z0-9_-]{0,62})(\.[A-Za-z0-9_]([A-Za-z0-9_-]{0,62}))*\.?"
)
_FORMS: Final = "host:port, [ipv6]:port, unix:/absolute/path or dns:///host:port"


@dataclass(frozen=True, slots=True)
class Address:
    """One address, checked."""

    kind: Literal["tcp", "unix", "dns"]
    host: str = ""
    """Host name or IP address, without brackets; empty for unix."""
    port: int = 0
    """0 only when listening: the kernel picks one."""
    path: str = ""
    """Socket path for unix."""

    @property
    def target(self) -> str:
        """What gRPC is given."""
        if self.kind == "unix":
            return f"unix:{self.path}"
        return f"dns:///{self.host_port}" if self.kind == "dns" else self.host_port

    @property
    def host_port(self) -> str:
        """`host:port`, with brackets where IPv6 needs them."""
        return join(self.host, self.port)

    @property
    def ip(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
        """The IP address when the host is one."""
        try:
            return ipaddress.ip_address(self.host)
        except ValueError:
            return None

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it: a Unix socket, a loopback address or `localhost`."""
        if self.kind == "unix":
            return True
        if self.host.lower() == "localhost":
            return True
        ip = self.ip
        return ip is not None and ip.is_loopback

    @property
    def everywhere(self) -> bool:
        """Whether it stands for every interface."""
        ip = self.ip
        return ip is not None and ip.is_unspecified

    def with_port(self, port: int) -> Address:
        """The same address on another port."""
        return Address(self.kind, self.host, port, self.path)

    def __str__(self) -> str:
        return self.target


def join(host: str, port: int) -> str:
    """`host:port`, with brackets around IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse(text: str, *, what: str = "address") -> Address:
    """An address to call. ValueError names `what`, the text found and the forms expected."""
    return _parse(text, what, listening=False)


def parse_listen(text: str, *, what: str = "listen address") -> Address:
    """An address to listen on: port 0 allowed, `:7700` means every interface, dns: not allowed."""
    return _parse(f"[::]{text}" if text.startswith(":") and text.count(":") == 1 else text, what, listening=True)


def why_they_clash(listen: Sequence[Address], metrics: Address | None) -> str:
    """Why these cannot all be listened on at once, as far as they tell it themselves; empty when nothing speaks against
    it. Looked at one by one, each of them is free.
    """
    for index, one in enumerate(listen):
        for other in listen[:index]:
            if _clash(one, other) and one == other:
                return f"--listen has {one} twice; give it once"
            if _clash(one, other):
                return f"--listen {other} and {one} both take port {one.port}; give one of them, or different ports"
        if metrics is not None and _clash(one, metrics):
            return f"--listen {one} and --metrics {metrics} both take port {one.port}; give them different ports"
    return ""


def _clash(one: Address, other: Address) -> bool:
    if one.kind == "unix" or other.kind == "unix":
        return one == other
    if not one.port or one.port != other.port:
        return False
    # An address for every interface takes the port of all of them, those of the other version of IP included.
    return one.everywhere or other.everywhere or bool(_hosts(one) & _hosts(other))


def _hosts(address: Address) -> set[str]:
    if address.host.lower() == "localhost":
        return {"127.0.0.1", "::1"}
    return {str(address.ip or address.host.lower())}


def service_link(name: str, value: str) -> bool:
    """Whether an environment variable was injected by Kubernetes for a Service and is not a setting of ours."""
    return value.startswith(("tcp://", "udp://", "sctp://")) and "_PORT" in name


def _parse(text: str, what: str, *, listening: bool) -> Address:
    stripped = text.strip()
    if not stripped:
        raise ValueError(f"{what} is empty; expected {_FORMS}")
    if stripped.startswith(("tcp://", "udp://")):
        raise ValueError(
            f"{what} {stripped!r} is a Kubernetes service link, not an address; "
            "set enableServiceLinks: false on the pod, or give host:port"
        )
    if stripped.startswith(("http://", "https://", "grpc://")):
        raise ValueError(f"{what} {stripped!r} is a URL; give it without the scheme: {_FORMS}")
    if stripped.startswith("unix:"):
        return _parse_unix(stripped, what)
    if stripped.startswith("dns:"):
        if listening:
            raise ValueError(
                f"{what} {stripped!r} cannot be listened on; expected host:port, [ipv6]:port or unix:/path"
            )
        rest = stripped.removeprefix("dns:").lstrip("/")
        host, port = _split(rest, stripped, what, listening=False)
        return Address("dns", host, port)
    host, port = _split(stripped, stripped, what, listening=listening)
    return Address("tcp", host, port)


def _parse_unix(text: str, what: str) -> Address:
    path = text.removeprefix("unix:")
    path = path.removeprefix("//") if path.startswith("///") else path
    if not path:
        raise ValueError(f"{what} {text!r} has no path; expected unix:/absolute/path")
    absolute = os.path.abspath(path)
    size = len(os.fsencode(absolute))
    if size > MAX_SOCKET_PATH_BYTES:
        raise ValueError(
            f"{what}: the socket path is {size} bytes long and Linux allows {MAX_SOCKET_PATH_BYTES}; "
            f"use a shorter directory: {absolute}"
        )
    return Address("unix", path=absolute)


def _split(text: str, whole: str, what: str, *, listening: bool) -> tuple[str, int]:
    host, separator, port_text = text.rpartition(":")
    if not separator:
        raise ValueError(f"{what} {whole!r} has no port; expected {_FORMS}")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        _check_ipv6(host, whole, what)
    elif ":" in host:
        raise ValueError(f"{what} {whole!r}: an IPv6 address needs brackets, e.g. [::1]:7700")
    elif not _HOST_NAME.fullmatch(host):
        raise ValueError(f"{what} {whole!r}: {host!r} is not a host name or IP address; expected {_FORMS}")
    elif host.replace(".", "").isdigit() and not _is_ip(host):
        raise ValueError(f"{what} {whole!r}: {host!r} is not a valid IPv4 address")
    if not (port_text.isascii() and port_text.isdigit()) or int(port_text) > 65535:
        raise ValueError(f"{what} {whole!r}: port {port_text!r} is not a number from 1 to 65535")
    port = int(port_text)
    if port == 0 and not listening:
        raise ValueError(f"{what} {whole!r}: port 0 cannot be called")
    return host, port


def _check_ipv6(host: str, whole: str, what: str) -> None:
    bare = host.partition("%")[0]
    try:
        ipaddress.IPv6Address(bare)
    except ValueError:
        raise ValueError(f"{what} {whole!r}: {host!r} is not an IPv6 address") from None


def _is_ip(host: str) -> bool:
    try:
        ipaddress.IPv4Address(host)
    except ValueError:
        return False
    return True


# --- why a listen address cannot be had --------------------------------------------------------------------------


def served(address: Address) -> Address:
    """The same address, but 0.0.0.0 for [::] where the kernel has no IPv6: every interface is every one that there is.

    gRPC does so by itself.
    """
    if address.everywhere and ":" in address.host:
        try:
            socket.socket(socket.AF_INET6, socket.SOCK_STREAM).close()
        except OSError:
            return Address("tcp", "0.0.0.0", address.port)  # noqa: S104 - what was asked for
    return address


def why_not_bindable(address: Address) -> str:
    """Try to bind for a moment; empty when that works, else one sentence that names the address and the cause.

    gRPC says only "failed to bind"; and for a Unix path it silently takes the socket away from whoever has it.
    """
    if address.kind == "unix":
        return _why_not_unix(Path(address.path))
    address = served(address)
    try:
        infos = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        return f"{address}: cannot be resolved: {error.strerror or error}"
    family, kind, protocol, _, place = infos[0]
    with socket.socket(family, kind, protocol) as probe:
        # What servers do: without it, a port in TIME_WAIT would be reported as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(place)
            probe.listen(1)
        except OSError as error:
            return _bind_error(address, error)
    return ""


def _bind_error(address: Address, error: OSError) -> str:
    match error.errno:
        case 98:
            return (
                f"{address}: port {address.port} is already in use by another process; stop it or choose another port"
            )
        case 13:
            return f"{address}: uid {os.getuid()} may not bind port {address.port}; choose a port above 1023"
        case 99:
            return f"{address}: {address.host} is not an address of this machine"
    return f"{address}: cannot be bound: {error.strerror or error}"


def _why_not_unix(path: Path) -> str:
    if not path.parent.is_dir():
        return f"unix:{path}: the directory {path.parent} does not exist; create it first"
    if not os.access(path.parent, os.W_OK | os.X_OK):
        return f"unix:{path}: uid {os.getuid()} may not write in {path.parent}"
    if not os.path.lexists(path):
        return ""
    if not path.is_socket():  # a link that leads nowhere included
        return f"unix:{path}: a file that is not a socket is in the way; remove it or choose another path"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return ""  # left behind by a process that is gone
        except OSError as error:
            return f"unix:{path}: already in use, and it cannot be asked by whom: {error.strerror or error}"
    return f"unix:{path}: already in use by another process; stop it or choose another path"
