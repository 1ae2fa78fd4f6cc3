"""No operation, in any order, with any arguments, kills or wedges the engine.

Hypothesis plays clients of vLLM, clients of the bridge, vandals at its socket, a slow remote tier and the clock against
vLLM's real engine core, scheduler and block pool (see `stepped_engine`). After every move the books must be right; in
the end everything must have been answered, every request finished with the tokens it would have had undisturbed, and
every block be back.

KVCTL_STATE_MACHINE_RUNS sets the number of runs (200; `make soak`: 2,000). The default ones are the same every time,
a soak looks elsewhere each time.
"""

from __future__ import annotations

import os
import sys
import uuid
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from engine_bridge import protocol
from engine_bridge.listener import MAX_BAD_FRAMES, MAX_CONNECTIONS
from engine_bridge.outcomes import fingerprint
from engine_bridge.page import PageReader, Phase
from tests.engine.fake_vllm import expected_tokens
from tests.engine.moves import (
    FOREVER,
    HOUR_NS,
    IDS,
    LONG,
    Caller,
    afterthoughts,
    coin,
    mutations,
    paces,
    pauses,
    questions,
    rarely,
    resets,
    smaller,
)
from tests.engine.scheduler_world import assert_queue_sound
from tests.engine.stepped_engine import Loop, assert_references_sound

pytestmark = pytest.mark.engine

DEFAULT_RUNS = 200
RUNS = int(os.environ.get("KVCTL_STATE_MACHINE_RUNS", DEFAULT_RUNS))
STEPS = 40
BLOCK = 16
LONGEST_REPLY = 16 * 1024
BLOCKS = 36
"""Enough for one of the longest requests and no more: others are preempted or wait."""
LONGEST = 480
TURNS_HOME = 4_000
PREFIXES = [[8 + (37 * kind + i) % 480 for i in range(400)] for kind in range(2)]


