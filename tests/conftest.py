"""What all tests share: reports that can travel between pytest-xdist's processes, a Ctrl-C that arrives, logging."""

from __future__ import annotations

import logging
import signal
from collections.abc import Generator

import pytest


def pytest_configure() -> None:
    """Let SIGINT reach what tests start: a shell that runs tests in the background has them ignore it, children too."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Escape what is no text. Some tests log bytes that are not UTF-8 on purpose, and xdist dies of sending them."""
    report = yield
    report.sections = [(name, _escaped(text)) for name, text in report.sections]
    if report.longrepr is not None and not isinstance(report.longrepr, tuple):
        shown = str(report.longrepr)
        if _escaped(shown) != shown:
            report.longrepr = _escaped(shown)
    return report


@pytest.fixture(autouse=True)
def _logging_as_before() -> Generator[None]:
    """A program that a test runs in its own process configures logging, for a stderr that ends with the test."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    root.handlers[:] = [each for each in root.handlers if each in before or type(each).__module__.startswith("_pytest")]
    root.setLevel(level)


def _escaped(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
