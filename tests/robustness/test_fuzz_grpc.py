"""Ten thousand random valid requests, while the engines misbehave: no crash, no INTERNAL, no hang."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import random
import time
import uuid

import grpc
import grpc.aio
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from kvctl.v1 import replica_pb2 as api
from kvctl.v1 import replica_pb2_grpc

from sidecar.replica import rules
from sidecar.rpc import addresses, channels, errors
from tests.contract.sidecar_process import SidecarProcess
from tests.fake_engine.process import EngineProcess

CALLS = 10_000
IN_FLIGHT = 32
SEED = 20260730
SLACK_S = 10.0
SERVICE = api.DESCRIPTOR.services_by_name["CacheAdmin"]
METHODS = [method for method in SERVICE.methods if not method.server_streaming]
NEVER = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.DATA_LOSS}


class Requests:
    """Makes requests that pass every rule."""

    def __init__(self) -> None:
        self.chance = random.Random(SEED)
        self.ids = [str(uuid.UUID(int=self.chance.getrandbits(128))) for _ in range(300)]

    def one(self) -> tuple[str, Message]:
        while True:
            method = self.chance.choice(METHODS)
            message: Message = getattr(api, method.input_type.name)()
            for field in method.input_type.fields:
                self._fill(message, field)
            with contextlib.suppress(errors.Failure):
                rules.check(message)
                return method.name, message

    def _fill(self, message: Message, field: FieldDescriptor) -> None:
        chance = self.chance
        if field.type == FieldDescriptor.TYPE_ENUM:
            setattr(message, field.name, chance.choice(list(field.enum_type.values_by_number)))
        elif field.type == FieldDescriptor.TYPE_BOOL:
            setattr(message, field.name, chance.random() < 0.3)
        elif field.name.endswith("request_id"):
            setattr(message, field.name, chance.choice(["", *self.ids[:80], str(uuid.uuid4())]))
        elif field.type == FieldDescriptor.TYPE_STRING:
            setattr(message, field.name, "".join(chance.choices("aé漢\n\x00 ", k=chance.randint(0, 40))))
        elif field.name == "lease":
            message.lease.FromMilliseconds(chance.randint(1000, 3000))


async def test_ten_thousand_random_requests_against_misbehaving_engines(tmp_path):
    engine_dir = tmp_path / "engines"
    engine_dir.mkdir(mode=0o700)
    engines = [EngineProcess(engine_dir, "--rank", str(rank), "--dp-size", "2") for rank in range(2)]
    sidecar = SidecarProcess(engine_dir, tmp_path, "--log-level", "info")
    codes: collections.Counter[str] = collections.Counter()
    stop = asyncio.Event()
    try:
        sidecar.wait_ready()
        async with channels.connect(addresses.parse(sidecar.address)) as channel:
            stub = replica_pb2_grpc.CacheAdminStub(channel)
            trouble = asyncio.create_task(misbehave(engines, stop))
            requests = Requests()
            pending = iter(range(CALLS))
            await asyncio.gather(*(worker(stub, requests, pending, codes) for _ in range(IN_FLIGHT)))
            stop.set()
            await trouble
            assert sum(codes.values()) == CALLS
            assert not NEVER & {getattr(grpc.StatusCode, code) for code in codes if code != "OK"}, codes
            assert codes["OK"] > CALLS // 20, codes
            replica = (await stub.GetReplica(api.GetReplicaRequest(), timeout=3)).replica
            assert [engine.connected for engine in replica.engines] == [True, True]
        assert sidecar.process.poll() is None
        assert "Traceback" not in sidecar.log()
        assert sidecar.terminate() == 0
    finally:
        sidecar.end()
        for engine in engines:
            engine.end()


async def worker(stub, requests: Requests, pending, codes: collections.Counter[str]) -> None:
    for _ in pending:
        name, message = requests.one()
        timeout = requests.chance.choice([0.05, 0.1, 0.3, 1.0])
        began = time.monotonic()
        failed: errors.Failure | None = None
        try:
            await getattr(stub, name)(message, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            failed = errors.parse(error)
        codes[failed.code.name if failed is not None else "OK"] += 1
        assert failed is None or failed.code not in NEVER, (name, message, failed)
        assert time.monotonic() - began < timeout + SLACK_S, name


async def misbehave(engines: list[EngineProcess], stop: asyncio.Event) -> None:
    """Requests come and go, steps take long, processes are stopped for a moment."""
    chance = random.Random(SEED + 1)
    while not stop.is_set():
        engine = chance.choice(engines)
        match chance.randrange(5):
            case 0:
                await asyncio.to_thread(engine.do, "hold", requests=chance.randint(1, 3))
            case 1:
                engine.freeze()
                await asyncio.sleep(0.15)
                engine.thaw()
            case 2:
                await asyncio.to_thread(engine.do, "hang", seconds=0.2)
            case 3:
                await asyncio.to_thread(engine.do, "scramble")
            case _:
                await asyncio.to_thread(engine.do, "release")
        await asyncio.sleep(0.05)
    for engine in engines:
        await asyncio.to_thread(engine.do, "release")
