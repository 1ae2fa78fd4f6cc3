"""Which fleet a command talks to, and how: flags, environment, the current context, the local fleet, in this order.

The config file is $KVCTL_CONFIG, by default $XDG_CONFIG_HOME/kvctl/config.yaml:

    current-context: lab
    contexts:
      - name: lab
        inventory: /etc/kvctl/lab.yaml
      - name: prod
        coordinator: kvctl.example:7710
        ca: /etc/kvctl/ca.pem
        token-file: /run/secrets/kvctl
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Final, cast

from sidecar.cli.failures import Refusal

_MAX_FILE_BYTES: Final = 16 * 1024 * 1024

NO_FLEET: Final = (
    "no replicas to talk to: give --target ADDRESS, --inventory FILE or --coordinator ADDRESS, choose a context with "
    "`kvctl config use-context`, or start a fleet here with `kvctl local up`"
)


@dataclass(frozen=True, slots=True)
class Settings:
    """One way to reach one fleet. Exactly the keys of a context, plus where they came from."""

    coordinator: str = ""
    """Address of a coordinator; empty: kvctl calls the replicas itself."""
    targets: tuple[str, ...] = ()
    """`[NAME=]ADDRESS`, or dns:///name:port."""
    inventory: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""
    token_file: str = ""
    server_name: str = ""
    insecure: bool = False
    source: str = field(default="flags", compare=False)
    """Where the fleet was named, for messages."""

    @property
    def names_a_fleet(self) -> bool:
        """Whether it says whom to call."""
        return bool(self.coordinator or self.targets or self.inventory)

    @property
    def fleet(self) -> str:
        """Whom it says to call, as it was given."""
        return self.coordinator or self.inventory or ", ".join(self.targets)

    @property
    def coordinator_flags(self) -> list[str]:
        """Flags that reach the same coordinator with the same credentials, whatever the context is then."""
        keys = ("coordinator", "ca", "cert", "key", "token_file", "server_name")
        found = [(f"--{key.replace('_', '-')}", getattr(self, key)) for key in keys if getattr(self, key)]
        return [word for pair in found for word in pair] + ["--insecure"] * self.insecure


CONTEXT_KEYS: Final = tuple(f.name.replace("_", "-") for f in fields(Settings) if f.name != "source")


@dataclass(frozen=True, slots=True)
class Config:
    """The config file."""

    path: Path
    current: str = ""
    contexts: Mapping[str, Settings] = field(default_factory=dict)

    @property
    def known(self) -> str:
        """The names there are, or how to make the first."""
        names = ", ".join(sorted(self.contexts))
        how = "there are none, make one with `kvctl config set-context NAME --coordinator ADDRESS`"
        return f"known: {names}" if names else how


def config_path() -> Path:
    """Where the config file is."""
    configured = os.environ.get("KVCTL_CONFIG")
    if configured:
        return Path(configured)
    base = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(base, "kvctl", "config.yaml")


def local_inventory_path() -> Path:
    """Where `kvctl local up` writes its inventory."""
    base = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(base, "kvctl", "local", "inventory.yaml")


def load_config(path: Path) -> Config:
    """Read the config file; a missing one is an empty one. Refusal names file, place and what was expected."""
    try:
        regular = stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        return Config(path)
    except OSError as error:
        raise Refusal(f"config {path} cannot be read: {error.strerror or error}") from error
    if not regular:
        raise Refusal(f"config {path} is not a regular file; expected a YAML file")
    try:
        with path.open("rb") as file:
            content_bytes = file.read(_MAX_FILE_BYTES + 1)
        text = content_bytes.decode()
    except UnicodeDecodeError as error:
        raise Refusal(f"config {path} is not UTF-8: {error.reason} at byte {error.start}") from error
    except OSError as error:
        raise Refusal(f"config {path} cannot be read: {error.strerror or error}") from error
    if len(content_bytes) > _MAX_FILE_BYTES:
        raise Refusal(f"config {path} is larger than {_MAX_FILE_BYTES >> 20} MiB; expected a smaller one")
    import yaml

    try:
        content = yaml.safe_load(text) or {}
    except RecursionError:
        raise Refusal(f"config {path} is nested too deeply; expected the keys current-context and contexts") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise Refusal(f"config {path}{where}: this is not YAML: {getattr(error, 'problem', error)}") from error
    if not isinstance(content, dict) or not set(content) <= {"current-context", "contexts"}:
        raise Refusal(f"config {path}: expected the keys current-context and contexts, nothing else")
    listed = content.get("contexts") or []
    if not isinstance(listed, list):
        raise Refusal(f"config {path}: contexts is not a list; expected '- name: ...' items")
    contexts = dict(_context(path, number, item) for number, item in enumerate(listed, 1))
    current = content.get("current-context") or ""
    if not isinstance(current, str):
        raise Refusal(f"config {path}: current-context is not a name")
    return Config(path, current, contexts)


