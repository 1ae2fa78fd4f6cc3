"""All benchmarks, one after the other: `python -m tests.bench [--only NAME] [--quick] [--write-docs]`.

Each runs in a process of its own, prints its tables and leaves its figures in build/bench/NAME.json. `--write-docs`
puts figures into docs/benchmarks.md, between the markers; with `--no-run` those of earlier runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.bench import machine
from tests.bench.page import rewrite

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "benchmarks.md"
BENCHES = ("start", "pauses", "contiguity", "engine_steps", "latency", "fanout", "recovery")
NEED_VLLM = frozenset({"pauses", "contiguity", "engine_steps", "latency", "recovery"})
BOUND_S = 1800


def words(name: str, quick: bool, written: Path, extra: list[str]) -> list[str]:
    base = [sys.executable, "-m", f"tests.bench.bench_{name}", "--json", str(written)]
    if name != "fanout":
        return [*base, *(["--quick"] if quick else [])]
    return [*base, "--router", *(["--sizes", "8,128"] if quick else []), *extra]


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "proto" / "gen"), os.environ.get("PYTHONPATH", "")])
    settings = {key: value for key, value in os.environ.items() if not key.startswith("KVCTL_")}
    return {**settings, "PYTHONPATH": path.strip(os.pathsep)}


def run(name: str, quick: bool, folder: Path, extra: list[str]) -> bool:
    print(f"\n== {name} ==", flush=True)
    written = folder / f"{name}.json"
    try:
        code = subprocess.run(
            words(name, quick, written, extra), cwd=ROOT, env=environment(), timeout=BOUND_S, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        print(f"{name}: not done after {BOUND_S} s", file=sys.stderr)
        return False
    if code:
        print(f"{name}: ended with code {code}", file=sys.stderr)
    return code == 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--only", action="append", choices=BENCHES, help="this one; may be repeated")
    parser.add_argument("--quick", action="store_true", help="small sizes and few repetitions: minutes, not figures")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench", help="folder for the JSON files")
    parser.add_argument("--write-docs", action="store_true", help="put the figures into docs/benchmarks.md")
    parser.add_argument("--no-run", action="store_true", help="with --write-docs: use the figures that are there")
    options, extra = parser.parse_known_args()
    if extra and options.only != ["fanout"]:
        parser.error(f"unknown: {' '.join(extra)} (further arguments go to bench_fanout, with --only fanout)")
    options.out.mkdir(parents=True, exist_ok=True)
    wrong = []
    if not options.no_run:
        chosen = options.only or BENCHES
        if importlib.util.find_spec("vllm") is None and (missing := sorted(NEED_VLLM & {*chosen})):
            print(f"vLLM is not installed here (make all): cannot run {', '.join(missing)}", file=sys.stderr)
            wrong += missing
        taken = {"machine": machine.describe(), "taken": time.strftime("%Y-%m-%d", time.gmtime())}
        (options.out / "machine.json").write_text(json.dumps(taken, indent=1) + "\n")
        wrong += [name for name in chosen if name not in wrong and not run(name, options.quick, options.out, extra)]
    if options.write_docs:
        PAGE.write_text(rewrite(PAGE.read_text(), options.out))
        print(f"\nwrote {PAGE.relative_to(ROOT)}")
    if wrong:
        print(f"\nwithout figures: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
