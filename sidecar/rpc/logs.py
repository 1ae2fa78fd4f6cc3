"""Structured logs on stderr: logfmt for people and grep, JSON for collectors.

Code logs `event words key=value ...` through the standard library; here each record gets a time, a level and a logger,
and its pairs are kept as they are (logfmt) or taken apart (JSON). Nothing here ever sees a token.
"""

from __future__ import annotations

import json
import logging
import os
import re
import select
import sys
import time
from typing import Final, Literal, TextIO

Format = Literal["logfmt", "json"]

FORMATS: Final = ("logfmt", "json")
LEVELS: Final = ("debug", "info", "warning", "error")

_NUMBER: Final = re.compile(r"([a-z_][a-z0-9_]*)=%[-+ #0-9.]*[dif](?![a-z%])")
"""Names of the pairs that the code writes as numbers: what only looks like one, such as a replica called 42, is none.
"""
_PAIR: Final = re.compile(r"(?:^|\s)([a-z_][a-z0-9_]*)=('(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\S*)")


class LogfmtFormatter(logging.Formatter):
    """`time=... level=... logger=... msg="..." key=value`."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever the message holds."""
        text, pairs = split(record.getMessage())
        fields = {"time": _time(record), "level": record.levelname.lower(), "logger": record.name, "msg": text, **pairs}
        line = " ".join(f"{key}={_quoted(value)}" for key, value in fields.items())
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One object a line."""

    def format(self, record: logging.LogRecord) -> str:
        """One line; a trace goes into a field of its own."""
        text, pairs = split(record.getMessage())
        numbers = set(_NUMBER.findall(str(record.msg)))
        values = {key: _as_number(value) if key in numbers else value for key, value in pairs.items()}
        fields = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": text,
            **values,
        }
        if record.exc_info:
            fields["trace"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=True)


def write_without_waiting(fd: int, data: bytes) -> int:
    """Write what there is room for now; returns how many bytes that was. OSError when it cannot be written at all.

    A pipe that nobody reads would stop the whole event loop. Room in a pipe means room for PIPE_BUF bytes and no more,
    so a longer line goes in pieces.
    """
    written = 0
    while written < len(data) and _has_room(fd):
        written += os.write(fd, data[written : written + select.PIPE_BUF])
    return written


def _has_room(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(0))


class _NeverWaiting(logging.StreamHandler[TextIO]):
    """Drops what there is no room for rather than wait for whoever should read it."""

    _torn = False
    """The last line was cut short; the next one starts on a line of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write it as far as there is room."""
        try:
            fd = self.stream.fileno()
        except (OSError, ValueError):  # no descriptor behind it, or none any more: nobody to wait for
            super().emit(record)
            return
        try:
            line = ("\n" if self._torn else "") + self.format(record) + self.terminator
            data = line.encode("utf-8", "backslashreplace")
            written = write_without_waiting(fd, data)
            self._torn = written < len(data) if written else self._torn
        except Exception:  # noqa: BLE001 - as all handlers of the standard library do: a log line raises nothing
            self.handleError(record)


def configure(log_format: Format, level: str) -> None:
    """Send everything to stderr in this format; nowhere when that is closed."""
    handler: logging.Handler = _NeverWaiting(sys.stderr) if sys.stderr is not None else logging.NullHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else LogfmtFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for chatty in ("grpc", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """Not gRPC's trace for an answer whose caller had gone: it is logged as an error with no error in it."""
    return not record.getMessage().startswith("ExecuteBatchError raised in core by servicer method")


def split(message: str) -> tuple[str, dict[str, str]]:
    """The words of a message, and its key=value pairs."""
    pairs: dict[str, str] = {}
    first = _PAIR.search(message)
    if first is None:
        return message, pairs
    for match in _PAIR.finditer(message, first.start()):
        value = match.group(2)
        quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "'\""
        pairs.setdefault(match.group(1), value[1:-1] if quoted else value)
    return message[: first.start()].strip(), pairs


def _as_number(text: str) -> int | float | str:
    if not re.fullmatch(r"-?[0-9]{1,18}(\.[0-9]{1,18})?", text):
        return text  # no number, or another text that came before it under the same name
    return float(text) if "." in text else int(text)


def _time(record: logging.LogRecord) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"


def _quoted(value: str) -> str:
    if value and not re.search(r'[\s"=\\]', value) and value.isprintable():
        return value
    return json.dumps(value, ensure_ascii=False)
