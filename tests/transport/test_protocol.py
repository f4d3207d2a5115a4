"""Tests that the wire matches docs/protocol.md, with a peer that has none of our code."""

import asyncio
import re
import struct
import sys
from contextlib import closing
from pathlib import Path
from typing import Any, get_args

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.site_hooks import generated_pages, hook
from tests.transport import foreign_worker
from tests.transport.conftest import WAIT_S, Inbox
from tidegate.errors import BadFrame
from tidegate.transport import messages as wire
from tidegate.transport.router import RouterSocket
from tidegate.transport.scoring import CancelScore, ScoreFailed, ScoreResult, ScoreTokens

pytestmark = pytest.mark.wire

PROTOCOL_PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"

EXAMPLE_STEP: wire.Step = hook("reference").EXAMPLE_STEP

HELLO = wire.Hello(
    protocol=3,
    engine="engine-0",
    epoch=1,
    weight_version=0,
    architecture="Qwen3ForCausalLM",
    vocab_size=100,
    context_tokens_max=4096,
    max_running_turns=8,
    num_kv_blocks=64,
    block_tokens=16,
    pause_modes=["abort", "keep"],
    kv_policies=["keep"],
    weight_channels=["shm"],
)

ENGINE_EXAMPLES: list[wire.Message] = [
    HELLO,
    msgspec.structs.replace(
        HELLO,
        engine="engine-1",
        pid=7,
        first_seq=41,
        next_seq=45,
        turns=struct.pack("<2I", 7, 4_294_967_295),
        model_code="transformers",
        dtype="bfloat16",
        score_kinds=["logprobs"],
        sleep_levels=[1, 2],
        asleep=["weights"],
        needs_weights=True,
        supports_submit_turns=True,
        adapters_max=64,
        adapters=[wire.HeldAdapter("critic", 3)],
    ),
    EXAMPLE_STEP,
    wire.AdapterLoaded(name="critic", version=4, staging_us=900),
    wire.AdapterFailed(name="critic", version=4, message="no such projection"),
    wire.AdapterLive(name="critic", version=4, recomputed_turns=1),
    wire.AdapterNeeded(name="critic"),
    wire.TurnFailed(turn=3, message="too long"),
    ScoreResult(
        request_id=5,
        version=3,
        start=1,
        logprobs=struct.pack("<2f", -0.5, -0.25),
        top_ids=struct.pack("<2i", 7, 8),
        top_logprobs=struct.pack("<2f", -0.5, -0.1),
        is_last=False,
        ranks=struct.pack("<2i", 9, 2),
    ),
    ScoreFailed(request_id=5, message="too long"),
    wire.EngineHeartbeat(
        weight_version=1, running_turns=2, waiting_turns=3, free_blocks=4, sent_us=5
    ),
    wire.WeightsStaged(version=1),
    wire.WeightsLive(version=1),
    wire.WeightsFailed(version=1, message="no such tensor"),
    wire.TurnsPaused(mode="wait"),
    wire.TurnsResumed(),
    wire.Goodbye(reason="told to"),
    wire.MessageRejected(message="what?"),
    wire.Asleep(request_id=2**62, tags=["weights", "kv_cache"], freed_bytes=2**40),
    wire.Awake(request_id=1, tags=["kv_cache"], needs_weights=True),
    wire.SleepRequestFailed(request_id=1, message="no pause is on"),
]
EXAMPLE_TURN = wire.SubmitTurn(
    turn=4_294_967_295,
    token_ids=struct.pack("<3i", 1, 2, 3),
    sampling=wire.SamplingParams(max_tokens=16, temperature=0.7, stop_token_ids=[2], seed=2**63),
    session=2**40,
)
ORCHESTRATOR_EXAMPLES: list[wire.Message] = [
    wire.Welcome(heartbeat_interval_s=1.5, orchestrator_timeout_s=30.0, credit_steps=64),
    wire.HelloRejected(message="another vocabulary"),
    wire.OrchestratorHeartbeat(),
    wire.Ack(seq=41),
    EXAMPLE_TURN,
    wire.SubmitTurns(turns=[EXAMPLE_TURN, EXAMPLE_TURN]),
    wire.EndSessions(sessions=[1, 2**40]),
    wire.CancelTurn(turn=1),
    ScoreTokens(request_id=5, token_ids=struct.pack("<3i", 1, 2, 3), start=1, top_logprobs=1),
    CancelScore(request_id=5),
    wire.Pause(mode="abort"),
    wire.Resume(),
    wire.InitWeights(channel="shm", info={"path": "/proc/1/fd/3", "inode": 5}),
    wire.StartWeightUpdate(version=2),
    wire.UpdateWeights(
        version=3,
        location="",
        tensors=[],
        ipc_handle=wire.CudaIpcHandle("GPU-1", b"h" * 66, 4096, 512, b"/torch_1_2_3", 7),
    ),
    wire.UpdateWeights(
        version=2,
        location="x",
        tensors=[wire.TensorSpec("w", "bfloat16", [2, 3], 64, 12)],
        is_last=False,
    ),
    wire.FinishWeightUpdate(version=2, pause_mode="keep", kv_policy="recompute"),
    wire.Shutdown(),
    wire.MessageRejected(message="what?"),
    wire.Sleep(request_id=1, level=2, tags=["weights"]),
    wire.Wake(request_id=2, tags=["weights", "kv_cache"]),
    wire.LoadAdapter(
        name="critic",
        version=4,
        scale=2.0,
        chunks=[wire.UpdateWeights(version=9, location="x", tensors=[])],
    ),
    wire.SwapAdapter(name="critic", version=4, pause_mode="keep", kv_policy="recompute"),
    wire.UnloadAdapter(name="critic", version=3),
]


