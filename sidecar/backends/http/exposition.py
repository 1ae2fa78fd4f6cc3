"""What vLLM's /metrics says of each engine, and what it leaves open.

Only the dozen families below are read, line by line: a page can have thousands of lines, and parsing all of them every
two seconds would cost more than the rest of the sidecar. Absent families stay -1 ("cannot be known"), never 0. Names
as of vLLM 0.12 to 0.33; `gpu_cache_usage_perc` is the older name of `kv_cache_usage_perc`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

_LINE: Final = re.compile(r"^((?:vllm:|process_start_time)[A-Za-z_:]*)(?:\{(.*)\})?[ \t]+(\S+)", re.MULTILINE)
_LABEL: Final = re.compile(r'([A-Za-z_][A-Za-z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPED: Final = re.compile(r"\\(.)")
_MAX_ENGINES: Final = 1024

_FIELDS: Final = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generation_tokens",
    "vllm:iteration_tokens_total_count": "iterations",
}


@dataclass(slots=True)
class RankGauges:
    """One engine, by its data-parallel rank. -1: the page does not tell."""

    running: int = -1
    waiting: int = -1
    deferred: int = -1
    """Waiting for something other than capacity (KV transfer, grammar, LoRA budget)."""
    loading: int = -1
    """Loading KV from a remote tier, in progress."""
    load_finished: int = -1
    preemptions: int = -1
    prompt_tokens: int = -1
    generation_tokens: int = -1
    iterations: int = -1
    """Engine steps that put something out."""
    usage: float = -1.0
    """Share of blocks in use, 0 to 1."""
    blocks: int = -1
    """Blocks of the pool, the null block included."""
    block_size: int = 0
    prefix_caching: bool = True
    awake: int = -1
    """1 awake, 0 sleeping."""
    model: str = ""

    @property
    def tokens(self) -> int:
        """Tokens in and out; -1 when either is unknown."""
        if self.prompt_tokens < 0 or self.generation_tokens < 0:
            return -1
        return self.prompt_tokens + self.generation_tokens

    @property
    def usable_blocks(self) -> int:
        """Without the null block; -1 unknown."""
        return self.blocks - 1 if self.blocks > 0 else -1

    @property
    def free_blocks(self) -> int:
        """As exact as a share of blocks is; -1 unknown."""
        if self.usable_blocks < 0 or self.usage < 0:
            return -1
        return max(round(self.usable_blocks * (1.0 - self.usage)), 0)


@dataclass(slots=True)
class Exposition:
    """One page."""

    ranks: dict[int, RankGauges] = field(default_factory=dict)
    process_started: float = 0.0
    """Unix time at which the API server process started; 0 unknown. Only told apart, never compared with a clock."""


def read(text: str) -> Exposition:
    """Read a page; what cannot be read counts as absent."""
    page = Exposition()
    for match in _LINE.finditer(text):
        name, labels_text, number = match.groups()
        try:
            value = float(number)
        except ValueError:
            continue
        if value != value or value in (float("inf"), float("-inf")):
            continue
        if name == "process_start_time_seconds":
            page.process_started = value
            continue
        labels = {key: _plain(value) for key, value in _LABEL.findall(labels_text or "")}
        rank = labels.get("engine", "0")
        if not rank.isdigit() or int(rank) >= _MAX_ENGINES:
            continue
        _take(page.ranks, int(rank), name, labels, value)
    return page


def _plain(value: str) -> str:
    r"""A label value without the format's escapes: \\, \" and \n."""
    return _ESCAPED.sub(lambda match: "\n" if match[1] == "n" else match[1], value) if "\\" in value else value


def _take(ranks: dict[int, RankGauges], rank: int, name: str, labels: dict[str, str], value: float) -> None:
    plain = _FIELDS.get(name)
    if plain is not None:
        gauges = ranks.setdefault(rank, RankGauges())
        gauges.model = labels.get("model_name", gauges.model)
        # Several models or label sets of one engine add up.
        setattr(gauges, plain, max(getattr(gauges, plain), 0) + int(value))
        return
    match name, labels.get("reason") or labels.get("stage") or labels.get("sleep_state"):
        case "vllm:num_requests_waiting_by_reason", "deferred":
            ranks.setdefault(rank, RankGauges()).deferred = int(value)
        case "vllm:num_requests_kv_fetch_by_stage", "in_progress":
            ranks.setdefault(rank, RankGauges()).loading = int(value)
        case "vllm:num_requests_kv_fetch_by_stage", "completed_waiting":
            ranks.setdefault(rank, RankGauges()).load_finished = int(value)
        case "vllm:engine_sleep_state", "awake":
            ranks.setdefault(rank, RankGauges()).awake = int(value)
        case (("vllm:kv_cache_usage_perc" | "vllm:gpu_cache_usage_perc"), _):
            ranks.setdefault(rank, RankGauges()).usage = value
        case "vllm:cache_config_info", _:
            _take_config(ranks.setdefault(rank, RankGauges()), labels)


def _take_config(gauges: RankGauges, labels: dict[str, str]) -> None:
    blocks, size = labels.get("num_gpu_blocks", ""), labels.get("block_size", "")
    gauges.blocks = int(blocks) if blocks.isdigit() else -1
    gauges.block_size = int(size) if size.isdigit() else 0
    gauges.prefix_caching = labels.get("enable_prefix_caching", "True") != "False"
