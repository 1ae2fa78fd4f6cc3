"""Real Prometheus and Alertmanager processes on loopback, small servers for them to scrape and to notify."""

from __future__ import annotations

import json
import socket
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml
from programs import program


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def eventually(told: Callable[[], Any], seconds: float, what: str) -> Any:
    """The first true answer; the test fails when there is none in time. Polls another process's view."""
    deadline = time.monotonic() + seconds
    last: Any = None
    while time.monotonic() < deadline:
        try:
            last = told()
        except OSError as error:
            last = error
        if last and not isinstance(last, OSError):
            return last
        time.sleep(0.1)
    raise AssertionError(f"not within {seconds:g} s: {what}; last seen: {last!r}")


def get_json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.loads(answer.read())


@contextmanager
def _process(words: list[str], log: Path, ready_url: str) -> Iterator[None]:
    with log.open("w") as file:
        process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT)
    try:

        def ready() -> bool:
            assert process.poll() is None, log.read_text()[-2000:]
            with urllib.request.urlopen(ready_url, timeout=10) as answer:
                return bool(answer.status == 200)

        eventually(ready, 60, f"{words[0]} ready")
        yield
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


class Prometheus:
    """A running Prometheus."""

    def __init__(self, url: str) -> None:
        self.url = url

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Instant vector; AssertionError when Prometheus does not take the expression."""
        url = f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
        try:
            found = get_json(url)
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{expression}: {error.read().decode()}") from error
        result = found["data"]["result"]
        if found["data"]["resultType"] == "scalar":
            return [{"metric": {}, "value": result}]
        return list(result)

    def alerts(self, name: str) -> list[dict[str, Any]]:
        """Pending and firing alerts of one name, by Prometheus' own API."""
        return [a for a in get_json(f"{self.url}/api/v1/alerts")["data"]["alerts"] if a["labels"]["alertname"] == name]

    def rules(self) -> list[dict[str, Any]]:
        groups = get_json(f"{self.url}/api/v1/rules")["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]


@contextmanager
def prometheus(
    folder: Path, targets: dict[str, dict[str, str]], rules: Path, alertmanager: str = ""
) -> Iterator[Prometheus]:
    """Scrapes `targets` (address -> labels) and evaluates `rules`."""
    folder.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        # A scrape may not last longer than its interval, and one that a busy machine fails looks like a dead target.
        "global": {"scrape_interval": "3s", "evaluation_interval": "1s", "scrape_timeout": "3s"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {
                "job_name": "kvctl",
                "static_configs": [{"targets": [address], "labels": labels} for address, labels in targets.items()],
            }
        ],
    }
    if alertmanager:
        config["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]}
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config))
    port = free_port()
    words = [program("prometheus"), f"--config.file={path}", f"--storage.tsdb.path={folder / 'data'}"]
    words += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
    with _process(words, folder / "prometheus.log", f"http://127.0.0.1:{port}/-/ready"):
        yield Prometheus(f"http://127.0.0.1:{port}")


@contextmanager
def alertmanager(folder: Path, webhook: str) -> Iterator[str]:
    """Sends every group of alerts to `webhook` at once; yields its address."""
    folder.mkdir(parents=True, exist_ok=True)
    receiver = {"name": "hook", "webhook_configs": [{"url": webhook, "send_resolved": True}]}
    route = {"receiver": "hook", "group_by": ["alertname"], "group_wait": "0s", "group_interval": "1s"}
    path = folder / "alertmanager.yml"
    path.write_text(yaml.safe_dump({"route": {**route, "repeat_interval": "1h"}, "receivers": [receiver]}))
    port = free_port()
    words = [program("prometheus-alertmanager"), f"--config.file={path}", f"--storage.path={folder / 'am'}"]
    words += [f"--web.listen-address=127.0.0.1:{port}", "--cluster.listen-address=", "--log.level=warn"]
    with _process(words, folder / "alertmanager.log", f"http://127.0.0.1:{port}/-/ready"):
        yield f"127.0.0.1:{port}"


@contextmanager
def http_server(
    on_get: Callable[[str], str] | None = None, on_post: Callable[[bytes], None] | None = None
) -> Iterator[str]:
    """A server in this process; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = on_get(self.path).encode() if on_get else b""
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if on_post:
                on_post(body)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def impatient(rules: Path, hold: str, into: Path) -> Path:
    """The checked-in rules with every `for` and every interval shortened: a test cannot wait for minutes, and what
    `for` does over minutes is tested by promtool.
    """
    content = yaml.safe_load(rules.read_text())
    for group in content["groups"]:
        group["interval"] = "1s"
        for rule in group["rules"]:
            if "for" in rule and rule["for"] != "0m":
                rule["for"] = hold
    into.write_text(yaml.safe_dump(content))
    return into
