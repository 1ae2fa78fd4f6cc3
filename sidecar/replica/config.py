"""The sidecar's settings: one table, four layers, one precedence: flag > environment > file > default.

Every setting has one name: `engine_dir` is `--engine-dir`, `KVCTL_SIDECAR_ENGINE_DIR` and the key `engine_dir` in the
YAML file. An error names the layer a value came from. Unknown keys and variables are errors, because a misspelt
`token_file` must not mean "no token"; the variables Kubernetes injects for a Service named kvctl-sidecar are not ours
and are left alone.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Final, NoReturn

from engine_bridge import __version__
from engine_bridge.protocol import default_engine_dir
from sidecar.rpc import addresses, logs
from sidecar.rpc.addresses import Address
from sidecar.rpc.auth import Role, parse_role

PREFIX: Final = "KVCTL_SIDECAR_"

Raw = str | list[str]


class ConfigError(ValueError):
    """A setting that cannot be used; the text names the layer, the value and what was expected."""


@dataclass(frozen=True, slots=True)
class Config:
    """Everything `kvctl-sidecar` can be told, checked."""

    name: str
    labels: Mapping[str, str]
    engine_dir: Path
    engine_url: str
    engine_token_file: Path | None
    engine_ca: Path | None
    listen: Sequence[Address]
    metrics: Address | None
    tls_cert: Path | None
    tls_key: Path | None
    tls_client_ca: Path | None
    client_role: Mapping[str, Role]
    token_file: Sequence[tuple[Role, Path]]
    insecure: bool
    expect_engines: int
    audit_log: str
    log_format: logs.Format
    log_level: str
    grace: float
    max_calls: int
    stall_after: float
    hung_after: float
    ready_file: Path | None
    check: bool = field(default=False)
    """Validate and exit."""


@dataclass(frozen=True, slots=True)
class _Setting:
    read: Callable[[Raw], object]
    default: Callable[[], Raw]
    help: str
    many: bool = False
    switch: bool = False
    metavar: str = ""


def load(arguments: Sequence[str], environment: Mapping[str, str]) -> Config:
    """Settings from all layers. ConfigError for what cannot be used; SystemExit for --help and --version."""
    parsed = vars(_parser().parse_args(list(arguments)))
    check = bool(parsed.pop("check"))
    file_name = parsed.pop("config") or environment.get(f"{PREFIX}CONFIG", "")
    layers: list[tuple[str, Mapping[str, Raw]]] = [
        ("flag", {name: value for name, value in parsed.items() if value is not None}),
        ("environment", _from_environment(environment)),
        ("file", _from_file(Path(file_name)) if file_name else {}),
    ]
    values = {name: _resolve(name, setting, layers, file_name) for name, setting in _TABLE.items()}
    config = Config(**values, check=check)  # type: ignore[arg-type]
    _check_together(config)
    return config


def _resolve(name: str, setting: _Setting, layers: Sequence[tuple[str, Mapping[str, Raw]]], file_name: str) -> object:
    for layer, values in layers:
        if name not in values:
            continue
        try:
            return setting.read(values[name])
        except ValueError as error:
            raise ConfigError(f"{_where(layer, name, file_name)}: {error}") from error
    return setting.read(setting.default())


def _where(layer: str, name: str, file_name: str) -> str:
    if layer == "flag":
        return f"--{name.replace('_', '-')}"
    return f"{PREFIX}{name.upper()}" if layer == "environment" else f"{file_name}: {name}"


def _check_together(config: Config) -> None:
    if (config.tls_cert is None) != (config.tls_key is None):
        raise ConfigError("--tls-cert and --tls-key go together; one of them is missing")
    if config.tls_client_ca is not None and config.tls_cert is None:
        raise ConfigError("--tls-client-ca needs --tls-cert and --tls-key")
    if config.client_role and config.tls_client_ca is None:
        raise ConfigError("--client-role needs --tls-client-ca: without it no client certificate is asked for")
    if config.stall_after < 1 or config.hung_after < config.stall_after:
        raise ConfigError(
            f"--stall-after is {config.stall_after:g} s and --hung-after {config.hung_after:g} s; expected at least 1 s "
            "for the first and no less than that for the second"
        )
    if config.metrics is not None and config.metrics.port and config.metrics in config.listen:
        raise ConfigError(f"--listen and --metrics are both {config.metrics}; give them different ports")


# --- layers ------------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, exit code 2."""
        raise ConfigError(f"{message}; see kvctl-sidecar --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="kvctl-sidecar",
        description="Serves the KV cache administration API for the vLLM engines beside it.",
        epilog=f"Every option is also {PREFIX}<NAME> and a key of --config FILE; flags win, then the environment.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvctl-sidecar {__version__}")
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings")
    parser.add_argument("--check", action="store_true", help="check the settings, say what they mean, and exit")
    for name, setting in _TABLE.items():
        flag = f"--{name.replace('_', '-')}"
        if setting.switch:
            parser.add_argument(flag, dest=name, action="store_const", const="true", help=setting.help)
        elif setting.many:
            parser.add_argument(flag, dest=name, action="append", metavar=setting.metavar, help=setting.help)
        else:
            parser.add_argument(flag, dest=name, metavar=setting.metavar, help=setting.help)
    parser.add_argument("--label", dest="labels", action="append", metavar="KEY=VALUE", help="same as --labels")
    return parser