def test_the_examples_here_leave_no_kind_of_message_out() -> None:
    assert {type(message) for message in ENGINE_EXAMPLES} == set(get_args(wire.FromEngine))
    assert {type(m) for m in ORCHESTRATOR_EXAMPLES} == set(get_args(wire.FromOrchestrator))


@pytest.mark.parametrize("message", [*ENGINE_EXAMPLES, *ORCHESTRATOR_EXAMPLES], ids=repr)
def test_the_plain_msgpack_package_reads_and_writes_every_message(message: wire.Message) -> None:
    fields = msgpack.unpackb(wire.encode(message))
    assert fields["kind"] == message.__struct_config__.tag
    assert list(fields) == ["kind", *message.__struct_fields__]
    decode: Any = (
        wire.decode_from_engine if message in ENGINE_EXAMPLES else wire.decode_from_orchestrator
    )
    assert decode(msgpack.packb(fields)) == message


@pytest.mark.parametrize("message", [*ENGINE_EXAMPLES, *ORCHESTRATOR_EXAMPLES], ids=repr)
def test_fields_with_defaults_may_be_omitted_and_unknown_ones_added(message: wire.Message) -> None:
    fields = msgpack.unpackb(wire.encode(message))
    info = {field.name: field for field in msgspec.structs.fields(type(message))}
    required = {k: v for k, v in fields.items() if k == "kind" or info[k].required}
    decode: Any = (
        wire.decode_from_engine if message in ENGINE_EXAMPLES else wire.decode_from_orchestrator
    )
    assert type(decode(msgpack.packb({**required, "from_a_later_version": 1}))) is type(message)
    for name in set(required) - {"kind"}:
        with pytest.raises(BadFrame, match=name):
            decode(msgpack.packb({k: v for k, v in required.items() if k != name}))


def test_the_page_names_every_message_and_it_or_the_reference_describes_every_field() -> None:
    page, reference = PROTOCOL_PAGE.read_text(), generated_pages()["reference/messages.md"]
    for message in [*ENGINE_EXAMPLES, *ORCHESTRATOR_EXAMPLES]:
        kind = message.__struct_config__.tag
        assert f"`{kind}`" in page
        entry = reference.partition(f"`kind`: `{kind}`*")[2].partition("\n## ")[0]
        for name in message.__struct_fields__:
            described = re.search(rf"^\| `{name}` \|.*\w[^|]*\|$", entry, re.MULTILINE)
            assert described or re.search(rf"`{name}\b", page), f"{kind}.{name} is not described"


def test_the_references_worked_example_is_what_is_sent() -> None:
    section = generated_pages()["reference/messages.md"].partition("## A step, byte by byte")[2]
    block = section.partition("```text\n")[2].partition("```")[0]
    lines = [line.split("    ") for line in block.splitlines()]  # bytes, and the field's name
    frame = bytes.fromhex(" ".join(hex_bytes for hex_bytes, _ in lines))
    assert frame == wire.encode(EXAMPLE_STEP)
    fields = msgpack.unpackb(frame)
    assert [name for _, name in lines[1:]] == list(fields)
    assert (fields["seq"], fields["turns"]) == (41, struct.pack("<2I", 7, 9))


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_only_ever_a_bad_frame(noise: bytes) -> None:
    for decode in (wire.decode_from_engine, wire.decode_from_orchestrator):
        with pytest.raises(BadFrame):
            decode(noise)


@settings(deadline=None)
@given(data=st.data())
def test_a_damaged_message_is_read_as_one_or_is_a_bad_frame(data: st.DataObject) -> None:
    frame = bytearray(wire.encode(data.draw(st.sampled_from(ENGINE_EXAMPLES))))
    for _ in range(data.draw(st.integers(1, 4))):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    end = data.draw(st.integers(0, len(frame)))
    try:
        decoded = wire.decode_from_engine(bytes(frame[:end]))
    except BadFrame:
        return
    assert isinstance(decoded, get_args(wire.FromEngine))


