"""Messages of a trainer and its run take effect once, and are requested again if lost."""

import asyncio
import os
import tempfile
from typing import Any

import pytest

import tidegate
from tests.orchestrator.trainer.remote.remote_runs import (
    keys_of,
    listening,
)
from tidegate.transport import trainer_messages as wire
from tidegate.transport.trainer_sockets import TrainerDealer

pytestmark = pytest.mark.wire


async def test_a_request_that_comes_twice_is_done_once_and_what_was_lost_is_asked_for(
    run: tidegate.Rollouts, address: str
) -> None:
    from tidegate.transport.security import read_engine_keys

    keys = read_engine_keys(keys_of(run))
    idle, other_end = os.pipe()
    dealer = TrainerDealer(address, identity=b"by hand", keys=keys)

    async def answer_to(*messages: Any) -> Any:
        for message in messages:
            dealer.send((wire.encode(message),))
        frames = dealer.receive()
        while frames is None:
            await asyncio.to_thread(dealer.wait, idle, 0.2)
            frames = dealer.receive()
        return wire.decode_to_trainer(frames[0])

    join = wire.RequestEnvelope(
        request_id=1, request=wire.JoinRun(protocol=wire.PROTOCOL, rank=0, world_size=1)
    )
    pause = wire.RequestEnvelope(request_id=2, request=wire.ControlRun(action="resume"))
    try:
        async with listening(run, address):
            welcome = await answer_to(join)
            first = await answer_to(pause)
            again = await answer_to(pause)
            on_asking = await answer_to(
                wire.TrainerHeartbeat(last_request_id=3, pending_request_ids=[2, 3])
            )
            missing = await answer_to()
            settled = await answer_to(
                wire.TrainerHeartbeat(last_request_id=3, pending_request_ids=[3])
            )
            ignored = await answer_to(
                pause, wire.TrainerHeartbeat(last_request_id=3, pending_request_ids=[])
            )
            stranger = await answer_to(
                wire.LeaveRun(is_done=False),
                wire.TrainerHeartbeat(last_request_id=3, pending_request_ids=[]),
            )
            dealer.send((b"garbage",))
            complaint = await answer_to()
    finally:
        dealer.close()
        os.close(idle)
        os.close(other_end)
    assert isinstance(welcome.reply, wire.TrainerWelcome)
    assert first == again == on_asking == wire.ReplyEnvelope(request_id=2, reply=wire.ResultReply())
    assert missing == settled == wire.RunHeartbeat(missing_request_ids=[3])
    assert ignored == wire.RunHeartbeat()
    assert stranger == wire.UnknownTrainer()
    assert (complaint.error, complaint.request_id) == ("BadFrame", 0)


def test_a_trainer_sends_again_what_the_run_says_it_never_got() -> None:
    from tidegate.orchestrator.trainer.remote.link import TrainerLink
    from tidegate.transport.trainer_sockets import TrainerRouter

    with tempfile.TemporaryDirectory(prefix="tg") as directory:
        router = TrainerRouter(f"ipc://{directory}/run")
        link = TrainerLink(router.address, None, run_timeout_s=30)

        def received() -> tuple[bytes, Any, list[bytes]]:
            while (got := router.receive()) is None:
                pass
            return got[0], wire.decode_from_trainer(got[1][0]), got[1]

        asked = link.request(wire.UploadChunk(upload="a", start=0, nbytes_total=4), (b"data",))
        peer, request, frames = received()
        link.has_joined = True
        alive = received()[1]
        while not alive.pending_request_ids:
            alive = received()[1]
        router.send(
            peer, (wire.encode(wire.RunHeartbeat(missing_request_ids=alive.pending_request_ids)),)
        )
        again = received()
        while isinstance(again[1], wire.TrainerHeartbeat):
            again = received()
        assert again[2] == frames
        router.send(
            peer,
            (
                wire.encode(
                    wire.ReplyEnvelope(request_id=request.request_id, reply=wire.ResultReply())
                ),
            ),
        )
        assert asked.result(10).reply == wire.ResultReply()
        link.close(is_done=True)
        assert received()[1] == wire.LeaveRun(is_done=True)
        router.close()
