"""One streamed completion from vLLM's OpenAI API, token by token, with the time each one came.

Plain asyncio streams: the product has no HTTP client among its dependencies, and what is measured here is the gap
between tokens, so nothing should buffer in between. Prompts and answers are token ids (the model has no tokenizer).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from sidecar.local.programs import MODEL_NAME

_IDLE_SECONDS: Final = 60.0
"""Longest wait for the next piece of a stream."""


class StreamError(Exception):
    """A stream that did not come to its proper end: refused, cut, or an error in the middle."""


@dataclass(slots=True)
class Generation:
    """A stream as it is received."""

    prompt: tuple[int, ...]
    max_tokens: int
    started: float = field(default_factory=time.monotonic)
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    """Monotonic seconds at which each token came."""
    cached_tokens: int = 0
    """Prompt tokens that vLLM took from its prefix cache; known at the end."""
    finished: bool = False
    error: str = ""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    error: dict[str, object] | str | None = None


_decoder: Final = msgspec.json.Decoder(_Chunk)


async def generate(api: str, generation: Generation) -> Generation:
    """Run a stream to its end, filling in `generation` on the way; its `error` says what went wrong, if anything.

    `api` is host:port. Temperature 0 and a fixed length, so that two runs can be compared token by token.
    """
    clock = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(_IDLE_SECONDS) as patience:
            async for data in _events(api, generation):
                patience.reschedule(clock() + _IDLE_SECONDS)
                _take(generation, data)
        if len(generation.tokens) != generation.max_tokens:
            raise StreamError(f"it ended after {len(generation.tokens)} of {generation.max_tokens} tokens")
        generation.finished = True
    except (OSError, StreamError, TimeoutError, asyncio.IncompleteReadError, msgspec.MsgspecError) as error:
        generation.error = str(error) or f"{type(error).__name__}: nothing came for {_IDLE_SECONDS:.0f} s"
    return generation


def _take(generation: Generation, data: bytes) -> None:
    now = time.monotonic()
    chunk = _decoder.decode(data)
    if chunk.error:
        raise StreamError(f"vLLM ended the stream with an error: {chunk.error}")
    for choice in chunk.choices:
        for token in choice.token_ids or ():
            generation.tokens.append(token)
            generation.times.append(now)
    if chunk.usage and chunk.usage.prompt_tokens_details:
        generation.cached_tokens = chunk.usage.prompt_tokens_details.cached_tokens or 0


def _request(api: str, prompt: Sequence[int], max_tokens: int) -> bytes:
    body = json.dumps(
        {
            "model": MODEL_NAME,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "detokenize": False,
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: {api}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + body


async def _events(api: str, generation: Generation) -> AsyncIterator[bytes]:
    """The `data:` payloads of the answer, up to [DONE]."""
    host, port = api.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(_request(api, generation.prompt, generation.max_tokens))
        await writer.drain()
        status = await reader.readline()
        while (await reader.readline()).strip():
            pass  # headers: vLLM streams in chunks
        if b" 200 " not in status:
            said = (await reader.read(2000)).decode(errors="replace")
            raise StreamError(f"vLLM answered {status.decode(errors='replace').strip()}: {said}")
        pending = b""
        async for piece in _chunks(reader):
            pending += piece
            *lines, pending = pending.split(b"\n")
            for line in lines:
                data = line.strip().removeprefix(b"data: ")
                if data == b"[DONE]":
                    return
                if data:
                    yield data
        raise StreamError("the connection ended before the stream did")
    finally:
        writer.close()


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Decode HTTP's chunked transfer coding (RFC 9112, 7.1)."""
    while True:
        size_line = await reader.readline()
        if not size_line:
            return
        try:
            size = int(size_line.split(b";")[0], 16)
        except ValueError:
            raise StreamError(f"not a chunked answer: {size_line[:60]!r}") from None
        if size == 0:
            return
        piece = await reader.readexactly(size + 2)
        yield piece[:-2]
