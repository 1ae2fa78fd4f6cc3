"""The HTTP client of the sidecar: URLs, replies that are none, proxies."""

from __future__ import annotations

import asyncio

import pytest

from sidecar.backends.http.client import NoReplyError, NotHttpError, NotSentError, parse_url, request
from tests.contract.fake_vllm_http import Answer, FakeVllm


@pytest.mark.parametrize(
    ("url", "what"),
    [
        ("127.0.0.1:8000", "expected http"),
        ("http://", "names no host"),
        ("http://u:secret@h:1", "must not hold credentials"),
        ("http://h:1/?x=1", "without"),
        ("http://h:99999", "out of range"),
    ],
)
def test_an_unusable_url_is_refused_in_words_and_without_its_password(url: str, what: str):
    with pytest.raises(ValueError, match=what) as caught:
        parse_url(url)
    assert "secret" not in str(caught.value)


def test_urls_are_parsed_with_ports_paths_and_ipv6():
    assert parse_url("http://[::1]:8000/x/").url == "http://[::1]:8000/x"
    assert parse_url("https://vllm").port == 443
    assert parse_url("http://127.0.0.1:1").loopback
    assert not parse_url("http://vllm:1").loopback


async def test_the_client_tells_not_sent_from_no_reply():
    vllm = FakeVllm()
    async with vllm:
        vllm.routes["GET /gone"] = Answer(drop=True)
        with pytest.raises(NoReplyError):
            await request(parse_url(vllm.url), "GET", "/gone", 2.0)
        vllm.routes["GET /slow"] = Answer(hold=asyncio.Event())
        with pytest.raises(NoReplyError, match="no answer within"):
            await request(parse_url(vllm.url), "GET", "/slow", 0.05)
    with pytest.raises(NotSentError):
        await request(parse_url(vllm.url), "GET", "/", 2.0)


@pytest.mark.parametrize(
    "raw",
    [
        b"SSH-2.0-OpenSSH\r\n",
        b"HTTP/1.1 abc\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon here\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-1\r\n",
        b"x" * 200_000,
        b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 500 + b"\r\n",
    ],
)
async def test_what_is_not_http_is_said_to_be_so_within_bounds(raw: bytes):
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(raw)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    target = parse_url(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    async with server:
        with pytest.raises(NotHttpError):
            await request(target, "GET", "/", 2.0)


async def test_proxies_in_the_environment_are_ignored(monkeypatch: pytest.MonkeyPatch):
    """They capture loopback."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    vllm = FakeVllm()
    async with vllm:
        assert (await request(parse_url(vllm.url), "GET", "/health", 2.0)).status == 200
