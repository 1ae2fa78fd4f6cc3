"""Bugs that could have been written, each with the test that must fail on it: what shows that the tests test.

    python -m tests.robustness.seeded_bugs [--write-docs]     the table, and into docs/reliability.md

A bug is one text of one file replaced by another. It is put into a copy of the sources (see test_seeded_bugs.py), never
into the checkout.
"""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.contract.sidecar_process import ROOT
from tests.robustness.reliability_page import write_between


@dataclass(frozen=True)
class Bug:
    """One replaced text, and the test that must see it."""

    what: str
    file: str
    was: str
    """Occurs exactly once in the file."""
    becomes: str
    test: str
    """Its name; there is only one of that name."""
    slow: bool = False
    """Needs vLLM, which takes long to import; not in every run."""

    def planted(self, source: str) -> str:
        """The file with the bug in it. ValueError when the text is not there exactly once."""
        found = source.count(self.was)
        if found != 1:
            raise ValueError(f"{self.file} has the text of the bug {self.what!r} {found} times; expected once")
        return source.replace(self.was, self.becomes)

    def node(self, tree: Path) -> str:
        """What pytest calls the test, from the top of `tree`. ValueError when there is not exactly one."""
        defined = re.compile(rf"^(async )?def {self.test}\(", re.MULTILINE)
        found = [file for file in (tree / "tests").rglob("test_*.py") if defined.search(file.read_text())]
        if len(found) != 1:
            raise ValueError(f"{len(found)} tests are called {self.test}; expected one")
        return f"{found[0].relative_to(tree)}::{self.test}"


DISPATCHER = "engine_bridge/dispatcher.py"
ROLLOUT = "sidecar/coordinator/rollout.py"
RETRY = "sidecar/coordinator/retry.py"
ATTEMPT = "sidecar/coordinator/attempt.py"
EXECUTION = "sidecar/coordinator/execution.py"
STORE = "sidecar/coordinator/store.py"
AGGREGATE = "sidecar/replica/aggregate.py"
VERDICT = "sidecar/replica/verdict.py"
PAGE = "engine_bridge/page.py"
RESET = "engine_bridge/operations/reset.py"