def _context(path: Path, number: int, item: object) -> tuple[str, Settings]:
    if not isinstance(item, dict) or not isinstance(item.get("name"), str) or not item["name"]:
        raise Refusal(f"config {path}: context {number} has no name; expected '- name: lab'")
    name = item.pop("name")
    values: dict[str, object] = {}
    for key, value in item.items():
        if key not in CONTEXT_KEYS:
            expected = ", ".join(CONTEXT_KEYS)
            raise Refusal(f"config {path}: context {name!r}: key {key!r} is not known; expected one of {expected}")
        if key == "targets":
            if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
                raise Refusal(f"config {path}: context {name!r}: targets is not a list of addresses")
            value = tuple(value)
        elif not isinstance(value, bool if key == "insecure" else str):
            raise Refusal(f"config {path}: context {name!r}: {key} is {value!r}; expected a text")
        values[key.replace("-", "_")] = value
    return name, Settings(**cast("dict[str, Any]", values), source=f"context {name}")


def save_config(config: Config) -> None:
    """Write the config file, whole or not at all, readable by its owner only."""
    import tempfile

    import yaml

    listed = []
    for name, settings in config.contexts.items():
        item: dict[str, object] = {"name": name}
        for key in CONTEXT_KEYS:
            value = getattr(settings, key.replace("-", "_"))
            if value:
                item[key] = list(value) if isinstance(value, tuple) else value
        listed.append(item)
    text = yaml.safe_dump({"current-context": config.current, "contexts": listed}, sort_keys=False, allow_unicode=True)
    try:
        config.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile("w", dir=config.path.parent, delete=False) as file:
            file.write(text)
        Path(file.name).replace(config.path)
    except OSError as error:
        raise Refusal(f"config {config.path} cannot be written: {error.strerror or error}") from error


def choose(flags: Settings, context: str = "") -> Settings:
    """What a command will use. Refusal when nothing names a fleet, or two flags name two."""
    named = [
        name
        for name, given in (
            ("--coordinator", flags.coordinator),
            ("--target", flags.targets),
            ("--inventory", flags.inventory),
        )
        if given
    ]
    if len(named) > 1:
        raise Refusal(f"{' and '.join(named)} name two fleets; give one of them")
    if context or not named:
        base = _from_environment() if not context and not named else None
        config = load_config(config_path())
        wanted = context or config.current
        if base is None and wanted:
            if wanted not in config.contexts:
                raise Refusal(f"no context {wanted!r} in {config.path}; {config.known}")
            base = config.contexts[wanted]
        if base is not None:
            flags = _over(flags, base, keep_fleet=bool(named))
    if flags.names_a_fleet:
        return flags
    inventory = local_inventory_path()
    if inventory.exists():
        return replace(flags, inventory=str(inventory), source="the local fleet")
    raise Refusal(NO_FLEET)


def _from_environment() -> Settings | None:
    if inventory := os.environ.get("KVCTL_INVENTORY"):
        return Settings(inventory=inventory, source="KVCTL_INVENTORY")
    if coordinator := os.environ.get("KVCTL_COORDINATOR"):
        return Settings(coordinator=coordinator, source="KVCTL_COORDINATOR")
    return None


def _over(flags: Settings, base: Settings, *, keep_fleet: bool) -> Settings:
    """The context, with every flag that was given in place of its own value."""
    values: dict[str, object] = {}
    for each in fields(Settings):
        given = getattr(flags, each.name)
        fleet = each.name in ("coordinator", "targets", "inventory")
        if each.name == "source":
            values["source"] = flags.source if keep_fleet else base.source
        elif fleet and keep_fleet:
            values[each.name] = given
        else:
            values[each.name] = given or getattr(base, each.name)
    return Settings(**cast("dict[str, Any]", values))
