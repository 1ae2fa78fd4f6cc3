"""Settings of a server: one table, four layers, one precedence: flag > environment > file > default.

Every setting has one name: `token_file` is `--token-file`, `<PREFIX>TOKEN_FILE` and the key `token_file` in the YAML
file. An error names the layer a value came from. Unknown keys and variables are errors, because a misspelt `token_file`
must not mean "no token"; the variables that Kubernetes injects for a Service of the same name are not ours and are
left alone. This module has what every server here shares; a server adds its own rows to the table.
"""

from __future__ import annotations

import argparse
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from engine_bridge import __version__
from sidecar.rpc import addresses, logs
from sidecar.rpc.addresses import Address
from sidecar.rpc.auth import Authorizer, Role, TokenFile, parse_role
from sidecar.rpc.tls import ServerTls

Raw = str | list[str]

MAX_FILE_BYTES: Final = 16 * 1024 * 1024
_LONGEST_SHOWN: Final = 80


class ConfigError(ValueError):
    """A setting that cannot be used; the text names the layer, the value and what was expected."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table."""

    read: Callable[[Raw], object]
    """From text to value; ValueError says what was expected."""
    default: Callable[[], Raw]
    help: str
    many: bool = False
    switch: bool = False
    metavar: str = ""


Table = Mapping[str, Setting]


@dataclass(frozen=True, slots=True)
class Program:
    """What is being configured."""

    name: str
    prefix: str
    """Of its environment variables, with the underscore."""
    description: str
    table: Table


@dataclass(frozen=True, slots=True)
class ServerSecurity:
    """How a server proves itself and whom it serves; the fields are settings of SERVER_TABLE."""

    tls_cert: Path | None
    tls_key: Path | None
    tls_client_ca: Path | None
    client_role: Mapping[str, Role]
    token_file: Sequence[tuple[Role, Path]]

    def check(self, listen: Sequence[Address], metrics: Address | None) -> None:
        """ConfigError for settings that need or exclude each other, and for addresses that do."""
        if why := addresses.why_they_clash(listen, metrics):
            raise ConfigError(why)
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert and --tls-key go together; one of them is missing")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ConfigError("--tls-client-ca needs --tls-cert and --tls-key")
        if self.client_role and self.tls_client_ca is None:
            raise ConfigError("--client-role needs --tls-client-ca: without it no client certificate is asked for")
        sockets = [str(address) for address in listen if address.kind == "unix"]
        if sockets and self.tls_client_ca is not None and not self.token_file:
            raise ConfigError(
                f"--listen {sockets[0]}: over a Unix socket nobody shows a client certificate, so with --tls-client-ca "
                "alone every call there would be refused; add --token-file ROLE=FILE, or leave the socket out"
            )

    def tls(self) -> ServerTls | None:
        """The server's certificate, None for plain text."""
        if self.tls_cert is None or self.tls_key is None:
            return None
        return ServerTls(self.tls_cert, self.tls_key, self.tls_client_ca)

    def authorizer(self, rules: Mapping[str, Role]) -> Authorizer:
        """Who may do what. OSError or ValueError when a token file cannot be used."""
        return Authorizer(
            rules=rules,
            tokens=[TokenFile(role, path) for role, path in self.token_file],
            certificate_roles=self.client_role,
            mutual_tls=self.tls_client_ca is not None,
        )

    def describe(self) -> str:
        """How callers prove who they are, for a person."""
        proof = []
        if self.token_file:
            proof.append("tokens for " + ", ".join(sorted({role.name.lower() for role, _ in self.token_file})))
        if self.tls_client_ca is not None:
            proof.append("client certificates")
        return " or ".join(proof) or "anyone who can connect is admin"


def load(program: Program, arguments: Sequence[str], environment: Mapping[str, str]) -> tuple[dict[str, object], bool]:
    """(values of every setting, whether --check was given). ConfigError for what cannot be used; SystemExit for --help
    and --version.
    """
    parsed = vars(_parser(program).parse_args(list(arguments)))
    check = bool(parsed.pop("check"))
    file_name = parsed.pop("config") or environment.get(f"{program.prefix}CONFIG", "")
    layers: list[tuple[str, Mapping[str, Raw]]] = [
        ("flag", {name: value for name, value in parsed.items() if value is not None}),
        ("environment", _from_environment(program, environment)),
        ("file", _from_file(program, Path(file_name)) if file_name else {}),
    ]
    values = {name: _resolve(program, name, setting, layers, file_name) for name, setting in program.table.items()}
    return values, check


def _resolve(
    program: Program, name: str, setting: Setting, layers: Sequence[tuple[str, Mapping[str, Raw]]], file_name: str
) -> object:
    for layer, values in layers:
        if name not in values:
            continue
        try:
            return setting.read(values[name])
        except ValueError as error:
            where = {
                "flag": f"--{name.replace('_', '-')}",
                "environment": f"{program.prefix}{name.upper()}",
                "file": f"{file_name}: {name}",
            }[layer]
            raise ConfigError(f"{where}: {error}") from error
    return setting.read(setting.default())