async def test_a_worker_that_knows_only_the_page_serves_a_turn(router: RouterSocket) -> None:
    program = str(Path(foreign_worker.__file__))
    worker = await asyncio.create_subprocess_exec(sys.executable, program, router.address, "elsie")
    inbox = Inbox(router)
    [(peer, frame)] = await inbox.wait_for(1)
    hello = wire.decode_from_engine(frame)
    assert isinstance(hello, wire.Hello)
    assert (peer, hello.engine, hello.protocol) == (b"elsie", "elsie", wire.PROTOCOL)

    router.send(
        peer, wire.Welcome(heartbeat_interval_s=1, orchestrator_timeout_s=9, credit_steps=2)
    )
    prompt = struct.pack("<2i", 5, 100)
    router.send(
        peer, wire.SubmitTurn(turn=6, token_ids=prompt, sampling=wire.SamplingParams(max_tokens=3))
    )
    await inbox.wait_for(3)
    router.send(peer, wire.Ack(seq=1))  # the third step waits for this
    steps = [wire.decode_from_engine(frame) for _, frame in (await inbox.wait_for(4))[1:]]
    router.send(peer, wire.Ack(seq=2))
    router.send(peer, wire.Shutdown())
    goodbye = wire.decode_from_engine((await inbox.wait_for(5))[4][1])

    rows = [
        (s.seq, struct.unpack("<I", s.turns), struct.unpack("<i", s.token_ids), s.finish)
        for s in steps
        if isinstance(s, wire.Step)
    ]
    assert rows == [
        (0, (6,), (101,), b""),
        (1, (6,), (102,), b""),
        (2, (6,), (103,), bytes([wire.LENGTH])),
    ]
    assert goodbye == wire.Goodbye(reason="0 steps unacknowledged")
    assert await asyncio.wait_for(worker.wait(), WAIT_S) == 0


async def test_such_a_worker_loses_nothing_to_a_broken_connection(tmp_path: Path) -> None:
    address, program = f"ipc://{tmp_path}/wire", str(Path(foreign_worker.__file__))
    worker = await asyncio.create_subprocess_exec(sys.executable, program, address, "elsie")
    welcome = wire.Welcome(heartbeat_interval_s=1, orchestrator_timeout_s=9, credit_steps=2)
    prompt = struct.pack("<i", 100)
    with closing(RouterSocket(address, name="test")) as router:
        inbox = Inbox(router)
        first = wire.decode_from_engine((await inbox.wait_for(1))[0][1])
        router.send(b"elsie", welcome)
        sampling = wire.SamplingParams(max_tokens=5)
        router.send(b"elsie", wire.SubmitTurn(turn=6, token_ids=prompt, sampling=sampling))
        await inbox.wait_for(3)  # two steps, which is all its credit
    with closing(RouterSocket(address, name="test")) as router:
        inbox = Inbox(router)
        hello = wire.decode_from_engine((await inbox.wait_for(1))[0][1])
        assert isinstance(first, wire.Hello)
        assert hello == msgspec.structs.replace(
            first, first_seq=0, next_seq=2, turns=struct.pack("<I", 6)
        )
        router.send(b"elsie", wire.Ack(seq=1))  # from a peer that has not received the hello
        router.send(b"elsie", welcome)
        await inbox.wait_for(3)
        router.send(b"elsie", wire.Ack(seq=1))
        await inbox.wait_for(5)
        router.send(b"elsie", wire.Ack(seq=3))
        steps = [wire.decode_from_engine(frame) for _, frame in (await inbox.wait_for(6))[1:]]
        assert [step.seq for step in steps if isinstance(step, wire.Step)] == [0, 1, 2, 3, 4]
        router.send(b"elsie", wire.Shutdown())
        await inbox.wait_for(7)
    assert await asyncio.wait_for(worker.wait(), WAIT_S) == 0


async def test_such_a_worker_says_all_again_when_complained_of(router: RouterSocket) -> None:
    program = str(Path(foreign_worker.__file__))
    worker = await asyncio.create_subprocess_exec(sys.executable, program, router.address, "elsie")
    inbox = Inbox(router)
    await inbox.wait_for(1)
    welcome = wire.Welcome(heartbeat_interval_s=1, orchestrator_timeout_s=9, credit_steps=4)
    router.send(b"elsie", welcome)
    prompt = struct.pack("<i", 100)
    sampling = wire.SamplingParams(max_tokens=2)
    router.send(b"elsie", wire.SubmitTurn(turn=6, token_ids=prompt, sampling=sampling))
    await inbox.wait_for(3)
    router.reject(b"elsie", "step 0 could not be read")
    hello = wire.decode_from_engine((await inbox.wait_for(4))[3][1])
    assert isinstance(hello, wire.Hello)
    assert (hello.first_seq, hello.next_seq, hello.turns) == (0, 2, b"")
    router.send(b"elsie", welcome)
    assert (await inbox.wait_for(6))[4:] == inbox.frames[1:3]  # unchanged
    router.send(b"elsie", wire.Shutdown())
    assert await asyncio.wait_for(worker.wait(), WAIT_S) == 0
