"""The inventory: a YAML file that lists replicas.

    replicas:
      - name: r0
        address: "127.0.0.1:9001"
        labels: {pool: a}

A fleet operation must not skip a replica because of a typing slip, so nothing unknown is passed over: every error
names the file, the line, the key, and what was expected there.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import yaml

from sidecar.coordinator.targets import EVERY_REPLICA, Target
from sidecar.rpc import addresses

MAX_FILE_BYTES: Final = 16 * 1024 * 1024

_KEYS: Final = ("name", "address", "labels")
NAME: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_LABEL_KEY: Final = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._/-]*[A-Za-z0-9])?")
_LABEL_VALUE: Final = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)?")


class InventoryError(ValueError):
    """The file does not say what an inventory must say. One line for a person."""


def load_inventory(path: Path) -> tuple[Target, ...]:
    """Read the file. OSError when it cannot be opened, InventoryError when it cannot be understood."""
    return parse_inventory(read_bounded(path, "inventory"), str(path))


def read_bounded(path: Path, what: str) -> bytes:
    """The content of a file a person wrote. OSError when it cannot be read; InventoryError when it is no regular file
    (a pipe or /dev/zero would be read for ever) or larger than MAX_FILE_BYTES.
    """
    if not stat.S_ISREG(path.stat().st_mode):
        raise InventoryError(f"{what} {path} is not a regular file; expected a YAML file")
    with path.open("rb") as file:
        content = file.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise InventoryError(f"{what} {path} is larger than {MAX_FILE_BYTES >> 20} MiB; expected a smaller one")
    return content


def parse_inventory(text: bytes | str, source: str) -> tuple[Target, ...]:
    """Read an inventory; `source` is how errors call it."""
    return _Reader(source).read(text)


class _Reader:
    """Walks YAML nodes rather than plain values: nodes know their lines, and show a key given twice."""

    def __init__(self, source: str) -> None:
        self._source = source

    def read(self, text: bytes | str) -> tuple[Target, ...]:
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
        except RecursionError:
            raise InventoryError(
                f"inventory {self._source} is nested too deeply; expected 'replicas:' with a list of mappings"
            ) from None
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            line = f", line {mark.line + 1}" if mark else ""
            problem = getattr(error, "problem", None) or str(error).splitlines()[0]
            raise InventoryError(f"inventory {self._source}{line}: this is not YAML: {problem}") from error
        if root is None:
            raise InventoryError(f"inventory {self._source} is empty; expected 'replicas:' with a list")
        top = dict(self._pairs(root, "the file", ("replicas",)))
        if "replicas" not in top:
            raise self._error(root, "key 'replicas' is missing", "a list of replicas under it")
        listed = top["replicas"]
        if not isinstance(listed, yaml.SequenceNode):
            raise self._error(listed, "'replicas' is not a list", "'- name: ...' items")
        targets = [self._replica(item) for item in listed.value]
        self._no_repeats(targets, listed.value)
        return tuple(targets)

    def _replica(self, node: yaml.Node) -> Target:
        values = dict(self._pairs(node, "a replica", _KEYS))
        if "address" not in values:
            raise self._error(node, "a replica has no 'address'", 'e.g. address: "127.0.0.1:7700"')
        address = self._text(values["address"], "address")
        try:
            kind = addresses.parse(address).kind
        except ValueError as error:
            raise InventoryError(f"{self._at(values['address'])}: {error}") from error
        if kind == "dns":
            raise self._error(values["address"], f"address {address!r} is a DNS target", "one replica's host:port")
        name = self._text(values["name"], "name") if "name" in values else ""
        if name and not NAME.fullmatch(name):
            raise self._error(values["name"], f"name {name!r} is not one", "letters, digits, '.', '_' and '-'")
        if name == EVERY_REPLICA:
            raise self._error(values["name"], "name 'all' means every replica wherever one is chosen", "another name")
        return Target(address=address, name=name, labels=self._labels(values["labels"]) if "labels" in values else {})

    def _labels(self, node: yaml.Node) -> dict[str, str]:
        labels: dict[str, str] = {}
        for key, value in self._pairs(node, "labels", None):
            text = self._text(value, key)
            if not _LABEL_KEY.fullmatch(key):
                raise self._error(value, f"label key {key!r} is not one", "letters, digits, '.', '_', '/' and '-'")
            if not _LABEL_VALUE.fullmatch(text):
                raise self._error(value, f"label value {text!r} is not one", "letters, digits, '.', '_' and '-'")
            labels[key] = text
        return labels

    def _pairs(self, node: yaml.Node, what: str, known: tuple[str, ...] | None) -> Iterator[tuple[str, yaml.Node]]:
        if not isinstance(node, yaml.MappingNode):
            expected = f"the keys {', '.join(known)}" if known else "'key: value' pairs"
            raise self._error(node, f"{what} is not a mapping", expected)
        seen: set[str] = set()
        for key_node, value in node.value:
            key = self._text(key_node, "a key")
            if known is not None and key not in known:
                raise self._error(key_node, f"key {key!r} is not known in {what}", f"one of {', '.join(known)}")
            if key in seen:
                raise self._error(key_node, f"key {key!r} is given twice in {what}", "it once")
            seen.add(key)
            yield key, value

    def _text(self, node: yaml.Node, key: str) -> str:
        if isinstance(node, yaml.ScalarNode) and node.tag != "tag:yaml.org,2002:null":
            return str(node.value)
        raise self._error(node, f"{key} is not a text", "a single value")

    def _no_repeats(self, targets: list[Target], nodes: list[yaml.Node]) -> None:
        names: set[str] = set()
        addresses: set[str] = set()
        for target, node in zip(targets, nodes, strict=True):
            if target.name and target.name in names:
                raise self._error(node, f"name {target.name!r} is given to two replicas", "names that differ")
            if target.address in addresses:
                raise self._error(node, f"address {target.address!r} is listed twice", "it once")
            names.add(target.name)
            addresses.add(target.address)

    def _error(self, node: yaml.Node, found: str, expected: str) -> InventoryError:
        return InventoryError(f"{self._at(node)}: {found}; expected {expected}")

    def _at(self, node: yaml.Node) -> str:
        return f"inventory {self._source}, line {node.start_mark.line + 1}"
