"""The operator's watch goes on after an outage of the API server; where it cannot, the whole process ends."""

from __future__ import annotations

import asyncio
import itertools
from http import HTTPStatus

import pytest
from apiserver import Refused
from cluster import KEEP, Cluster

from sidecar.coordinator.discovery import DiscoveryError
from sidecar.coordinator.discovery.kube_access import Access
from sidecar.operator import config as operator_config
from sidecar.operator import watch
from sidecar.operator.app import Operator

WORDS = ["--metrics", "off", "--lease-duration", "3s"]


@pytest.mark.parametrize(("status", "reason"), [(503, "ServiceUnavailable"), (403, "Forbidden")])
async def test_an_api_server_that_is_away_for_long_is_watched_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, status: int, reason: str
) -> None:
    """By itself kopf gives a watch up after eight tries, a minute."""
    assert max(itertools.islice(watch._Backoffs(), 1000)) == 10
    monkeypatch.setattr(watch._Backoffs, "__iter__", lambda _: itertools.repeat(0.02))
    refused = 0

    async def away(_: str, path: str) -> None:
        nonlocal refused
        if path.endswith("/cacheoperations"):
            refused += 1
            raise Refused(status, reason, "away")

    async with cluster.operator():
        await cluster.apply("before", KEEP)
        await cluster.finished("before")
        cluster.api.faults = away
        await cluster.api.end_watches()
        async with asyncio.timeout(40):
            while refused < 30:  # noqa: ASYNC110 - counted by the server
                await asyncio.sleep(0.01)
        cluster.api.faults = None
        await cluster.apply("after", KEEP)
        assert (await cluster.finished("after"))["phase"] == "Succeeded"


async def test_a_watch_that_cannot_go_on_ends_the_process(cluster: Cluster) -> None:
    async def uninstalled(_: str, path: str) -> None:
        if path.endswith("/cacheoperations"):
            raise Refused(404, "NotFound", "the server could not find the requested resource")

    operator = Operator(operator_config.load(WORDS, {}), Access(cluster.api.url, "llm"))
    task = asyncio.create_task(operator.serve())
    await cluster.apply("before", KEEP)
    await cluster.finished("before")
    cluster.api.faults = uninstalled
    await cluster.api.end_watches()
    with pytest.raises(DiscoveryError, match=r"has ended: .*could not find the requested resource"):
        await asyncio.wait_for(task, 40)


async def test_without_the_definition_the_operator_does_not_serve_as_if_it_saw(cluster: Cluster) -> None:
    del cluster.api.kinds["kvctl.dev", "cacheoperations"]
    operator = Operator(operator_config.load(WORDS, {}), Access(cluster.api.url, "llm"))
    with pytest.raises(DiscoveryError, match="is their definition installed"):
        await asyncio.wait_for(operator.serve(), 40)


async def test_a_leader_that_may_not_list_cache_operations_is_not_ready_and_says_why(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    async def forbidden(_: str, path: str) -> None:
        if path.endswith("/cacheoperations"):
            raise Refused(403, "Forbidden", "cannot list resource cacheoperations")

    async def page(expected: str) -> HTTPStatus:
        async with asyncio.timeout(40):
            while expected not in (shown := operator._readyz()).body.decode():  # noqa: ASYNC110 - a page, not an event
                await asyncio.sleep(0.01)
        return shown.status

    cluster.api.faults = forbidden
    operator = Operator(operator_config.load(WORDS, {}), Access(cluster.api.url, "llm"))
    task = asyncio.create_task(operator.serve())
    refused = "CacheOperations cannot be listed: "
    assert await page(refused) == HTTPStatus.SERVICE_UNAVAILABLE
    assert "cannot list resource cacheoperations" in operator._not_listed
    cluster.api.faults = None
    assert await page("leading") == HTTPStatus.OK
    assert sum(record.getMessage().startswith(refused) for record in caplog.records) == 1
    operator.stop()
    assert await asyncio.wait_for(task, 40) == 0