_SERVICE_LINK: Final = re.compile(r"(.*_)?(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT|PORT_\d+_(TCP|UDP|SCTP)(_.*)?)")


def _from_environment(environment: Mapping[str, str]) -> dict[str, Raw]:
    found: dict[str, Raw] = {}
    for variable, value in environment.items():
        if not variable.startswith(PREFIX) or not value:
            continue
        name = variable.removeprefix(PREFIX).lower()
        if name in _TABLE:
            if addresses.service_link("_PORT", value):
                raise ConfigError(
                    f"{variable}={value} is a Kubernetes service link, not a setting; set enableServiceLinks: false on "
                    "the pod, or rename the Service"
                )
            found[name] = [part.strip() for part in value.split(",") if part.strip()] if _TABLE[name].many else value
        elif name != "config" and not _SERVICE_LINK.fullmatch(variable.removeprefix(PREFIX)):
            raise ConfigError(f"{variable} is not a setting of kvctl-sidecar; known: {_known(upper=True)}")
    if "engine_dir" not in found and environment.get("KVCTL_ENGINE_DIR"):
        found["engine_dir"] = environment["KVCTL_ENGINE_DIR"]
    return found


def _from_file(path: Path) -> dict[str, Raw]:
    import yaml  # start-up time: only where a file is used

    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--config {path} cannot be read by uid {os.getuid()}: {error.strerror}") from error
    except UnicodeDecodeError:
        raise ConfigError(f"--config {path} is not UTF-8 text") from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path} is not YAML: {' '.join(str(error).split())}") from error
    if content is None:
        return {}
    if not isinstance(content, dict) or not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"--config {path}: expected a mapping of settings, found {type(content).__name__}")
    lines = {key.value: key.start_mark.line + 1 for key, _ in root.value}
    return {str(name): _file_value(path, str(name), value, lines.get(name, 0)) for name, value in content.items()}


def _file_value(path: Path, name: str, value: object, line: int) -> Raw:
    where = f"--config {path}, line {line}: {name}"
    setting = _TABLE.get(name)
    if setting is None:
        raise ConfigError(f"{where} is not a setting; known: {_known()}")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int | float):
        return [str(value)] if setting.many else str(value)
    if setting.many and isinstance(value, dict):
        return [f"{key}={item}" for key, item in value.items()]
    if setting.many and isinstance(value, list) and all(isinstance(item, str | int) for item in value):
        return [str(item) for item in value]
    raise ConfigError(f"{where} cannot be a {type(value).__name__}")


def _known(*, upper: bool = False) -> str:
    return ", ".join(name.upper() if upper else name for name in _TABLE)


# --- reading values ----------------------------------------------------------------------------------------------


def _one(raw: Raw) -> str:
    if isinstance(raw, list):
        raise ValueError(f"expected one value, found {len(raw)}")
    return raw.strip()


def _many(raw: Raw) -> list[str]:
    return raw if isinstance(raw, list) else [raw]


def _path(raw: Raw) -> Path | None:
    text = _one(raw)
    return Path(text) if text else None


def _engine_dir(raw: Raw) -> Path:
    path = Path(_one(raw)).absolute()
    longest = len(os.fsencode(path)) + len("/engine-00000-00000000.sock")
    if longest > addresses.MAX_SOCKET_PATH_BYTES:
        raise ValueError(
            f"{path} is too long: a socket in it would have {longest} bytes and Linux allows "
            f"{addresses.MAX_SOCKET_PATH_BYTES}; choose a shorter directory"
        )
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path} is not a directory")
    return path


def _name(raw: Raw) -> str:
    text = _one(raw)
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?", text):
        raise ValueError(f"{text!r} is not a replica name; expected letters, digits, '-', '.' and '_'")
    return text


def _labels(raw: Raw) -> dict[str, str]:
    return dict(_pair(text, "KEY=VALUE") for text in _many(raw))