# --- layers ------------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, exit code 2."""
        raise ConfigError(f"{message}; see {self.prog} --help")


def _parser(program: Program) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=program.name,
        description=program.description,
        epilog=f"Every option can also be given as {program.prefix}<NAME> or in --config FILE; "
        "flags win, then the environment.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{program.name} {__version__}")
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings")
    parser.add_argument("--check", action="store_true", help="check the settings, say what they mean, and exit")
    for name, setting in program.table.items():
        flag = f"--{name.replace('_', '-')}"
        if setting.switch:
            parser.add_argument(flag, dest=name, action="store_const", const="true", help=setting.help)
        elif setting.many:
            parser.add_argument(flag, dest=name, action="append", metavar=setting.metavar, help=setting.help)
        else:
            parser.add_argument(flag, dest=name, metavar=setting.metavar, help=setting.help)
    return parser


_SERVICE_LINK: Final = re.compile(r"(.*_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT|PORT_\d+_(TCP|UDP|SCTP)(_.*)?)")


def _from_environment(program: Program, environment: Mapping[str, str]) -> dict[str, Raw]:
    found: dict[str, Raw] = {}
    for variable, value in environment.items():
        if not variable.startswith(program.prefix) or not value:
            continue
        suffix = variable.removeprefix(program.prefix)
        setting = program.table.get(suffix.lower())
        if setting is not None:
            if addresses.service_link("_PORT", value):
                raise ConfigError(
                    f"{variable}={value} is a Kubernetes service link, not a setting; set enableServiceLinks: false on "
                    "the pod, or rename the Service"
                )
            parts = [part.strip() for part in value.split(",") if part.strip()]
            if not parts:  # it would win over a file's token_file and leave the server without one
                raise ConfigError(f"{variable}={value!r} has nothing in it; give a value, or unset it")
            found[suffix.lower()] = parts if setting.many else value
        elif suffix != "CONFIG" and not _SERVICE_LINK.fullmatch(suffix):
            raise ConfigError(
                f"{variable} is not a setting of {program.name}; known: {', '.join(program.table).upper()}"
            )
    return found


def _from_file(program: Program, path: Path) -> dict[str, Raw]:
    import yaml  # start-up time: only where a file is used

    text = _text_of(path)
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        content = yaml.safe_load(text)
    except RecursionError:
        raise ConfigError(f"--config {path}: nested too deeply") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"--config {path}: expected a mapping of settings, found {type(content).__name__}")
    lines: dict[str, int] = {}
    for key, _ in root.value:
        line = key.start_mark.line + 1
        if key.value in lines:  # YAML would let the last one win: a token file given twice would be one role less
            raise ConfigError(f"--config {path}, line {line}: {key.value} is given before, in line {lines[key.value]}")
        lines[key.value] = line
    return {
        str(name): _file_value(program, f"--config {path}, line {lines.get(name, 0)}: {name}", str(name), value)
        for name, value in content.items()
    }


def _text_of(path: Path) -> str:
    try:
        # A device or a pipe may never end; O_NONBLOCK, because opening a pipe waits for its writer.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"--config {path} is not a regular file")
            content = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read by uid {os.getuid()}: {error.strerror}") from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigError(f"--config {path} is larger than {MAX_FILE_BYTES >> 20} MiB")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"--config {path} is not UTF-8 text") from None


def _file_value(program: Program, where: str, name: str, value: object) -> Raw:
    setting = program.table.get(name)
    if setting is None:
        raise ConfigError(f"{where} is not a setting; known: {', '.join(program.table)}")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return [str(value)] if setting.many else str(value)
    if setting.many and isinstance(value, dict):
        # As it would be said in a flag: canary: true is canary=true, and what has no value is no "None".
        words = {True: "true", False: "false", None: ""}
        return [
            f"{key}={words[item] if item is None or isinstance(item, bool) else item}" for key, item in value.items()
        ]
    if setting.many and isinstance(value, list) and all(isinstance(item, str | int) for item in value):
        return [str(item) for item in value]
    raise ConfigError(f"{where} cannot be a {type(value).__name__}")


# --- reading values ----------------------------------------------------------------------------------------------


def one(raw: Raw) -> str:
    """A single text."""
    if isinstance(raw, list):
        raise ValueError(f"expected one value, found {len(raw)}")
    return raw.strip()


def shown(text: str) -> str:
    """A value within an error message: quoted, and cut when nobody would read it all."""
    if len(text) <= _LONGEST_SHOWN:
        return repr(text)
    return f"{text[:_LONGEST_SHOWN]!r}... ({len(text)} characters)"


