"""What the engine socket promises, whatever is behind it.

`EngineContract` is a suite: a test module subclasses it and provides a fixture `subject`. The fake engine and real
vLLM run the same tests, so that what is proven on the fake holds on the real one.
"""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from pathlib import Path
from typing import Protocol

import msgspec
import pytest

from engine_bridge import protocol
from engine_bridge.page import PageReader
from tests.fake_engine.client import BridgeClient, deadline, new_id

NEVER = 2**62
MINUTE_NS = 60 * 10**9


class Subject(Protocol):
    """An engine that serves, and hands to hold blocks on it."""

    socket_path: Path
    page_path: Path

    def hold(self) -> None:
        """One running request holds blocks, and goes on holding them."""

    def release(self) -> None:
        """No request is left; returns when no block is held."""

    def warm(self) -> None:
        """Some blocks carry a hash, none is held."""


def reset_result(outcome: protocol.Outcome) -> protocol.ResetResult:
    assert isinstance(outcome.result, protocol.ResetResult), outcome
    return outcome.result


def scheduling(outcome: protocol.Outcome) -> protocol.SchedulingResult:
    assert isinstance(outcome.result, protocol.SchedulingResult), outcome
    return outcome.result


class EngineContract:
    """Run with a fixture `subject`."""

    @pytest.fixture
    def bridge(self, subject: Subject):
        with BridgeClient(subject.socket_path) as client:
            yield client
            subject.release()

    # --- handshake and frames ------------------------------------------------------------------------------------

    def test_the_welcome_says_who_the_engine_is_and_names_every_capability(self, bridge: BridgeClient) -> None:
        welcome = bridge.welcome
        assert welcome is not None
        assert len(welcome.incarnation) == 32
        assert set(welcome.capabilities) == set(protocol.CAPABILITIES)
        assert welcome.blocks > 0
        assert welcome.block_size > 0
        assert abs(time.monotonic_ns() - welcome.monotonic_ns) < MINUTE_NS

    def test_a_client_of_another_protocol_is_told_so_in_words(self, subject: Subject) -> None:
        with BridgeClient(subject.socket_path, hello=False) as client:
            client.send(protocol.Hello(90, 91, "from the future"))
            reply = client.read()
            assert isinstance(reply, protocol.Goodbye)
            assert "protocol 1" in reply.reason
            assert "90 to 91" in reply.reason
            with pytest.raises(EOFError):
                client.read()

    def test_a_client_that_does_not_say_hello_is_sent_away(self, subject: Subject) -> None:
        with BridgeClient(subject.socket_path, hello=False) as client:
            client.send(protocol.Ping(1))
            assert isinstance(client.read(), protocol.Goodbye)

    def test_garbage_is_answered_with_a_fault_and_the_connection_goes_on(self, bridge: BridgeClient) -> None:
        for frame in (b"\xc1", b"not msgpack", b"\x91" * 5000, msgspec.msgpack.encode({"type": "no such request"})):
            bridge.sock.send(frame)
            assert isinstance(bridge.read(), protocol.Fault)
        assert isinstance(bridge.ask(protocol.Ping), protocol.Pong)

    def test_an_unknown_request_is_faulted_under_its_own_call_number(self, bridge: BridgeClient) -> None:
        bridge.sock.send(msgspec.msgpack.encode({"type": "from_the_future", "call": 77}))
        reply = bridge.read()
        assert isinstance(reply, protocol.Fault)
        assert reply.call == 77

    def test_an_unknown_mode_is_named_in_the_fault(self, bridge: BridgeClient) -> None:
        frame = {"type": "reset", "call": 5, "request_id": new_id(), "deadline_ns": NEVER, "running": "gently"}
        bridge.sock.send(msgspec.msgpack.encode(frame))
        reply = bridge.read()
        assert isinstance(reply, protocol.Fault)
        assert "gently" in reply.message

    def test_an_oversize_frame_is_refused_and_the_next_one_is_read(self, bridge: BridgeClient) -> None:
        bridge.sock.send(bytes(protocol.MAX_FRAME_BYTES + 1000))
        reply = bridge.read()
        assert isinstance(reply, protocol.Fault)
        assert str(protocol.MAX_FRAME_BYTES) in reply.message
        assert isinstance(bridge.ask(protocol.Ping), protocol.Pong)

    def test_a_client_that_sends_only_garbage_is_dropped_and_others_are_served(self, subject: Subject) -> None:
        dice = random.Random(1)
        with BridgeClient(subject.socket_path) as vandal, BridgeClient(subject.socket_path) as other:

            def rage() -> None:
                for _ in range(1000):
                    vandal.sock.send(dice.randbytes(dice.randrange(1, 2000)))
                    vandal.read()

            with pytest.raises((EOFError, ConnectionError)):
                rage()
            assert isinstance(other.ask(protocol.Ping), protocol.Pong)

    def test_a_client_that_never_reads_is_dropped_and_others_are_served(self, subject: Subject) -> None:
        with BridgeClient(subject.socket_path, timeout=5) as deaf, BridgeClient(subject.socket_path) as other:

            def talk() -> None:
                for call in range(100_000):
                    deaf.send(protocol.Admission(call, 0))

            with pytest.raises(ConnectionError):
                talk()
            assert isinstance(other.ask(protocol.Ping), protocol.Pong)

    def test_more_clients_than_there_are_places_for_are_told_so(self, subject: Subject) -> None:
        clients = [BridgeClient(subject.socket_path) for _ in range(15)]
        try:
            with BridgeClient(subject.socket_path, hello=False) as sixteenth:
                sixteenth.send(protocol.Hello(1, 1, "sixteenth"))
                sixteenth.read()
                with BridgeClient(subject.socket_path, hello=False) as last:
                    last.sock.settimeout(10)
                    assert isinstance(last.read(), protocol.Goodbye)
            assert isinstance(clients[0].ask(protocol.Ping), protocol.Pong)
        finally:
            for client in clients:
                client.close()

    def test_silent_connections_give_way_to_one_that_speaks(self, subject: Subject) -> None:
        silent = []
        for _ in range(16):
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            sock.connect(os.fspath(subject.socket_path))
            silent.append(sock)
        try:
            with BridgeClient(subject.socket_path) as client:
                assert isinstance(client.ask(protocol.Ping), protocol.Pong)
        finally:
            for sock in silent:
                sock.close()

    # --- reset ---------------------------------------------------------------------------------------------------

    def test_a_reset_of_an_idle_engine_drops_what_was_cached(self, subject: Subject, bridge: BridgeClient) -> None:
        subject.warm()
        result = reset_result(bridge.reset("fail"))
        assert result.prefix.state == "done"
        assert result.cached_blocks_dropped > 0
        assert result.cost.slices >= 1
        assert result.cost.longest_us > 0
        assert result.connector.state == "not_requested"
        again = reset_result(bridge.reset("fail"))
        assert again.cached_blocks_dropped == 0
        assert "0 blocks were cached" in again.prefix.message

    def test_fail_refuses_while_blocks_are_held_and_says_by_whom(self, subject: Subject, bridge: BridgeClient) -> None:
        subject.hold()
        outcome = bridge.reset("fail", connector=True, mm=True)
        assert outcome.state == "refused"
        assert outcome.reason == "BLOCKS_HELD_BY_REQUESTS"
        assert "1 running" in outcome.message
        result = reset_result(outcome)
        assert result.prefix.state == "refused"
        assert result.connector.state == "not_run"
        assert result.multimodal.state == "not_run"
        assert result.encoder.state == "not_requested"
        assert result.holders.held_blocks > 0
        assert result.requests_preempted == 0
        assert outcome.retry_after_ms > 0

    def test_keep_resets_while_blocks_are_held(self, subject: Subject, bridge: BridgeClient) -> None:
        subject.hold()
        result = reset_result(bridge.reset("keep"))
        assert result.prefix.state == "done"
        assert result.requests_kept == 1
        assert result.requests_preempted == 0
        assert result.holders.held_blocks > 0

    def test_preempt_resets_and_counts_whom_it_interrupted(self, subject: Subject, bridge: BridgeClient) -> None:
        subject.hold()
        result = reset_result(bridge.reset("preempt"))
        assert result.prefix.state == "done"
        assert result.requests_preempted == 1
        assert result.requests_kept == 0

    def test_a_reset_can_reorder_as_well(self, subject: Subject, bridge: BridgeClient) -> None:
        subject.warm()
        result = reset_result(bridge.reset("fail", reorder=True))
        assert result.reorder is not None
        after = result.reorder.after
        assert after.adjacent_pairs == after.free_blocks - 1
        assert result.reorder.cost.total_us <= result.cost.total_us

    def test_tiers_that_do_not_exist_are_told_apart_from_cleared_ones(
        self, subject: Subject, bridge: BridgeClient
    ) -> None:
        outcome = bridge.reset("fail", connector=True, mm=True, encoder=True)
        assert outcome.state == "done"
        result = reset_result(outcome)
        assert {result.connector.state, result.multimodal.state, result.encoder.state} == {"not_configured"}

    def test_options_that_exclude_each_other_are_invalid(self, bridge: BridgeClient) -> None:
        assert bridge.reset("fail", quarantine=True).state == "invalid"
        assert bridge.reset("keep", wait_for_idle=True).state == "invalid"

    # --- request ids ---------------------------------------------------------------------------------------------

    def test_a_repeat_gets_the_recorded_outcome_and_nothing_runs(self, subject: Subject, bridge: BridgeClient) -> None:
        subject.warm()
        request_id = new_id()
        first = bridge.reset("fail", request_id=request_id)
        subject.warm()
        cached = bridge.admission().blocks_cached
        second = bridge.reset("fail", request_id=request_id)
        assert not first.replayed
        assert second.replayed
        assert second.call != first.call
        assert second.result == first.result
        assert bridge.admission().blocks_cached == cached > 0

    def test_the_record_is_kept_for_other_connections(self, subject: Subject, bridge: BridgeClient) -> None:
        request_id = new_id()
        first = bridge.reset("fail", request_id=request_id)
        with BridgeClient(subject.socket_path) as other:
            found = other.ask(lambda call: protocol.Lookup(call, request_id.upper()))
        assert isinstance(found, protocol.Found)
        assert found.known
        assert found.outcome is not None
        assert found.outcome.replayed
        assert found.outcome.result == first.result

    def test_an_id_that_was_never_seen_is_unknown(self, bridge: BridgeClient) -> None:
        found = bridge.ask(lambda call: protocol.Lookup(call, new_id()))
        assert isinstance(found, protocol.Found)
        assert not found.known

    def test_an_id_used_with_other_arguments_is_a_mismatch(self, bridge: BridgeClient) -> None:
        request_id = new_id()
        bridge.reset("fail", request_id=request_id)
        assert bridge.reset("keep", request_id=request_id).state == "mismatch"
        assert bridge.reorder("all_free", request_id=request_id).state == "mismatch"

    def test_an_id_that_is_no_uuid_is_invalid(self, bridge: BridgeClient) -> None:
        assert bridge.reset("fail", request_id="seventeen").state == "invalid"

    def test_an_operation_past_its_deadline_is_never_executed(self, subject: Subject, bridge: BridgeClient) -> None:
        subject.warm()
        cached = bridge.admission().blocks_cached
        request_id = new_id()
        outcome = bridge.reset("fail", seconds=-1, request_id=request_id)
        assert outcome.state == "expired"
        assert outcome.reason == "NOT_EXECUTED"
        assert outcome.result is None
        assert bridge.admission().blocks_cached == cached > 0
        again = bridge.reset("fail", seconds=10, request_id=request_id)
        assert again.state == "expired"
        assert again.replayed

    def test_what_was_taken_up_is_noted_in_the_page(self, subject: Subject, bridge: BridgeClient) -> None:
        request_id = new_id()
        bridge.reset("fail", request_id=request_id)
        page = PageReader(subject.page_path)
        try:
            snapshot = page.read()
        finally:
            page.close()
        assert snapshot.has_started(request_id)
        assert not snapshot.has_started(new_id())
        assert snapshot.counters.last_reset_mode == 1
        assert snapshot.counters.last_reset_ns > 0

    # --- waiting, joining, one at a time ---------------------------------------------------------------------------

    def test_a_waiting_reset_fires_at_the_first_moment_without_a_held_block(
        self, subject: Subject, bridge: BridgeClient
    ) -> None:
        subject.hold()
        request_id = new_id()
        call = bridge.post(lambda n: protocol.Reset(n, request_id, deadline(30), "fail", wait_for_idle=True))
        found = bridge.ask(lambda n: protocol.Lookup(n, request_id))
        assert isinstance(found, protocol.Found)
        assert found.known
        assert found.outcome is None
        subject.release()
        outcome = bridge.answer(call)
        assert isinstance(outcome, protocol.Outcome)
        assert outcome.state == "done"
        assert reset_result(outcome).holders.held_blocks == 0

    def test_everyone_who_asks_with_the_same_id_joins_and_is_answered(
        self, subject: Subject, bridge: BridgeClient
    ) -> None:
        subject.hold()
        request_id = new_id()
        until = deadline(30)

        def ask(call: int) -> protocol.Reset:
            return protocol.Reset(call, request_id, until, "fail", wait_for_idle=True)

        with BridgeClient(subject.socket_path) as other:
            calls = [bridge.post(ask), bridge.post(ask)]
            other_call = other.post(ask)
            # A reply to a later frame of the same connection shows that the engine has read the earlier ones.
            assert isinstance(other.ask(protocol.Ping), protocol.Pong)
            assert isinstance(bridge.ask(protocol.Ping), protocol.Pong)
            subject.release()
            outcomes = [bridge.answer(calls[0]), bridge.answer(calls[1]), other.answer(other_call)]
        states = {(outcome.state, outcome.replayed) for outcome in outcomes if isinstance(outcome, protocol.Outcome)}
        assert states == {("done", False)}

    def test_another_operation_meanwhile_is_busy_and_reading_goes_on(
        self, subject: Subject, bridge: BridgeClient
    ) -> None:
        subject.hold()
        request_id = new_id()
        call = bridge.post(lambda n: protocol.Reset(n, request_id, deadline(30), "fail", wait_for_idle=True))
        busy = bridge.reset("keep")
        assert busy.state == "busy"
        assert busy.other_request_id == request_id
        assert busy.reason == "OPERATION_IN_PROGRESS"
        assert bridge.admission().running == 1
        assert bridge.reset("keep", request_id=request_id).state == "mismatch"
        subject.release()
        assert isinstance(bridge.answer(call), protocol.Outcome)
        assert bridge.reset("keep").state == "done"

    def test_a_waiting_reset_is_withdrawn_at_its_deadline(self, subject: Subject, bridge: BridgeClient) -> None:
        subject.hold()
        request_id = new_id()
        outcome = bridge.reset("fail", seconds=0.3, wait_for_idle=True, request_id=request_id)
        assert outcome.state == "withdrawn"
        assert outcome.reason == "NEVER_IDLE"
        page = PageReader(subject.page_path)
        assert not page.read().has_started(request_id)
        page.close()
        subject.release()
        assert bridge.reset("fail", wait_for_idle=True, request_id=request_id).replayed

    def test_a_waiting_reset_can_be_cancelled(self, subject: Subject, bridge: BridgeClient) -> None:
        subject.hold()
        request_id = new_id()
        call = bridge.post(lambda n: protocol.Reset(n, request_id, deadline(30), "fail", wait_for_idle=True))
        cancelled = bridge.ask(lambda n: protocol.Cancel(n, request_id))
        assert isinstance(cancelled, protocol.Cancelled)
        assert cancelled.cancelled
        outcome = bridge.answer(call)
        assert isinstance(outcome, protocol.Outcome)
        assert outcome.state == "withdrawn"
        assert outcome.reason == "CANCELLED"

    def test_what_has_ended_cannot_be_cancelled(self, bridge: BridgeClient) -> None:
        request_id = new_id()
        bridge.reset("fail", request_id=request_id)
        reply = bridge.ask(lambda n: protocol.Cancel(n, request_id))
        assert isinstance(reply, protocol.Cancelled)
        assert not reply.cancelled

    def test_a_caller_that_goes_away_cancels_nothing(self, subject: Subject, bridge: BridgeClient) -> None:
        subject.hold()
        request_id = new_id()
        with BridgeClient(subject.socket_path) as other:
            other.post(lambda n: protocol.Reset(n, request_id, deadline(30), "fail", wait_for_idle=True))
            other.ask(protocol.Ping)
        subject.release()
        outcome = bridge.reset("fail", wait_for_idle=True, request_id=request_id)
        assert outcome.state == "done"

    # --- reorder, admission --------------------------------------------------------------------------------------

    def test_idle_reorder_refuses_while_blocks_are_held(self, subject: Subject, bridge: BridgeClient) -> None:
        subject.hold()
        outcome = bridge.reorder("idle")
        assert outcome.state == "refused"
        assert outcome.reason == "BLOCKS_HELD_BY_REQUESTS"

    @pytest.mark.parametrize("scope", ["idle", "all_free"])
    def test_a_reorder_leaves_every_free_block_beside_its_neighbour(
        self, subject: Subject, bridge: BridgeClient, scope: protocol.Scope
    ) -> None:
        subject.warm()
        outcome = bridge.reorder(scope)
        assert outcome.state == "done"
        assert isinstance(outcome.result, protocol.ReorderResult)
        assert outcome.result.after.free_blocks == outcome.result.before.free_blocks
        assert outcome.result.after.runs == 1

    def test_admission_tells_running_requests_and_blocks(self, subject: Subject, bridge: BridgeClient) -> None:
        subject.hold()
        evidence = bridge.admission()
        assert evidence.running == 1
        assert evidence.blocks_free < evidence.blocks_total
        assert evidence.scheduling == "running"
        assert evidence.contiguity is not None

    def test_relief_is_refused_where_nothing_is_deadlocked(self, bridge: BridgeClient) -> None:
        outcome = bridge.mutate(lambda call: protocol.Relieve(call, new_id(), deadline(10)))
        assert outcome.state == "refused"
        assert outcome.reason == "NOT_DEADLOCKED"

    # --- pause ---------------------------------------------------------------------------------------------------

    def test_a_pause_stops_scheduling_until_it_is_resumed(self, subject: Subject, bridge: BridgeClient) -> None:
        subject.hold()
        lease = self.pause(bridge)
        assert bridge.admission().scheduling == "paused"
        refused = bridge.reset("fail")
        assert refused.reason == "HELD_WHILE_PAUSED"
        other = bridge.mutate(lambda n: protocol.Pause(n, new_id(), deadline(5), MINUTE_NS))
        assert other.reason == "WRONG_SCHEDULING_STATE"
        wrong = bridge.mutate(lambda n: protocol.Resume(n, new_id(), deadline(5), new_id()))
        assert wrong.reason == "WRONG_SCHEDULING_STATE"
        outcome = bridge.mutate(lambda n: protocol.Resume(n, new_id(), deadline(5), lease, "step-7"))
        assert outcome.state == "done"
        assert scheduling(outcome).state == "running"
        assert scheduling(outcome).weight_version == "step-7"
        assert bridge.admission().weight_version == "step-7"

    def test_a_lease_is_renewed(self, bridge: BridgeClient) -> None:
        lease = self.pause(bridge, 5 * 10**9)
        outcome = bridge.mutate(lambda n: protocol.Renew(n, lease, MINUTE_NS))
        assert outcome.state == "done"
        assert scheduling(outcome).lease_remaining_ns > MINUTE_NS // 2
        assert bridge.mutate(lambda n: protocol.Renew(n, new_id(), MINUTE_NS)).state == "refused"
        self.resume(bridge, lease)

    def test_a_live_lease_is_ended_by_its_name_or_by_force_and_not_in_passing(self, bridge: BridgeClient) -> None:
        lease = self.pause(bridge)
        bare = bridge.mutate(lambda n: protocol.Resume(n, new_id(), deadline(5), weight_version="step-8"))
        assert (bare.state, bare.reason) == ("refused", "WRONG_SCHEDULING_STATE")
        assert lease in bare.message
        assert 0 < scheduling(bare).lease_remaining_ns <= MINUTE_NS
        assert bridge.admission().scheduling == "paused"
        assert bridge.admission().weight_version != "step-8"
        forced = bridge.mutate(lambda n: protocol.Resume(n, new_id(), deadline(5), force=True))
        assert forced.state == "done"
        assert scheduling(forced).state == "running"
        assert bridge.mutate(lambda n: protocol.Renew(n, lease, MINUTE_NS)).state == "refused"

    def test_an_expired_lease_with_whole_weights_resets_and_resumes_by_itself(
        self, subject: Subject, bridge: BridgeClient
    ) -> None:
        subject.warm()
        lease = self.pause(bridge)
        bridge.mutate(lambda n: protocol.Renew(n, lease, 200_000_000, weights_complete=True))
        self.wait_for_scheduling(bridge, "running")
        assert bridge.admission().blocks_cached == 0
        assert bridge.admission().weight_version == "unknown"
        late = bridge.mutate(lambda n: protocol.Resume(n, new_id(), deadline(5), lease))
        assert late.state == "done"
        assert scheduling(late).ended_by_lease

    def test_an_expired_lease_with_half_written_weights_resets_and_stays_paused(
        self, subject: Subject, bridge: BridgeClient
    ) -> None:
        subject.warm()
        lease = self.pause(bridge, 200_000_000)
        self.wait_for_scheduling(bridge, "abandoned_update")
        assert bridge.admission().blocks_cached == 0
        page = PageReader(subject.page_path)
        assert page.read().counters.flags & 1
        assert bridge.mutate(lambda n: protocol.Renew(n, lease, MINUTE_NS)).state == "refused"
        assert scheduling(self.resume(bridge)).state == "running"
        assert bridge.admission().weight_version == "unknown"
        assert not page.read().counters.flags & 1
        page.close()

    def test_a_withdrawn_lease_ends_as_an_expired_one(self, subject: Subject, bridge: BridgeClient) -> None:
        lease = self.pause(bridge)
        cancelled = bridge.ask(lambda n: protocol.Cancel(n, lease))
        assert isinstance(cancelled, protocol.Cancelled)
        assert cancelled.cancelled
        self.wait_for_scheduling(bridge, "abandoned_update")
        self.resume(bridge)

    def test_a_pause_right_after_a_withdrawn_lease_is_accepted(self, subject: Subject, bridge: BridgeClient) -> None:
        for _ in range(5):
            lease = self.pause(bridge)
            bridge.ask(lambda n, lease=lease: protocol.Cancel(n, lease))  # type: ignore[misc]
        self.wait_for_scheduling(bridge, "abandoned_update")
        self.resume(bridge)

    def test_an_abandoned_update_resumes_where_its_owner_asked_for_that(
        self, subject: Subject, bridge: BridgeClient
    ) -> None:
        subject.warm()
        request_id = new_id()
        bridge.mutate(lambda n: protocol.Pause(n, request_id, deadline(5), 200_000_000, True))
        self.wait_for_scheduling(bridge, "running")
        assert bridge.admission().blocks_cached == 0
        assert bridge.admission().weight_version == "unknown"
        named = bridge.mutate(lambda n: protocol.Resume(n, new_id(), deadline(5), weight_version="step-9"))
        assert scheduling(named).weight_version == bridge.admission().weight_version == "step-9"

    @staticmethod
    def pause(bridge: BridgeClient, lease_ns: int = MINUTE_NS) -> str:
        request_id = new_id()
        outcome = bridge.mutate(lambda n: protocol.Pause(n, request_id, deadline(5), lease_ns))
        assert outcome.state == "done", outcome
        assert scheduling(outcome).state == "paused"
        return request_id

    @staticmethod
    def resume(bridge: BridgeClient, lease: str = "") -> protocol.Outcome:
        outcome = bridge.mutate(lambda n: protocol.Resume(n, new_id(), deadline(5), lease))
        assert outcome.state == "done", outcome
        return outcome

    @staticmethod
    def wait_for_scheduling(bridge: BridgeClient, state: str) -> None:
        until = time.monotonic() + 10
        while (found := bridge.admission().scheduling) != state:
            assert time.monotonic() < until, f"scheduling is {found}, never became {state}"
            threading.Event().wait(0.02)