BUGS = (
    # --- the bridge ---
    Bug(
        "a repeated request id is done again",
        DISPATCHER,
        "recorded = self._outcomes.find(request.request_id)",
        "recorded = None",
        "test_spellings_of_a_uuid_are_one_id",
    ),
    Bug(
        "other arguments under a known id get the old result",
        DISPATCHER,
        "if recorded.fingerprint != fingerprint(request):",
        "if False:",
        "test_every_argument_counts_when_requests_are_compared",
    ),
    Bug(
        "the deadline is not looked at before an operation starts",
        DISPATCHER,
        "if now >= request.deadline_ns:",
        "if False:",
        "test_an_expired_operation_has_no_effect_and_is_on_record",
    ),
    Bug(
        "an operation starts without its id in the page",
        DISPATCHER,
        "        self._recorder.note_started(request.request_id, now)\n",
        "",
        "test_an_id_is_noted_before_its_deadline_is_looked_at",
    ),
    Bug(
        "a full record forgets the newest outcome",
        "engine_bridge/outcomes.py",
        "self._ring.popitem(last=False)",
        "self._ring.popitem(last=True)",
        "test_the_record_holds_so_many_outcomes_and_forgets_the_oldest",
    ),
    Bug(
        "long work is never cut into slices",
        DISPATCHER,
        "if self._clock() - began >= SLICE_NS:",
        "if False:",
        "test_long_work_is_cut_into_slices_and_the_engine_gets_its_turns",
    ),
    Bug(
        "what an operation raises reaches the engine's loop",
        DISPATCHER,
        "except Exception as error:  # whatever an operation raises, the engine goes on serving",
        "except KeyboardInterrupt as error:",
        "test_an_operation_that_raises_is_answered_and_the_next_one_runs",
    ),
    Bug(
        "a preempt looks only afterwards whether it helps",
        RESET,
        'left = port.held_blocks() if request.running == "fail" else port.blocks_after_preempt()',
        'left = port.held_blocks() if request.running == "fail" else 0',
        "test_preempt_is_refused_before_anything_is_preempted",
    ),
    Bug(
        "a lease that runs out forgets the quarantine",
        RESET,
        'if not port.capabilities().get("reset.quarantine", ""):\n        port.quarantine_running()',
        'if not port.capabilities().get("reset.quarantine", ""):\n        pass',
        "test_kept_requests_are_quarantined_when_a_lease_runs_out",
    ),
    Bug(
        "a page half written is read as a whole one",
        PAGE,
        "if sequence % 2 or page != self._copy():",
        "if page != self._copy():",
        "test_a_page_whose_writer_stopped_in_the_middle_gives_no_reading",
    ),
    Bug(
        "the page keeps one request id fewer than it says",
        PAGE,
        "(self._next_slot + 1) % STARTED_SLOTS",
        "(self._next_slot + 1) % (STARTED_SLOTS - 1)",
        "test_the_last_started_ids_are_kept_in_order_and_older_ones_fall_out",
    ),
    # --- the sidecar ---
    Bug(
        "the first rank speaks for all of them",
        AGGREGATE,
        "worst = min(judged, key=lambda j: ORDER.index(j.code))",
        "worst = judged[0]",
        "test_the_most_actionable_code_wins_whatever_the_order_of_ranks",
    ),
    Bug(
        "a timeout is swallowed",
        AGGREGATE,
        "            Code.DEADLINE_EXCEEDED,\n            _known_reason(submitted.reason,",
        "            Code.OK,\n            _known_reason(submitted.reason,",
        "test_every_ending_has_its_code",
    ),
    Bug(
        "what had started when its time ran out passes for never begun",
        "sidecar/backends/bridge/backend.py",
        "if snapshot.has_started(mutation.request_id):",
        "if False:",
        "test_an_operation_that_had_started_is_unknown_until_asked_again_by_its_id",
    ),
    Bug(
        "an engine that died after its answer still counts as done",
        AGGREGATE,
        "if code is Code.OK and not answer.alive_after:",
        "if False:",
        "test_a_process_that_died_after_its_answer_is_not_ok",
    ),
    Bug(
        "a deadline follows the wall clock",
        "sidecar/rpc/deadlines.py",
        "return time.monotonic_ns() >= self.at_ns",
        "return time.time_ns() >= self.at_ns",
        "test_a_stepped_wall_clock_changes_nothing",
    ),
    Bug(
        "a hop keeps no time to say what happened",
        "sidecar/rpc/deadlines.py",
        "wanted = min(max(_LEAST_MARGIN_S, budget_s * _MARGIN_SHARE), _LARGEST_MARGIN_S)",
        "wanted = 0.0",
        "test_a_hop_keeps_five_percent_within_bounds",
    ),
    Bug(
        "a process that is gone is judged by its page",
        VERDICT,
        "if last.process is Process.GONE:",
        "if False:",
        "test_a_process_that_is_gone_is_dead_whatever_its_page_still_says",
    ),
    Bug(
        "a load in flight is taken for a deadlock",
        VERDICT,
        "if evidence is None or evidence.running > 0 or evidence.waiting_remote_kv <= 0:",
        "if True:",
        "test_a_load_still_in_flight_is_waited_for_and_is_no_deadlock",
    ),
    Bug(
        "a stall ends when its evidence grows old",
        VERDICT,
        "if view.turning_ns < view.stall_ns and not _has_not_moved_since_stall(view):",
        "if view.turning_ns < view.stall_ns or view.evidence is None:",
        "test_a_standstill_that_the_engine_does_not_explain_is_stalled_all_the_same",
    ),
    Bug(
        "a method without a rule is open to everyone",
        "sidecar/rpc/auth.py",
        "else self.rules.get(method)",
        "else self.rules.get(method, Role.VIEWER)",
        "test_a_method_without_a_rule_is_denied_even_to_those_trusted_most",
    ),
    # --- the fleet ---
    Bug(
        "one more than max_unavailable is disrupted",
        ROLLOUT,
        "room = self.policy.max_unavailable - len(self.unhealthy)",
        "room = self.policy.max_unavailable + 1 - len(self.unhealthy)",
        "test_rolling_never_calls_more_than_max_unavailable_at_once",
    ),
    Bug(
        "a target that stays ill gives up its place among the disrupted",
        ROLLOUT,
        "room = self.policy.max_unavailable - len(self.unhealthy)",
        "room = self.policy.max_unavailable",
        "test_an_unhealthy_target_keeps_its_place_among_the_disrupted",
    ),
    Bug(
        "a rollout goes on past its failure limit",
        ROLLOUT,
        "self._failures >= self.policy.max_failures:",
        "self._failures > self.policy.max_failures:",
        "test_the_failure_limit_drops_the_rest_with_the_last_failure_as_reason",
    ),
    Bug(
        "a target that a rollout never called gets no result",
        EXECUTION,
        "            if decision.drop:\n",
        "            if False:\n",
        "test_targets_given_up_after_too_many_failures_have_their_one_result",
    ),
    Bug(
        "a lost answer passes for a failure",
        RETRY,
        'return result.code == "UNAVAILABLE" and result.reason in TRANSPORT_REASONS',
        "return False",
        "test_each_answer_is_repeated_asked_for_or_final_as_the_contract_says",
    ),
    Bug(
        "a call whose answer was lost is made again without asking",
        RETRY,
        "return self._again(Next.ASK, now, retry_after_s, limited=True)",
        "return self._again(Next.REPEAT, now, retry_after_s, limited=True)",
        "test_a_lost_answer_is_asked_for_and_never_called_again",
    ),
    Bug(
        "a refusal is tried again without being asked to wait",
        RETRY,
        "result.reason not in FINAL_REFUSALS and self.wait:",
        "result.reason not in FINAL_REFUSALS:",
        "test_a_refusal_is_final_unless_waiting_was_asked_for",
    ),
    Bug(
        "the delay a replica named is ignored",
        RETRY,
        "return max(self.random.uniform(0.0, top), retry_after_s * self.random.uniform(1.0, 1.5))",
        "return self.random.uniform(0.0, top)",
        "test_a_delay_named_by_the_replica_is_the_least_wait_and_is_spread",
    ),
    Bug(
        "a target is called before its intent is on record",
        ATTEMPT,
        "        await self._journal.intent(self._aim.name, request_id, self._wave)\n",
        "",
        "test_no_target_is_called_whose_intent_is_not_on_record",
    ),
    Bug(
        "the id of a refusal is used again",
        ATTEMPT,
        "await self._intend(next_request_id(self._request_id))",
        "await self._intend(self._request_id)",
        "test_waiting_for_a_refusal_to_end_uses_a_fresh_request_id_for_each_try",
    ),
    Bug(
        "a write counts before it is on the disk",
        STORE,
        "PRAGMA synchronous = FULL",
        "PRAGMA synchronous = OFF",
        "test_writes_are_synced_and_those_that_wait_together_share_a_transaction",
    ),
    Bug(
        "retention forgets operations that run",
        STORE,
        "DELETE FROM operations WHERE ended = 1 AND (",
        "DELETE FROM operations WHERE (",
        "test_retention_forgets_what_is_old_or_too_much_and_never_what_runs",
    ),
    Bug(
        "one bad write takes others with it",
        STORE,
        "if len(jobs) > 1:",
        "if False:",
        "test_one_write_that_fails_does_not_take_others_with_it",
    ),
    # --- what people and programs are told ---
    Bug(
        "kvctl exits 0 when some replicas did it",
        "sidecar/cli/exitcodes.py",
        "    if succeeded:\n        return Exit.PARTIAL\n",
        "    if succeeded:\n        return Exit.SUCCEEDED\n",
        "test_zero_means_every_replica_succeeded_and_none_may_be_missing",
    ),
    Bug(
        "a weight update leaves kept requests out of quarantine",
        "sidecar/client/weights.py",
        "quarantine_running=keep,",
        "quarantine_running=False,",
        "test_a_weight_update_pauses_transfers_completes_resets_and_resumes_in_this_order",
    ),
    # --- on vLLM's own structures ---
    Bug(
        "a sort loses a block",
        "engine_bridge/engine/pools.py",
        "queue.prepend_n(chosen)",
        "queue.prepend_n(chosen[1:])",
        "test_a_reorder_interrupted_by_anything_loses_and_doubles_nothing",
        slow=True,
    ),
    Bug(
        "sorting the uncached blocks gives up the order of the cached ones",
        "engine_bridge/engine/pools.py",
        'and (scope == "all_free" or block.block_hash is None)',
        "and True",
        "test_an_undisturbed_reorder_of_uncached_blocks_keeps_the_lru_order_behind_them",
        slow=True,
    ),
    Bug(
        "a hash that no map knows survives a reset",
        "engine_bridge/engine/pools.py",
        "for block in pool.blocks[::stride]:",
        "for block in ():",
        "test_a_hash_that_is_in_no_map_is_found_all_the_same",
        slow=True,
    ),
    Bug(
        "a preempted request takes its quarantine along",
        "engine_bridge/engine/guards.py",
        "        self._ids.discard(request_id)\n",
        "",
        "test_a_preempted_request_leaves_quarantine_and_what_it_recomputes_is_cached",
        slow=True,
    ),
    Bug(
        "blocks of a request in quarantine get their hash",
        "engine_bridge/engine/guards.py",
        "if request.request_id not in self._ids:",
        "if True:",
        "test_without_quarantine_a_kept_request_refills_the_cache_and_with_it_does_not",
        slow=True,
    ),
    Bug(
        "a store that completes after a keep reset is not looked at",
        "engine_bridge/engine/guards.py",
        "if not any(lost):",
        "if True:",
        "test_with_the_guard_it_gives_back_both_references_and_caches_nothing",
        slow=True,
    ),
)


def as_markdown() -> str:
    """The table for docs/reliability.md."""
    rows = ["| bug | in | caught by |", "| --- | --- | --- |"]
    for bug in BUGS:
        rows.append(f"| {bug.what} | `{bug.file}` | {bug.test.removeprefix('test_').replace('_', ' ')} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.robustness.seeded_bugs", description=__doc__)
    parser.add_argument("--write-docs", action="store_true", help="put the table into docs/reliability.md")
    options = parser.parse_args()
    for bug in BUGS:
        bug.planted((ROOT / bug.file).read_text())
        bug.node(ROOT)
    print(as_markdown())
    if options.write_docs:
        write_between("seeded bugs", as_markdown())
    return 0


if __name__ == "__main__":
    sys.exit(main())
