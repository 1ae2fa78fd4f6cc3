"""Lay the engine bridge out so that putting one folder on PYTHONPATH installs it into a stock vLLM image.

vLLM finds plugins by entry point, and Python finds entry points in *.dist-info folders anywhere on its path. So the
bundle is the `engine_bridge` package and a dist-info with the vLLM entry point, taken out of the wheel; nothing is
installed, no image is rebuilt, and removing the folder removes the bridge.

    python bridge_bundle.py FOLDER_WITH_THE_WHEEL TARGET

Standard library only: it runs in an image build.
"""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path


def bundle(wheels: Path, target: Path) -> list[str]:
    """Unpack what the engine needs; returns the file names. SystemExit when there is not exactly one wheel."""
    found = sorted(wheels.glob("kvctl-*.whl"))
    if len(found) != 1:
        names = [wheel.name for wheel in found]
        raise SystemExit(
            f"{wheels}: expected one kvctl wheel, found {names or 'none'}; build it with `python -m build`"
        )
    with zipfile.ZipFile(found[0]) as wheel:
        wanted = [name for name in wheel.namelist() if _wanted(name)]
        wheel.extractall(target, wanted)
    entry_points = next(target.glob("kvctl-*.dist-info")) / "entry_points.txt"
    if "vllm.general_plugins" not in entry_points.read_text(encoding="utf-8"):
        raise SystemExit(f"{entry_points}: the wheel has no vllm.general_plugins entry point; vLLM would not load it")
    return wanted


def _wanted(name: str) -> bool:
    top = name.split("/", 1)[0]
    # RECORD lists files that are not here; without it `pip` cannot be talked into uninstalling half a package.
    return top == "engine_bridge" or (top.endswith(".dist-info") and not name.endswith("/RECORD"))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    bundle(Path(sys.argv[1]), Path(sys.argv[2]))
