"""What reordering is for: the order of free blocks over many rollout rounds, with and without it (the vLLM RFC).

vLLM's real BlockPool plays rounds of a rollout driver: requests with long prompts get their blocks at once, then grow
block by block, all of them in turn, and end in any order; between rounds the prefix cache is reset. One pool is only
reset, as vLLM does it; the other is reset and reordered, as `kvctl reset --reorder` does it. Seeded, so the same
figures come out on any machine.

Then the block tables of the last round are read through, on the CPU: blocks are gathered from one large tensor in the
order the tables name. That is a stand-in for attention kernels, which run on a GPU and are not measured here.
"""

from __future__ import annotations

import logging
import random
import statistics
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from vllm.v1.core.block_pool import BlockPool

from engine_bridge.engine import pools
from tests.bench.figures import Report, Table, main, progress
from tests.bench.pairs import take_turns
from tests.bench.plot import Line, line_plot

PLOT = Path(__file__).resolve().parents[2] / "docs" / "contiguity.svg"
BLOCKS = 8192
REQUESTS = 8
PROMPT_BLOCKS = (100, 500)
GROWTH_BLOCKS = (20, 260)
GATHERED_KIB = (2, 16, 64)


@dataclass
class Session:
    """One engine's pool over its life."""

    reordering: bool
    pool: BlockPool = field(default_factory=lambda: BlockPool(BLOCKS, True, 16))
    prompts: list[list[int]] = field(default_factory=list)
    """Block tables of the last round's prompts."""

    def round(self, number: int) -> None:
        order = random.Random(number)
        running = []
        for index in range(REQUESTS):
            blocks = self.pool.get_new_blocks(order.randint(*PROMPT_BLOCKS))
            for position, block in enumerate(blocks):
                key = (number << 24 | index << 16 | position).to_bytes(36, "big")
                self.pool._insert_block_hash(key, block, 16)
            running.append((blocks, order.randint(*GROWTH_BLOCKS)))
        self.prompts = [[block.block_id for block in blocks] for blocks, _ in running]
        while running:
            for entry in list(running):
                blocks, left = entry
                running[running.index(entry)] = (blocks, left - 1)
                if left:
                    blocks += self.pool.get_new_blocks(1)
            # vLLM frees a request's blocks last to first.
            for blocks, left in [entry for entry in running if entry[1] < 0]:
                self.pool.free_blocks(reversed(blocks))
                running.remove((blocks, left))
        if not self.pool.reset_prefix_cache():
            raise RuntimeError("vLLM's reset refused between rounds, where no block is held")
        if self.reordering:
            for _ in pools.reorder([self.pool], "all_free"):
                pass

    def adjacent_share(self) -> float:
        """Neighbours in the last prompts' block tables that are neighbours in memory, 0 to 1."""
        pairs = [(a, b) for table in self.prompts for a, b in pairwise(table)]
        return sum(abs(a - b) == 1 for a, b in pairs) / len(pairs)

    def free_share(self) -> float:
        """The same for the whole free queue."""
        found = pools.head_contiguity([self.pool], BLOCKS)
        return found.adjacent_pairs / (found.free_blocks - 1)


def rounds_played(rounds: int) -> tuple[list[Session], dict[str, list[float]]]:
    sessions = [Session(False), Session(True)]
    shares: dict[str, list[float]] = {"reset only": [], "reset and reorder": []}
    for number in range(rounds):
        for session, values in zip(sessions, shares.values(), strict=True):
            session.round(number)
            values.append(session.adjacent_share())
    return sessions, shares


def gathered(tables: list[list[int]], kib: int, repeats: int) -> Any:
    """A callable that reads the tables through and says how long it took, milliseconds."""
    memory = torch.ones((BLOCKS, kib * 256), dtype=torch.float32)
    orders = [torch.tensor(table) for table in tables]
    room = [torch.empty((len(table), kib * 256), dtype=torch.float32) for table in tables]

    def once() -> float:
        began = time.perf_counter()
        for _ in range(repeats):
            for order, target in zip(orders, room, strict=True):
                torch.index_select(memory, 0, order, out=target)
        return (time.perf_counter() - began) * 1000 / repeats

    return once


def measure(quick: bool) -> Report:
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    report = Report("contiguity")
    rounds = 12 if quick else 60
    progress(f"{rounds} rounds on two pools")
    sessions, shares = rounds_played(rounds)
    marks = [index for index in (0, 1, 2, 4, 9, 19, 39, 59) if index < rounds]
    table = Table(
        f"Share of neighbouring blocks in new prompts that are neighbours in memory ({BLOCKS:,} blocks)",
        ("", *(f"round {index + 1}" for index in marks)),
    )
    for name, values in shares.items():
        table.rows.append([name, *(values[index] for index in marks)])
    report.tables.append(table)
    report.notes.append(
        f"The whole free queue at the end: {sessions[0].free_share():.3f} with resets only, "
        f"{sessions[1].free_share():.3f} with reorder."
    )
    gather = Table(
        "Gathering the last round's blocks through the block tables, on the CPU with torch: a stand-in for kernels",
        ("KiB a block", "ordered ms", "scattered ms", "scattered / ordered (quartiles)", "ordered / ordered (noise)"),
    )
    for kib in GATHERED_KIB:
        progress(f"gathering blocks of {kib} KiB")
        repeats = max(1, 64 // kib)
        scattered, ordered = (gathered(session.prompts, kib, repeats) for session in sessions)
        ordered(), scattered()
        turns = take_turns(ordered, {"scattered": scattered}, 5 if quick else 25)
        row = [kib, turns.median_baseline, turns.median("scattered")]
        gather.rows.append([*row, turns.ratio("scattered").text, turns.noise().text])
    report.tables.append(gather)
    if not quick:
        lines = [Line(name, values) for name, values in shares.items()]
        title = "New prompts' blocks that lie side by side, by rollout round"
        PLOT.write_text(line_plot(title, "round", "share of neighbours adjacent in memory", lines, top=1.0))
        last = statistics.fmean(shares["reset only"][-10:])
        report.notes.append(f"Mean of the last ten rounds with resets only: {last:.3f}. Plot: docs/contiguity.svg.")
    return report


if __name__ == "__main__":
    sys.exit(main(measure))
