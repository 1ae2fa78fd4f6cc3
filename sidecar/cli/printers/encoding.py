"""json, yaml and name: for programs.

json is the protobuf JSON mapping (lowerCamelCase; 64-bit numbers are texts there, as that mapping says). Fields at
their default are printed too, so that `jq .counts.failed` gives 0 and not null.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import cast

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message


def encode(message: Message, output: str) -> str:
    """The message as `json` or `yaml`, ending in a newline."""
    content = _mapped(message)
    unicode = "utf" in (sys.stdout.encoding or "").lower()
    if output == "json":
        return json.dumps(content, indent=2, ensure_ascii=not unicode) + "\n"
    import yaml

    return str(yaml.safe_dump(content, sort_keys=False, allow_unicode=unicode, width=120))


def encode_line(message: Message) -> str:
    """The message as one line of JSON, for streams."""
    return json.dumps(_mapped(message), separators=(",", ":")) + "\n"


def names(found: Sequence[str]) -> str:
    """One name a line."""
    return "".join(f"{name}\n" for name in found)


def _mapped(message: Message) -> object:
    """The JSON mapping, with fields in the order of their declaration: protobuf puts those at their default last."""
    return _ordered(
        MessageToDict(message, always_print_fields_with_no_presence=True), cast("Descriptor", message.DESCRIPTOR)
    )


def _ordered(value: object, kind: Descriptor) -> object:
    if isinstance(value, list):
        return [_ordered(each, kind) for each in value]
    if not isinstance(value, dict) or kind.full_name.startswith("google.protobuf."):
        return value
    if kind.GetOptions().map_entry:
        return dict(sorted(value.items()))
    found: dict[str, object] = {}
    for field in kind.fields:
        if field.json_name in value:
            inner = field.message_type if field.type == FieldDescriptor.TYPE_MESSAGE else None
            found[field.json_name] = _ordered(value[field.json_name], inner) if inner else value[field.json_name]
    return found
