"""json, yaml and name: for programs.

json is the protobuf JSON mapping (lowerCamelCase; 64-bit numbers are texts there, as that mapping says). Fields at
their default are printed too, so that `jq .counts.failed` gives 0 and not null.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message


def encode(message: Message, output: str) -> str:
    """The message as `json` or `yaml`, ending in a newline."""
    content = MessageToDict(message, always_print_fields_with_no_presence=True)
    unicode = "utf" in (sys.stdout.encoding or "").lower()
    if output == "json":
        return json.dumps(content, indent=2, ensure_ascii=not unicode) + "\n"
    import yaml

    return str(yaml.safe_dump(content, sort_keys=False, allow_unicode=unicode, width=120))


def encode_line(message: Message) -> str:
    """The message as one line of JSON, for streams."""
    return json.dumps(MessageToDict(message, always_print_fields_with_no_presence=True), separators=(",", ":")) + "\n"


def names(found: Sequence[str]) -> str:
    """One name a line."""
    return "".join(f"{name}\n" for name in found)
