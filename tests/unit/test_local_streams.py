"""Receiving a stream token by token, whatever the server does with the connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from sidecar.local import load as loading
from sidecar.local.load import Lane, Load, LoadError, longest_gap, prompt, usual_gap
from sidecar.local.streams import Generation, generate

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens_details":{"cached_tokens":512}}}\n\n'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def token(*ids: int) -> bytes:
    return b'data: {"choices":[{"token_ids":[%s]}]}\n\n' % b",".join(b"%d" % each for each in ids)


@asynccontextmanager
async def server(answer: Answer) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await answer(writer)
        writer.close()

    listening = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with listening:
        host, port = listening.sockets[0].getsockname()
        yield f"{host}:{port}"


def says(*parts: bytes) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        for part in parts:
            writer.write(part)
            await writer.drain()

    return answer


async def received(answer: Answer, max_tokens: int = 3) -> Generation:
    async with server(answer) as api:
        return await generate(api, Generation((5, 6), max_tokens))


async def test_tokens_times_and_cached_tokens_are_taken_from_the_stream():
    got = await received(
        says(HEAD, chunk(token(7)), chunk(token(8, 9)), chunk(USAGE), chunk(b"data: [DONE]\n\n"), b"0\r\n\r\n")
    )
    assert (got.tokens, got.cached_tokens, got.finished, got.error) == ([7, 8, 9], 512, True, "")
    assert len(got.times) == 3


async def test_an_event_split_over_chunks_is_put_together():
    whole = token(7) + token(8) + token(9) + USAGE + b"data: [DONE]\n\n"
    parts = [chunk(whole[i : i + 5]) for i in range(0, len(whole), 5)]
    got = await received(says(HEAD, *parts))
    assert got.tokens == [7, 8, 9]
    assert got.finished


@pytest.mark.parametrize(
    ("parts", "complaint"),
    [
        ((HEAD, chunk(token(7))), "before the stream did"),
        ((HEAD, chunk(token(7)), chunk(b"data: [DONE]\n\n")), "1 of 3 tokens"),
        ((HEAD, chunk(b'data: {"error":{"message":"engine died"}}\n\n')), "engine died"),
        ((HEAD, b"ff\r\ncut"), ""),
        ((HEAD, b"no chunk\r\n"), "not a chunked answer"),
        ((HEAD, chunk(b"data: {nonsense\n\n")), ""),
        ((b"HTTP/1.1 503 Service Unavailable\r\n\r\nbusy",), "503"),
        ((), ""),
    ],
)
async def test_a_stream_that_breaks_is_never_taken_for_a_finished_one(parts, complaint):
    got = await received(says(*parts))
    assert not got.finished
    assert got.error
    assert complaint in got.error


async def test_a_server_that_is_not_there_is_an_error_of_the_stream():
    got = await generate("127.0.0.1:1", Generation((5,), 1))
    assert "1" in got.error
    assert not got.finished


def test_prompts_share_their_prefix_and_nothing_else():
    first, second = prompt(0), prompt(1)
    assert first == prompt(0)
    assert first[:512] == second[:512]
    assert first[512:] != second[512:]
    assert prompt(0, shared=1)[:512] != first[:512]
    assert all(8 <= each < 512 for each in first)


async def test_a_closed_gate_lets_streams_end_and_starts_none():
    release = asyncio.Event()

    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + chunk(token(*range(10))))
        await release.wait()
        writer.write(chunk(token(3)) + chunk(b"data: [DONE]\n\n"))

    async with server(answer) as api:
        load = Load(api, lanes=2, tokens=11)
        loading_share, loading._LATEST_SHARE = loading._LATEST_SHARE, 1.0
        try:
            load.start()
            await load.wait_midstream(5)
        finally:
            loading._LATEST_SHARE = loading_share
        marked = load.under_way()
        load.close_gate()
        release.set()
        await loading.finish(marked, 5)
        assert len(marked) == 2
        assert all(generation.finished for generation in marked)
        assert [len(lane.generations) for lane in load.lanes] == [1, 1]
        load.open_gate()
        await load.wait_rounds(2, 5)
        await load.stop()


def test_streams_span_an_operation_only_while_every_lane_has_one_that_is_not_near_its_end():
    load = Load("127.0.0.1:1", lanes=2, tokens=100)
    streams = [Generation(lane.prompt, 100, tokens=[7] * 50) for lane in load.lanes]
    for lane, stream in zip(load.lanes, streams, strict=True):
        lane.generations = [stream]
    assert load.all_midstream(0.85)
    streams[1].tokens = [7] * 90
    assert not load.all_midstream(0.85)
    streams[1].finished = True
    assert not load.all_midstream(1.0)


async def test_a_load_whose_first_stream_fails_says_so():
    async with server(says(b"HTTP/1.1 500 no\r\n\r\n")) as api:
        load = Load(api, lanes=1)
        load.start()
        with pytest.raises(LoadError, match="500"):
            await load.wait_midstream(5)
        await load.stop()


def test_the_reference_is_the_lanes_own_first_stream():
    load = Load("127.0.0.1:1", lanes=2)
    first = Generation(load.lanes[1].prompt, 1, finished=True, tokens=[4])
    later = Generation(load.lanes[1].prompt, 1)
    load.lanes[0] = Lane(load.lanes[0].prompt, [Generation(load.lanes[0].prompt, 1, finished=True, tokens=[9])])
    load.lanes[1].generations = [first, later]
    assert load.reference(later) is first


def test_gaps_are_those_that_touch_the_time_in_question():
    stream = Generation((1,), 5, times=[0.0, 1.0, 1.1, 3.1, 3.2])
    assert longest_gap(stream, since=1.05, until=1.2) == pytest.approx(2.0)
    assert longest_gap(stream, since=3.15, until=9.0) == pytest.approx(0.1)
    assert longest_gap(Generation((1,), 5), 0, 1) == 0
    assert usual_gap([stream]) == pytest.approx(0.55)
