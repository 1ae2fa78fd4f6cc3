"""Credentials that the API server refuses, that run out, or that are not there yet: tried again at a bounded rate, told
in one line, and not passed off as health.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from pathlib import Path

import kopf
import pytest
from cluster import KEEP, Cluster

from sidecar.coordinator.discovery.kube_access import Access
from sidecar.operator import config as operator_config
from sidecar.operator.app import Operator
from sidecar.operator.login import HELD_S, LOOK_EVERY_S, PAUSES_S, Login
from tests import fake_time


def timed(tmp_path: Path, story: Callable[[Login, Path, Callable[[], float]], Awaitable[None]]) -> None:
    """Run a story of a login over a token file, on a loop whose time only jumps."""
    file = tmp_path / "token"
    file.write_text("one")

    async def told() -> None:
        await story(Login(Access("http://api", token_file=file)), file, asyncio.get_running_loop().time)

    fake_time.run(told())


def put(file: Path, token: str | None) -> None:
    """As kubelet does."""
    if token is None:
        file.unlink()
    else:
        file.write_text(token)


def test_refused_credentials_are_given_again_after_longer_and_longer_pauses(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gaps: list[float] = []

    async def story(login: Login, file: Path, clock: Callable[[], float]) -> None:
        await login.again()
        for _ in range(len(PAUSES_S) + 3):
            began = clock()
            assert (await login.again()).token == "one"
            gaps.append(clock() - began)

    timed(tmp_path, story)
    assert gaps == pytest.approx([*PAUSES_S, *[PAUSES_S[-1]] * 3], abs=LOOK_EVERY_S)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == len(gaps), "a line a pause"
    assert lines[0] == f"http://api refuses the token in {tmp_path / 'token'}; trying again in 1 s, or once it changes"


def test_a_token_that_changes_during_the_pause_is_given_at_once_and_starts_afresh(tmp_path: Path) -> None:
    async def story(login: Login, file: Path, clock: Callable[[], float]) -> None:
        for _ in range(4):
            await login.again()
        waiting = asyncio.ensure_future(login.again())
        await asyncio.sleep(1)
        assert not waiting.done()
        put(file, "another")
        began = clock()
        assert (await waiting).token == "another"
        assert clock() - began <= LOOK_EVERY_S
        began = clock()
        await login.again()
        assert clock() - began <= PAUSES_S[0] + LOOK_EVERY_S

    timed(tmp_path, story)


def test_credentials_that_were_good_for_a_while_are_read_again_without_a_pause(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(login: Login, file: Path, clock: Callable[[], float]) -> None:
        for _ in range(3):
            began = clock()
            await login.again()
            assert clock() == began
            await asyncio.sleep(HELD_S + 1)

    timed(tmp_path, story)
    assert caplog.records == []


def test_a_file_that_is_not_there_yet_is_waited_for_and_told_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def story(login: Login, file: Path, clock: Callable[[], float]) -> None:
        put(file, None)
        waiting = asyncio.ensure_future(login.again())
        await asyncio.sleep(120)
        assert not waiting.done()
        put(file, "late")
        info = await waiting
        assert isinstance(info, kopf.ConnectionInfo)
        assert info.token == "late"

    timed(tmp_path, story)
    [line] = [record.getMessage() for record in caplog.records]
    assert f"token file {tmp_path / 'token'} cannot be read" in line
    assert "Errno" not in line


@pytest.mark.parametrize("before", ["refused", "missing"])
async def test_an_operator_whose_token_is_no_good_is_not_ready_and_works_once_it_is_mended(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture, before: str
) -> None:
    file = tmp_path / "token"
    if before == "refused":
        file.write_text("expired")
    cluster.api.token = "right"
    words = ["--metrics", "off", "--lease-duration", "3s"]
    operator = Operator(operator_config.load(words, {}), Access(cluster.api.url, "llm", token_file=file))
    task = asyncio.create_task(operator.serve())
    expected = "401" if before == "refused" else "cannot be read"
    async with asyncio.timeout(40):
        while expected not in operator._readyz().body.decode():  # noqa: ASYNC110 - a page, not an event
            await asyncio.sleep(0.01)
    assert operator._readyz().status == HTTPStatus.SERVICE_UNAVAILABLE
    assert operator._livez().status == HTTPStatus.OK, "a restart would mend nothing"
    await cluster.api.put("cacheoperations", {"metadata": {"name": "wipe"}, "spec": KEEP})
    file.write_text("right")
    assert (await cluster.finished("wipe", 60))["phase"] == "Succeeded"
    assert operator._readyz().status == HTTPStatus.OK
    operator.stop()
    await asyncio.wait_for(task, 30)
    assert not [record for record in caplog.records if record.exc_info and record.levelno >= logging.ERROR]


async def test_refused_credentials_cost_the_api_server_a_few_requests_and_not_dozens_a_second(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "token"
    file.write_text("expired")
    cluster.api.token = "right"
    words = ["--metrics", "off", "--lease-duration", "3s"]
    operator = Operator(operator_config.load(words, {}), Access(cluster.api.url, "llm", token_file=file))
    task = asyncio.create_task(operator.serve())
    async with asyncio.timeout(60):
        while "trying again in 4 s" not in caplog.text:  # noqa: ASYNC110 - a line of the log, not an event
            await asyncio.sleep(0.05)
    by_kopf = [path for _, path in cluster.api.requests if path in ("/api", "/apis")]
    operator.stop()
    await asyncio.wait_for(task, 30)
    assert len(by_kopf) <= 20, "two a try, and four tries by then"
