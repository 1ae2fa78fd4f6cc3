"""Who calls, and may they: roles, tokens, client certificates, one rule a method.

Roles are ordered, viewer < operator < admin. A method without a rule is denied, so that a new method is closed until
someone decides. Tokens come from files that hold one token a line (two while one replaces another), are read again
when they change, and are compared in constant time. A server without any credential configured trusts its callers as
admin, which is why it listens on loopback and Unix sockets only unless told otherwise (see `server`).
"""

from __future__ import annotations

import enum
import hmac
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc

from sidecar.rpc import tls
from sidecar.rpc.errors import Failure, failure

LOG: Final = logging.getLogger(__name__)

_LOOK_EVERY_S: Final = 1.0


class Role(enum.IntEnum):
    """What a caller may do; each includes the ones before."""

    VIEWER = 1
    """Read: admission, identity, recorded operations."""
    OPERATOR = 2
    """Change caches and free queues; withdraw operations."""
    ADMIN = 3
    """Stop and resume scheduling."""


def parse_role(text: str) -> Role:
    """ValueError lists the roles there are."""
    try:
        return Role[text.strip().upper()]
    except KeyError:
        names = ", ".join(role.name.lower() for role in Role)
        raise ValueError(f"unknown role {text!r}; expected one of {names}") from None


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, for the audit log. Never holds a secret."""

    name: str
    """E.g. "local", "token:admin-token", "cert:coordinator"."""
    role: Role


OPEN_METHODS: Final = frozenset({"/grpc.health.v1.Health/Check", "/grpc.health.v1.Health/Watch"})
"""Answered to everyone: probes bring no credentials."""

REFLECTION_PREFIX: Final = "/grpc.reflection."
"""Reflection is registered on loopback only; where it is registered, any viewer may use it."""


class TokenFile:
    """The tokens of one role, kept current."""

    def __init__(self, role: Role, path: Path) -> None:
        """OSError or ValueError when the file cannot be used now: a server must not start half protected."""
        self.role = role
        self.path = path
        self._stamp = tls.stamp(path)  # before it is read: what is written in between is then read again
        self._tokens = [token.encode() for token in tls.read_tokens(path)]
        self._looked = time.monotonic()
        self._complained = False

    def matches(self, presented: bytes) -> bool:
        """Whether this is one of the tokens. Every token is compared, so time tells nothing."""
        self._refresh()
        found = False
        for token in self._tokens:
            found |= hmac.compare_digest(token, presented)
        return found

    def _refresh(self) -> None:
        now = time.monotonic()
        if now - self._looked < _LOOK_EVERY_S:
            return
        self._looked = now
        seen = tls.stamp(self.path)
        if seen == self._stamp and not self._complained:
            return
        try:
            self._tokens = [token.encode() for token in tls.read_tokens(self.path)]
        except (OSError, ValueError) as error:
            if not self._complained:
                LOG.warning("tokens not reloaded, the previous ones stay in force: %s", error)
            self._complained = True
            return
        self._complained = False
        self._stamp = seen
        LOG.info("tokens reloaded path=%s count=%d", self.path, len(self._tokens))


@dataclass(slots=True)
class Authorizer:
    """Decides for one server."""

    rules: Mapping[str, Role]
    """Full method name ("/kvctl.v1.CacheAdmin/ResetPrefixCache") -> least role."""
    tokens: Sequence[TokenFile] = ()
    certificate_roles: Mapping[str, Role] = field(default_factory=dict)
    """Common name or subject alternative name of a verified client certificate -> role."""
    certificate_default: Role | None = Role.VIEWER
    """Role of a verified certificate not in `certificate_roles`; None denies it."""
    mutual_tls: bool = False

    @property
    def enforced(self) -> bool:
        """Whether callers must prove who they are."""
        return bool(self.tokens) or self.mutual_tls

    def changes(self, method: str) -> bool:
        """Whether a method changes anything: viewers may not call it."""
        return self.rules.get(method, Role.VIEWER) > Role.VIEWER

    def authorize(
        self, method: str, metadata: Sequence[tuple[str, str | bytes]], auth_context: Mapping[str, Sequence[bytes]]
    ) -> Caller:
        """The caller, or a Failure: UNAUTHENTICATED without a known credential, PERMISSION_DENIED for too small a
        role or a method without a rule. Both name the method and the role it needs.
        """
        if method in OPEN_METHODS:
            return Caller("anyone", Role.VIEWER)
        needed = Role.VIEWER if method.startswith(REFLECTION_PREFIX) else self.rules.get(method)
        if needed is None:
            raise failure(
                grpc.StatusCode.PERMISSION_DENIED,
                "ROLE_TOO_SMALL",
                f"{method} has no access rule and is denied to everyone",
                metadata={"method": method},
            )
        caller = self._identify(method, needed, metadata, auth_context)
        if caller.role < needed:
            raise failure(
                grpc.StatusCode.PERMISSION_DENIED,
                "ROLE_TOO_SMALL",
                f"{method} needs the role {needed.name.lower()}; {caller.name} has {caller.role.name.lower()}",
                metadata={"method": method, "role_needed": needed.name.lower(), "role": caller.role.name.lower()},
            )
        return caller

    def _identify(
        self,
        method: str,
        needed: Role,
        metadata: Sequence[tuple[str, str | bytes]],
        auth_context: Mapping[str, Sequence[bytes]],
    ) -> Caller:
        if not self.enforced:
            return Caller("local", Role.ADMIN)
        candidates: list[Caller] = []
        presented = _bearer(metadata)
        if presented is not None and self.tokens:
            known = self._by_token(presented)
            if known is None:
                raise _unauthenticated(method, needed, "the bearer token is not known here (was it rotated?)")
            candidates.append(known)
        certified = self._by_certificate(auth_context)
        if certified is not None:
            candidates.append(certified)
        if candidates:
            return max(candidates, key=lambda caller: caller.role)
        wanted = " or ".join(
            text
            for text, on in (("a bearer token", bool(self.tokens)), ("a client certificate", self.mutual_tls))
            if on
        )
        raise _unauthenticated(method, needed, f"no usable credential came with the call; expected {wanted}")

    def _by_token(self, presented: bytes) -> Caller | None:
        found: Caller | None = None
        for file in self.tokens:
            if file.matches(presented) and (found is None or file.role > found.role):
                found = Caller(f"token:{file.path.name}", file.role)
        return found

    def _by_certificate(self, auth_context: Mapping[str, Sequence[bytes]]) -> Caller | None:
        if not self.mutual_tls:
            return None
        names = [
            value.decode("utf-8", "replace")
            for key in ("x509_common_name", "x509_subject_alternative_name")
            for value in auth_context.get(key, ())
        ]
        if not names:
            return None
        known = [(self.certificate_roles[name], name) for name in names if name in self.certificate_roles]
        if known:
            role, name = max(known)
            return Caller(f"cert:{name}", role)
        return Caller(f"cert:{names[0]}", self.certificate_default) if self.certificate_default is not None else None


def _bearer(metadata: Sequence[tuple[str, str | bytes]]) -> bytes | None:
    for key, value in metadata:
        if key.lower() != "authorization":
            continue
        text = value.decode("latin-1") if isinstance(value, bytes) else value
        scheme, _, token = text.strip().partition(" ")
        if scheme.lower() == "bearer" and token.strip():
            return token.strip().encode("utf-8", "replace")
    return None


def _unauthenticated(method: str, needed: Role, why: str) -> Failure:
    return failure(
        grpc.StatusCode.UNAUTHENTICATED,
        "BAD_CREDENTIALS",
        f"{method} needs the role {needed.name.lower()}: {why}",
        metadata={"method": method, "role_needed": needed.name.lower()},
    )