def _pair(text: str, form: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not separator or not key.strip():
        raise ValueError(f"{text!r} is not {form}")
    return key.strip(), value.strip()


def _url(raw: Raw) -> str:
    text = _one(raw).rstrip("/")
    if text and not text.startswith(("http://", "https://")):
        raise ValueError(f"{text!r} is not a URL; expected e.g. http://127.0.0.1:8000")
    return text


def _listen(raw: Raw) -> list[Address]:
    return [addresses.parse_listen(text) for text in _many(raw)]


def _metrics(raw: Raw) -> Address | None:
    text = _one(raw)
    if text in ("off", ""):
        return None
    address = addresses.parse_listen(text, what="metrics address")
    if address.kind != "tcp":
        raise ValueError(f"{text!r}: metrics and probes need host:port")
    return address


def _client_roles(raw: Raw) -> dict[str, Role]:
    return {name: parse_role(role) for name, role in (_pair(text, "NAME=ROLE") for text in _many(raw))}


def _token_files(raw: Raw) -> list[tuple[Role, Path]]:
    return [(parse_role(role), Path(path)) for role, path in (_pair(text, "ROLE=FILE") for text in _many(raw))]


def _boolean(raw: Raw) -> bool:
    text = _one(raw).lower()
    if text in ("true", "1", "yes", "on"):
        return True
    if text in ("false", "0", "no", "off", ""):
        return False
    raise ValueError(f"{text!r} is neither true nor false")


def _count(least: int, most: int) -> Callable[[Raw], int]:
    def read(raw: Raw) -> int:
        text = _one(raw)
        if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
            raise ValueError(f"{text!r} is not a number from {least} to {most}")
        return int(text)

    return read


def _seconds(raw: Raw) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|s|m)?", _one(raw))
    if match is None:
        raise ValueError(f"{raw!r} is not a duration; expected e.g. 20s, 500ms or 1m")
    return float(match.group(1)) * {"ms": 1e-3, "s": 1.0, "m": 60.0, None: 1.0}[match.group(2)]


def _choice(choices: Sequence[str]) -> Callable[[Raw], str]:
    def read(raw: Raw) -> str:
        text = _one(raw).lower()
        if text not in choices:
            raise ValueError(f"{text!r} is not one of {', '.join(choices)}")
        return text

    return read


_TABLE: Final[dict[str, _Setting]] = {
    "name": _Setting(_name, lambda: socket.gethostname() or "replica", "replica name (host name)", metavar="NAME"),
    "labels": _Setting(_labels, list, "label of this replica; may be repeated", many=True, metavar="KEY=VALUE"),
    "engine_dir": _Setting(
        _engine_dir,
        lambda: str(default_engine_dir()),
        "directory where engines put their sockets (KVCTL_ENGINE_DIR, else /run/kvctl or the user's)",
        metavar="DIR",
    ),
    "engine_url": _Setting(_url, str, "stock vLLM's HTTP address; used where no bridge is found", metavar="URL"),
    "engine_token_file": _Setting(_path, str, "bearer token for that HTTP address", metavar="FILE"),
    "engine_ca": _Setting(_path, str, "CA that signed its certificate, for https", metavar="FILE"),
    "listen": _Setting(
        _listen, lambda: ["127.0.0.1:7700"], "gRPC address; may be repeated (127.0.0.1:7700)", many=True, metavar="ADDR"
    ),
    "metrics": _Setting(
        _metrics,
        lambda: "127.0.0.1:7701",
        "plain HTTP /metrics /livez /readyz, or off (127.0.0.1:7701)",
        metavar="ADDR",
    ),
    "tls_cert": _Setting(_path, str, "server certificate, PEM; read again when it changes", metavar="FILE"),
    "tls_key": _Setting(_path, str, "its private key, PEM", metavar="FILE"),
    "tls_client_ca": _Setting(_path, str, "accept only clients with a certificate signed by this CA", metavar="FILE"),
    "client_role": _Setting(
        _client_roles,
        list,
        "role of a client certificate by its name: viewer, operator or admin (viewer); may be repeated",
        many=True,
        metavar="NAME=ROLE",
    ),
    "token_file": _Setting(
        _token_files,
        list,
        "file of bearer tokens for a role, one a line; read again when it changes; may be repeated",
        many=True,
        metavar="ROLE=FILE",
    ),
    "insecure": _Setting(_boolean, lambda: "false", "serve other machines without TLS or credentials", switch=True),
    "expect_engines": _Setting(
        _count(0, 4096), lambda: "0", "data-parallel ranks that must be here; missing ones fail (0: any)", metavar="N"
    ),
    "audit_log": _Setting(_one, lambda: "-", "file for audit lines, - for stdout (-)", metavar="FILE"),
    "log_format": _Setting(_choice(logs.FORMATS), lambda: "logfmt", "logfmt or json (logfmt)", metavar="FORMAT"),
    "log_level": _Setting(
        _choice(logs.LEVELS), lambda: "info", "debug, info, warning or error (info)", metavar="LEVEL"
    ),
    "grace": _Setting(_seconds, lambda: "20s", "time to finish after SIGTERM (20s)", metavar="TIME"),
    "max_calls": _Setting(_count(1, 100_000), lambda: "256", "calls under way at once, watches too (256)", metavar="N"),
    "stall_after": _Setting(
        _seconds, lambda: "5s", "no token for so long, with work there, is a stall (5s)", metavar="TIME"
    ),
    "hung_after": _Setting(
        _seconds,
        lambda: "60s",
        "one step for so long is a hung engine; raise it for long prefills (60s)",
        metavar="TIME",
    ),
    "ready_file": _Setting(_path, str, "written once serving: JSON with the bound addresses", metavar="FILE"),
}

assert {*_TABLE, "check"} == {f.name for f in fields(Config)}, "the table and Config must name the same settings"