def several(raw: Raw) -> list[str]:
    """A list of texts."""
    return raw if isinstance(raw, list) else [raw]


def path_or_none(raw: Raw) -> Path | None:
    """A path; None when empty."""
    text = one(raw)
    return Path(text) if text else None


def pair(text: str, form: str) -> tuple[str, str]:
    """`a=b`."""
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise ValueError(f"{shown(text)} is not {form}")
    return key.strip(), value.strip()


def listen(raw: Raw) -> list[Address]:
    """Addresses to listen on, at least one."""
    if not several(raw):
        raise ValueError("no address is given, and nobody could be served")
    return [addresses.parse_listen(text) for text in several(raw)]


def metrics(raw: Raw) -> Address | None:
    """The address of the plain HTTP pages; None for "off"."""
    text = one(raw)
    if text in ("off", "false", ""):  # in YAML, off is false
        return None
    address = addresses.parse_listen(text, what="metrics address")
    if address.kind != "tcp":
        raise ValueError(f"{shown(text)}: metrics and probes need host:port")
    return address


def client_roles(raw: Raw) -> dict[str, Role]:
    """Names of client certificates and their roles."""
    return {name: parse_role(role) for name, role in (pair(text, "NAME=ROLE") for text in several(raw))}


def token_files(raw: Raw) -> list[tuple[Role, Path]]:
    """Token files by role."""
    return [(parse_role(role), Path(path)) for role, path in (pair(text, "ROLE=FILE") for text in several(raw))]


def boolean(raw: Raw) -> bool:
    """Yes or no."""
    text = one(raw).lower()
    if text in ("true", "1", "yes", "on"):
        return True
    if text in ("false", "0", "no", "off", ""):
        return False
    raise ValueError(f"{shown(text)} is neither true nor false")


def count(least: int, most: int) -> Callable[[Raw], int]:
    """A whole number within bounds."""

    def read(raw: Raw) -> int:
        text = one(raw)
        if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
            raise ValueError(f"{shown(text)} is not a number from {least} to {most}")
        return int(text)

    return read


def seconds(raw: Raw) -> float:
    """A duration: 20s, 500ms, 1m, 12h, 30d."""
    match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,9})?)\s*(ms|s|m|h|d)?", one(raw))
    if match is None:
        raise ValueError(f"{shown(one(raw))} is not a duration; expected e.g. 20s, 500ms, 1m, 12h or 30d")
    units = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    return float(match.group(1)) * units[match.group(2) or "s"]


def choice(choices: Sequence[str]) -> Callable[[Raw], str]:
    """One of a few words."""

    def read(raw: Raw) -> str:
        text = one(raw).lower()
        if text not in choices:
            raise ValueError(f"{shown(text)} is not one of {', '.join(choices)}")
        return text

    return read


def server_table(listen_default: str, metrics_default: str) -> dict[str, Setting]:
    """The settings that every server here has."""
    return {
        "listen": Setting(
            listen, lambda: [listen_default], f"gRPC address; may be repeated ({listen_default})", True, metavar="ADDR"
        ),
        "metrics": Setting(
            metrics,
            lambda: metrics_default,
            f"plain HTTP /metrics /livez /readyz, or off ({metrics_default})",
            metavar="ADDR",
        ),
        "tls_cert": Setting(path_or_none, str, "server certificate, PEM; read again when it changes", metavar="FILE"),
        "tls_key": Setting(path_or_none, str, "its private key, PEM", metavar="FILE"),
        "tls_client_ca": Setting(
            path_or_none, str, "accept only clients with a certificate signed by this CA", metavar="FILE"
        ),
        "client_role": Setting(
            client_roles,
            list,
            "role of a client certificate by its name: viewer, operator or admin (viewer); may be repeated",
            many=True,
            metavar="NAME=ROLE",
        ),
        "token_file": Setting(
            token_files,
            list,
            "file of bearer tokens for a role, one a line; read again when it changes; may be repeated",
            many=True,
            metavar="ROLE=FILE",
        ),
        "insecure": Setting(boolean, lambda: "false", "serve other machines without TLS or credentials", switch=True),
        "log_format": Setting(choice(logs.FORMATS), lambda: "logfmt", "logfmt or json (logfmt)", metavar="FORMAT"),
        "log_level": Setting(
            choice(logs.LEVELS), lambda: "info", "debug, info, warning or error (info)", metavar="LEVEL"
        ),
        "grace": Setting(seconds, lambda: "20s", "time to finish after SIGTERM (20s)", metavar="TIME"),
        "max_calls": Setting(
            count(1, 100_000), lambda: "256", "calls under way at once, watches too (256)", metavar="N"
        ),
        "ready_file": Setting(path_or_none, str, "written once serving: JSON with the bound addresses", metavar="FILE"),
    }