class EngineMachine(RuleBasedStateMachine):
    def __init__(self, asynchronous: bool) -> None:
        super().__init__()
        self.asynchronous = asynchronous
        self.loop: Loop | None = None

    @initialize(
        connector=st.sampled_from([True, True, False]),
        policy=st.sampled_from(["fcfs", "priority"]),
        uncached=rarely,
        busy=st.integers(0, 6),
        turns=st.integers(1, 12),
        pace=paces,
    )
    def boot(self, connector: bool, policy: str, uncached: bool, busy: int, turns: int, pace: int) -> None:
        self.loop = loop = Loop(
            asynchronous=self.asynchronous,
            connector=connector,
            blocks=BLOCKS,
            max_model_len=LONGEST,
            max_num_batched_tokens=64,
            max_num_seqs=6,
            scheduling_policy=policy,
            enable_prefix_caching=not uncached,
        )
        loop.clock.pace = pace
        self.asked: dict[str, tuple[list[int], int]] = {}
        self.said: dict[str, list[int]] = {}
        self.ended: dict[str, str] = {}
        self.recorded: dict[str, protocol.Outcome] = {}
        self.callers = [Caller(loop), Caller(loop)]
        self.vandal = Caller(loop)
        self.past: list[Any] = []
        self.steps_seen = 0
        self.began = loop.clock.now
        self.fresh = 0
        self.page = PageReader(loop.bridge.page.path)
        for number in range(busy):
            self._add(PREFIXES[0][: 50 * number], 7, 150, number % 3, 64 * (number % 2))
        self._turns(turns)

    # --- clients of vLLM -----------------------------------------------------------------------------------------

    @rule(
        prefix=st.integers(0, 1),
        shared=st.sampled_from([0, 15, 16, 100, 300]),
        own=st.integers(1, 40),
        max_tokens=st.sampled_from([1, 20, 60, 120]),
        priority=st.integers(0, 2),
        remote=st.sampled_from([0, 0, 64, 160, 288]),
        count=st.integers(1, 4),
        turns=st.integers(0, 9),
    )
    def add(
        self, prefix: int, shared: int, own: int, max_tokens: int, priority: int, remote: int, count: int, turns: int
    ) -> None:
        for _ in range(count):
            self._add(PREFIXES[prefix][:shared], own, max_tokens, priority, remote)
        self._turns(turns)

    def _add(self, shared: list[int], own: int, max_tokens: int, priority: int, remote: int) -> None:
        name = f"request-{len(self.asked)}"
        prompt = [*shared, *(8 + (len(self.asked) * 31 + i * 7) % 480 for i in range(own))]
        remote = min(remote, (len(prompt) - 1) // BLOCK * BLOCK)
        self.asked[name] = (prompt, max_tokens)
        self.said[name] = []
        self.loop.add(name, prompt, max_tokens, priority=priority, remote_tokens=remote)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.asked:
            name = data.draw(st.sampled_from(sorted(self.asked)))
            self.loop.abort([name, "never-heard-of"])
            self.ended.setdefault(name, "abort")

    @rule(
        method=st.sampled_from(
            [
                ("reset_prefix_cache", False, False),
                ("reset_prefix_cache", True, False),
                ("reset_prefix_cache", True, True),
                ("reset_mm_cache",),
                ("reset_encoder_cache",),
                ("pause_scheduler", "abort", True),
                ("pause_scheduler", "wait", False),
                ("pause_scheduler", "keep", False),
                ("pause_scheduler", "keep", True),
                ("resume_scheduler",),
                ("resume_scheduler",),
                ("sleep", 0, "keep"),
                ("sleep", 1, "keep"),
                ("sleep", 1, "wait"),
                ("sleep", 2, "abort"),
                ("release_kv_cache_memory",),
                ("wake_up", None),
                ("wake_up", ["scheduling"]),
                ("set_weight_version", "theirs"),
                ("set_weight_version", LONG),
            ]
        )
    )
    def vllm(self, method: tuple[Any, ...]) -> None:
        self.loop.utility(*(LONG * 16_325 if argument == LONG else argument for argument in method))

    # --- the engine, the remote, time ----------------------------------------------------------------------------

    @rule(turns=st.sampled_from([1, 2, 3, 5, 8, 40]))
    def run(self, turns: int) -> None:
        self._turns(turns)

    @rule(
        landing=st.integers(0, 3),
        answer=st.sampled_from([True, False, None, RuntimeError("boom")]),
        ns=st.sampled_from([0, 10**5, 10**7, 2 * 10**9, 2 * HOUR_NS]),
        pace=paces,
        turns=st.integers(0, 3),
    )
    def the_world_moves(self, landing: int, answer: Any, ns: int, pace: int, turns: int) -> None:
        """Loads end, time passes fast or slowly, the remote changes its mind."""
        self.loop.executor.landing += landing
        self.loop.clock.now += ns
        self.loop.clock.pace = pace
        if self.loop.scheduler.connector is not None:
            self.loop.scheduler.connector.answer = answer
        self._turns(turns)

    # --- clients of the bridge -----------------------------------------------------------------------------------

    @rule(caller=st.integers(0, 1), mutation=resets, fresh=coin, turns=st.integers(0, 3), then=afterthoughts)
    def reset(self, caller: int, mutation: Any, fresh: bool, turns: int, then: str) -> None:
        self._mutate(caller, mutation, fresh, turns, then)

    @rule(caller=st.integers(0, 1), mutation=smaller, fresh=coin, turns=st.integers(0, 3), then=afterthoughts)
    def reorder_or_relieve(self, caller: int, mutation: Any, fresh: bool, turns: int, then: str) -> None:
        self._mutate(caller, mutation, fresh, turns, then)

    @rule(caller=st.integers(0, 1), mutation=pauses, fresh=coin, turns=st.integers(0, 3), then=afterthoughts)
    def pause_or_resume(self, caller: int, mutation: Any, fresh: bool, turns: int, then: str) -> None:
        self._mutate(caller, mutation, fresh, turns, then)

    def _mutate(self, caller: int, mutation: Any, fresh: bool, turns: int, then: str) -> None:
        loop = self.loop
        changes: dict[str, Any] = {}
        if mutation.deadline_ns != FOREVER:
            changes["deadline_ns"] = loop.clock.now + mutation.deadline_ns
        if getattr(mutation, "weight_version", "") == LONG:
            changes["weight_version"] = LONG * 16_325
        if fresh:
            self.fresh += 1
            changes["request_id"] = str(uuid.UUID(int=1000 + self.fresh))
        mutation = msgspec.structs.replace(mutation, **changes)
        self.past.append(mutation)
        self.callers[caller].say(mutation)
        self._turns(turns)
        other = self.callers[1 - caller]
        if then == "again":
            other.say(mutation)
        elif then == "otherwise":
            other.say(protocol.Relieve(0, mutation.request_id, loop.clock.now + HOUR_NS))
        elif then == "cancel":
            other.say(protocol.Cancel(0, mutation.request_id))
        elif then == "late":
            loop.clock.now += 2 * HOUR_NS
        self._turns(turns)

    @rule(caller=st.integers(0, 1), question=questions, turns=st.integers(0, 1))
    def ask(self, caller: int, question: Any, turns: int) -> None:
        self.callers[caller].say(question)
        self._turns(turns)

    @rule(caller=st.integers(0, 1), data=st.data(), turns=st.integers(0, 1))
    def about_the_past(self, caller: int, data: st.DataObject, turns: int) -> None:
        if not self.past:
            return
        mutation = data.draw(st.sampled_from(self.past[-6:]))
        request_id = mutation.request_id
        self.callers[caller].say(
            data.draw(
                st.sampled_from(
                    [
                        mutation,
                        mutation,
                        protocol.Relieve(0, request_id, self.loop.clock.now + HOUR_NS),
                        protocol.Cancel(0, request_id),
                        protocol.Lookup(0, request_id),
                        protocol.Renew(0, request_id, 10**9, True),
                        protocol.Resume(0, str(uuid.uuid5(uuid.NAMESPACE_OID, request_id)), FOREVER, request_id),
                    ]
                )
            )
        )
        self._turns(turns)

    @rule(caller=st.integers(0, 1))
    def go_away_and_come_back(self, caller: int) -> None:
        left = self.callers[caller]
        self.callers[caller] = self._connected()
        left.close()

    @rule(frame=st.binary(min_size=1, max_size=200), mutation=mutations | questions, data=st.data())
    def vandalise(self, frame: bytes, mutation: Any, data: st.DataObject) -> None:
        if data.draw(coin):
            whole = bytearray(protocol.encoder.encode(mutation))
            at = data.draw(st.integers(0, min(len(whole) - 1, 120)))
            whole[at : at + data.draw(st.integers(0, 9))] = frame[:9]
            frame = bytes(whole)[:60_000]
        try:
            self.vandal.sock.send(frame)
            self.vandal.hear()
        except (OSError, EOFError):
            self.vandal.close()
            self.vandal = self._connected()

    def _connected(self) -> Caller:
        """A new client. The kernel holds as many connections as the engine accepts, one each time round its loop."""
        for _ in range(MAX_CONNECTIONS):
            try:
                return Caller(self.loop)
            except BlockingIOError:
                self._turns(2)
        raise AssertionError("the engine accepts nobody")

    @rule(turns=st.integers(1, 3))
    def nonsense_of_a_good_client(self, turns: int) -> None:
        """Values that the schema does not know are told apart by call."""
        if self.callers[0].nonsense == MAX_BAD_FRAMES - 1:
            self.go_away_and_come_back(0)
        caller = self.callers[0]
        caller.nonsense += 1
        caller._calls += 1
        body = {"type": "reset", "call": caller._calls, "request_id": IDS[0], "deadline_ns": 1, "running": "sometimes"}
        caller.open[caller._calls] = protocol.Reset(caller._calls, IDS[0], 1, "sometimes")  # type: ignore[arg-type]
        caller.sock.send(msgspec.msgpack.encode(body))
        self._turns(turns)

    # --- what must hold ------------------------------------------------------------------------------------------

    def _turns(self, count: int) -> None:
        for _ in range(count):
            if not self.loop.turn():
                self._nothing_is_overdue()
                break
            self._listen()

    def _nothing_is_overdue(self) -> None:
        """The engine blocks and nothing wakes it: then nothing may be left to do for it."""
        dispatcher, now = self.loop.bridge._dispatcher, self.loop.clock.now
        assert not self.loop.bridge._listener._epoll.poll(0), "the engine sleeps over messages"
        assert not dispatcher.wants_turn, "the engine sleeps over an operation"
        active, lease = dispatcher._active, dispatcher.memory.lease
        assert active is None or now < active.request.deadline_ns, "the engine sleeps over a deadline"
        assert lease is None or now < lease.expires_ns, "the engine sleeps over a lease"

    def _listen(self) -> None:
        for output in self.loop.outputs():
            self.said[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.ended.setdefault(output.request_id, str(output.finish_reason))
        for caller in self.callers:
            for reply in caller.hear():
                if not isinstance(reply, protocol.Welcome):
                    self._told(reply, caller.open.pop(reply.call))  # type: ignore[union-attr]

    def _told(self, reply: protocol.Reply, request: Any) -> None:
        if getattr(request, "running", "") == "sometimes":
            assert isinstance(reply, protocol.Fault), reply
            return
        assert not isinstance(reply, protocol.Fault), (request, reply)
        assert len(protocol.encoder.encode(reply)) < LONGEST_REPLY
        if isinstance(reply, protocol.Outcome):
            assert reply.operation == type(request).__name__.lower()
            assert reply.state != "raised", reply
            late = getattr(request, "deadline_ns", FOREVER) <= self.began
            assert not (late and reply.state == "done" and not reply.replayed), "done after its deadline"
            if not isinstance(request, protocol.Renew) and _is_uuid(request.request_id):
                self._outcome(reply)
        if isinstance(reply, protocol.Found) and reply.outcome is not None:
            self._same(reply.outcome)

    def _outcome(self, outcome: protocol.Outcome) -> None:
        if outcome.state == "busy":
            assert outcome.other_request_id not in ("", outcome.request_id)
        elif outcome.state != "mismatch":
            self._same(outcome)

    def _same(self, outcome: protocol.Outcome) -> None:
        """One request id, one effect, one story."""
        told = msgspec.structs.replace(outcome, call=0, replayed=False)
        first = self.recorded.setdefault(outcome.request_id, told)
        assert told == first, "the same request id has two outcomes"

    @invariant()
    def the_books_are_right(self) -> None:
        loop = self.loop
        if loop is None:
            return
        self._listen()
        assert not loop.bridge.closed
        scheduler = loop.scheduler
        assert_queue_sound(scheduler.kv_cache_manager.block_pool)
        assert_references_sound(scheduler)
        self._page_is_right()
        self._everything_is_answered_or_under_way()

    def _page_is_right(self) -> None:
        counters = self.page.read().counters
        Phase(counters.phase)
        assert counters.steps >= self.steps_seen
        self.steps_seen = counters.steps
        assert 0 <= counters.blocks_free <= counters.blocks_total == BLOCKS - 1
        assert counters.pid == os.getpid()
        assert counters.phase_since_ns <= self.loop.clock.now

    def _everything_is_answered_or_under_way(self) -> None:
        """Looked at when the socket has nothing left to take: what is still open waits for the operation in force."""
        if self.loop.bridge._listener._epoll.poll(0):
            return
        dispatcher = self.loop.bridge._dispatcher
        active, theirs = dispatcher._active, self.loop.engine.paused_by_client
        if active is None and dispatcher.memory.lease is None and not dispatcher.memory.abandoned:
            assert theirs is not None or not self.loop.engine.is_scheduler_paused(), "paused by nobody"
        if active is None and theirs is not None:
            assert self.loop.scheduler.pause_state == theirs, "a pause of vLLM's own was lost"
        for caller in self.callers:
            for request in caller.open.values():
                assert active is not None, f"forgotten: {request}"
                assert str(uuid.UUID(request.request_id)) == active.request.request_id, f"forgotten: {request}"  # type: ignore[union-attr]
                same: Any = msgspec.structs.replace(request, request_id=active.request.request_id)  # type: ignore[type-var]
                assert fingerprint(same) == fingerprint(active.request), f"forgotten: {request}"

    # --- the end -------------------------------------------------------------------------------------------------

    def teardown(self) -> None:
        if self.loop is None:
            return
        try:
            if not self._failed():
                self._bring_home()
        finally:
            self.page.close()
            for caller in (*self.callers, self.vandal):
                caller.close()
            self.loop.close()

    def _failed(self) -> bool:
        """Whether a move has failed already: that failure is the one to show."""
        return sys.exc_info()[0] is not None

    def _bring_home(self) -> None:
        loop, caller = self.loop, self.callers[0]
        loop.clock.pace = 1_000
        resumed = False
        for _ in range(20):
            loop.utility("wake_up", None)
            self._turns(3)
            for request_id in [*IDS, *(str(uuid.UUID(int=1000 + n + 1)) for n in range(self.fresh))]:
                caller.say(protocol.Cancel(0, request_id))
                self._turns(1)
            last = str(uuid.uuid5(uuid.NAMESPACE_URL, f"home {_}"))
            caller.say(protocol.Resume(0, last, loop.clock.now + HOUR_NS))
            for _turn in range(TURNS_HOME):
                loop.executor.landing = 100
                loop.clock.now += 10**6
                if not loop.turn():
                    break
                self._listen()
            resumed = last in self.recorded and self.recorded[last].state == "done"
            if resumed and all(name in self.ended for name in self.asked) and not loop.scheduler.requests:
                break
        assert resumed, self.recorded.get(last)
        assert all(name in self.ended for name in self.asked), "some requests never finish"
        self.the_books_are_right()
        assert not self.callers[0].open
        assert not self.callers[1].open
        self._nothing_is_lost()
        final = str(uuid.uuid5(uuid.NAMESPACE_URL, "final"))
        caller.say(protocol.Reset(0, final, loop.clock.now + HOUR_NS, "fail", reorder=True))
        while loop.turn():
            self._listen()
        assert self.recorded[final].state == "done"
        assert [
            block.block_id
            for block in loop.scheduler.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks()
        ] == list(range(1, BLOCKS))
        assert not list(Path(loop.directory).glob("*.failed"))

    def _nothing_is_lost(self) -> None:
        for name, (prompt, max_tokens) in self.asked.items():
            expected = expected_tokens(prompt, max_tokens)
            if self.ended[name] == "abort":
                assert self.said[name] == expected[: len(self.said[name])], name
            else:
                assert self.said[name] == expected, name
        scheduler = self.loop.scheduler
        assert not scheduler.requests
        assert not scheduler.deferred_frees
        assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == BLOCKS - 1
        assert "cache_blocks" not in vars(scheduler.kv_cache_manager.coordinator), "quarantine outlived its requests"


def _is_uuid(text: str) -> bool:
    try:
        uuid.UUID(text)
    except ValueError:
        return False
    return True


@pytest.mark.timeout(300 + 3 * RUNS)
@pytest.mark.parametrize("asynchronous", [False, True], ids=["Scheduler", "AsyncScheduler"])
def test_no_operation_in_any_order_with_any_arguments_kills_or_wedges_the_engine(asynchronous: bool) -> None:
    run_state_machine_as_test(
        lambda: EngineMachine(asynchronous),
        settings=settings(
            max_examples=RUNS // 2,
            stateful_step_count=STEPS,
            deadline=None,
            derandomize=RUNS <= DEFAULT_RUNS,
            database=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
