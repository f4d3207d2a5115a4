"""A trainer in another process, for real: its batches, its weights, its death and its return."""

import asyncio
import contextlib
import itertools
import json
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import tidegate
from tests.models import make_model_directory
from tests.remote_trainer import weights
from tidegate.errors import ConfigError, ResumeMismatch, RunClosed, RunLost, TrainerLost
from tidegate.orchestrator.feed.batches import Shard
from tidegate.orchestrator.records.audit import audit_run
from tidegate.transport import trainer_messages as wire
from tidegate.transport.security import make_keys
from tidegate.transport.trainer_sockets import TrainerDealer

SMALL = {"engines": 1, "group_size": 2, "groups_per_batch": 2, "max_running_turns": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model") / "qwen3")


@pytest.fixture(scope="module")
def run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tidegate.Rollouts]:
    """One run for many trainers: each test listens anew."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    make_keys(keys)
    make_keys(keys, "trainer")
    rollouts = tidegate.serve(model=model, keys=keys, address="tcp://127.0.0.1:*", **SMALL)
    asyncio.run(rollouts.__aenter__())
    yield rollouts
    asyncio.run(rollouts.__aexit__(None, None, None))
    assert rollouts.statistics().ledger.error == 0
    assert rollouts.statistics().max_staleness_seen <= 2
    assert psutil.Process().children(recursive=True) == []


@pytest.fixture
def address() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="tg") as directory:
        yield f"ipc://{directory}/trainer"


async def one_turn(episode: tidegate.Episode, task: int) -> float:
    episode.append([10 + task % 40, 11, 12])
    turn = await episode.generate(max_tokens=6)
    return float(turn.token_ids[0] % 2)


async def named_turn(episode: tidegate.Episode, task: dict[str, int]) -> float:
    return await one_turn(episode, task["first"])


@contextlib.asynccontextmanager
async def listening(
    run: tidegate.Rollouts, address: str, **how: Any
) -> AsyncIterator["asyncio.Task[None]"]:
    """The run listens meanwhile; its end is awaited where it ends by itself."""
    usual: dict[str, Any] = {"episode": one_turn, "rank_timeout_s": 3.0, "trainer_timeout_s": 60.0}
    task = asyncio.create_task(run.listen(address, **usual | how))
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def joined(run: tidegate.Rollouts, address: str, **options: Any) -> tidegate.SyncRemoteRollouts:
    """A trainer on a thread of this process: the same wire, another loop."""
    return tidegate.connect_sync(address, keys=keys_of(run), **options)


async def refused(run: tidegate.Rollouts, address: str, **who: int) -> None:
    """Be told why not. It is asked again until the time is up, so that is short if it can be."""
    late = joined(run, address, connect_timeout_s=2.0, **who)
    try:
        await asyncio.to_thread(late.__enter__)
    except RunLost as error:
        if "nobody answered" not in str(error):
            raise
        late = joined(run, address, connect_timeout_s=30.0, **who)
        await asyncio.to_thread(late.__enter__)


def keys_of(run: tidegate.Rollouts) -> Path:
    """Of its trainers."""
    assert run.settings.keys is not None
    return run.settings.keys / "trainer"


class Trainer:
    """A trainer's process, and what it has said."""

    def __init__(self, address: str, model: Path, **options: Any) -> None:
        self._arguments = ("-m", "tests.remote_trainer", address, str(model), json.dumps(options))

    async def run(self) -> list[dict[str, Any]]:
        process = await asyncio.create_subprocess_exec(
            sys.executable, *self._arguments, stdout=asyncio.subprocess.PIPE
        )
        try:
            async with asyncio.timeout(120):
                said, _ = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        return [json.loads(line) for line in said.splitlines()]


@pytest.fixture
def unused_tcp_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---------------------------------------------------------------- processes


async def test_what_a_killed_trainer_had_in_hand_is_given_to_the_next_and_all_is_audited(
    model: Path, tmp_path: Path, address: str
) -> None:
    async with (
        tidegate.serve(model=model, **SMALL, run_directory=tmp_path / "run") as rollouts,
        listening(rollouts, address, tasks=range(8)) as listen,
    ):
        first = await Trainer(address, model, die_at=2).run()
        second = await Trainer(address, model).run()
        await listen
    numbers = [[line["number"] for line in said if "number" in line] for said in (first, second)]
    assert numbers == [[1, 2], [2, 3, 4]]
    held = [line for line in (*first, *second) if line.get("number") == 2]
    assert held[0] == held[1]
    tasks = {line["number"]: line["tasks"][::2] for line in (*first, *second) if "number" in line}
    assert [*itertools.chain(*tasks.values())] == [*range(8)]
    statistics = rollouts.statistics()
    assert second[-1] == {"trained": statistics.ledger.trained}
    assert (statistics.batches, statistics.trainer_version, statistics.ledger.error) == (4, 4, 0)
    report = audit_run(tmp_path / "run")
    assert report.agrees, report.lines()
    assert report.tokens == statistics.ledger.trained > 0


# ---------------------------------------------------------------- several ranks


def trained(
    run: tidegate.Rollouts, address: str, model: Path, **who: Any
) -> tuple[list[tidegate.Batch], list[int]]:
    """What a rank got, and the versions it was told."""
    batches, versions = [], []
    with joined(run, address, **who) as rollouts:
        for batch in rollouts.batches():
            batches.append(batch)
            state = weights(model, batch.number) if rollouts.rank == 0 else None
            versions.append(rollouts.publish(state))
    return batches, versions


async def test_ranks_get_parts_of_the_same_batch_and_publish_once_for_all(
    run: tidegate.Rollouts, model: Path, address: str
) -> None:
    before = run.version
    async with listening(run, address, tasks=range(6)) as listen:
        ranks = [
            asyncio.to_thread(trained, run, address, model, rank=rank, world_size=2)
            for rank in (1, 0)
        ]
        (one, same), (zero, versions) = await asyncio.gather(*ranks)
        await listen
    assert versions == same == [before + 1, before + 2, before + 3]
    assert [b.number for b in zero] == [b.number for b in one] != []
    for mine, theirs in zip(zero, one, strict=True):
        assert len(mine.rewards) == len(theirs.rewards) == 2
        assert not {*mine.group_ids.tolist()} & {*theirs.group_ids.tolist()}
        total = mine.sampled_tokens + theirs.sampled_tokens
        assert mine.shard is not None
        assert theirs.shard is not None
        assert sorted(mine.shard.rows + theirs.shard.rows) == [0, 1, 2, 3]
        assert mine.shard == Shard(0, 2, 4, total, mine.shard.rows)
        assert theirs.shard == Shard(1, 2, 4, total, theirs.shard.rows)


async def test_each_rank_says_which_rows_of_its_part_it_left_out(
    run: tidegate.Rollouts, model: Path, address: str
) -> None:
    async with listening(run, address, tasks=range(2)) as listen:
        async with (
            tidegate.connect(address, keys=keys_of(run), rank=1, world_size=2) as one,
            tidegate.connect(address, keys=keys_of(run), world_size=2) as zero,
        ):
            theirs, mine = await asyncio.gather(anext(one.batches()), anext(zero.batches()))
            await one.discard(theirs, [0], reason="too_long_here")
            await zero.discard(mine, [1], reason="too_long_there")
            with pytest.raises(ConfigError, match=r"has 2 rows here, from 0; left out: \[2\]"):
                await zero.discard(mine, [2])
            await asyncio.gather(zero.publish(weights(model, 1)), one.publish())
        await listen
    discarded = run.statistics().ledger.discarded
    assert discarded["too_long_here"] == int(theirs.loss_mask[0].sum())
    assert discarded["too_long_there"] == int(mine.loss_mask[1].sum())


async def test_ranks_that_never_publish_but_the_first_are_waited_for_all_the_same(
    run: tidegate.Rollouts, model: Path, address: str
) -> None:
    def only_read() -> list[int]:
        with joined(run, address, rank=1, world_size=2) as rollouts:
            return [batch.number for batch in rollouts.batches()]

    async with listening(run, address, tasks=range(4)) as listen:
        reading = asyncio.create_task(asyncio.to_thread(only_read))
        batches, _ = await asyncio.to_thread(trained, run, address, model, rank=0, world_size=2)
        await listen
    assert await reading == [batch.number for batch in batches]


async def test_a_rank_that_dies_is_named_and_its_next_process_gets_its_part_again(
    run: tidegate.Rollouts, model: Path, address: str
) -> None:
    async with listening(run, address, tasks=range(4)) as listen:
        died = asyncio.create_task(
            Trainer(
                address,
                model,
                die_at=run.batches_received + 1,
                connect={
                    "rank": 1,
                    "world_size": 2,
                    "keys": str(keys_of(run)),
                },
            ).run()
        )
        async with tidegate.connect(address, keys=keys_of(run), world_size=2) as zero:
            batches = zero.batches()
            first = await anext(batches)
            lost = (await died)[-1]
            with pytest.raises(TrainerLost, match=r"waiting for all ranks .* rank 1 of 2 was not"):
                await zero.publish(weights(model, 1))
            again = asyncio.create_task(
                asyncio.to_thread(trained, run, address, model, rank=1, world_size=2)
            )
            await zero.publish(weights(model, 1))
            async for _ in batches:
                await zero.publish(weights(model, 2))
        theirs, _ = await again
        await listen
    assert theirs[0].number == first.number
    assert theirs[0].rollout_ids.tolist() == lost["rollouts"]


# ---------------------------------------------------------------- one face for both


async def test_a_remote_run_answers_as_one_in_this_process_does(
    run: tidegate.Rollouts, model: Path, address: str
) -> None:
    keys = keys_of(run)
    async with listening(run, address, tasks=range(2), episodes={"named": named_turn}) as listen:
        async with tidegate.connect(address, keys=keys) as rollouts:
            (batch,) = [batch async for batch in rollouts.batches()]
            sequences = [[10, 11, 12, 13], [20, 21]]
            ours = await run.score(sequences, top_logprobs=2)
            theirs = await rollouts.score(sequences, top_logprobs=2)
            (state,) = await rollouts.embed(sequences[:1], pooling="none")
            (wanted,) = await run.embed(sequences[:1], pooling="none")
            rewards = (await rollouts.evaluate([{"first": 3}], episode="named")).rewards
            same = (await run.evaluate([{"first": 3}], episode=named_turn)).rewards
            await rollouts.pause("keep")
            paused = (await rollouts.statistics()).pause_mode
            await rollouts.resume()
            before = await rollouts.publish(weights(model, 1), wait="staged")
            part = {"model.norm.weight": weights(model, 2)["model.norm.weight"]}
            after = await rollouts.publish(part, partial=True)
            statistics = await rollouts.statistics()
            with pytest.raises(ConfigError, match=r"no episode 'unknown' here.*'named'"):
                await rollouts.evaluate([1], episode="unknown")
            with pytest.raises(ConfigError, match="has tasks of its own"):
                await anext(rollouts.batches([1]))
        await listen
    assert batch.number == run.batches_received
    assert batch.tasks == (0, 0, 1, 1)
    for one, other in zip(ours, theirs, strict=True):
        assert (one.logprobs == other.logprobs).all()
        assert (one.top_ids == other.top_ids).all()
        assert (one.version, one.engine, one.start) == (other.version, other.engine, other.start)
    assert state.values.shape == wanted.values.shape
    assert (state.values == wanted.values).all()
    assert (rewards, paused, after) == (same, "keep", before + 1)
    assert statistics == run.statistics() or statistics.ledger == run.statistics().ledger


async def test_a_trainer_brings_its_own_tasks_and_weights_in_pieces_to_a_run_on_another_host(
    run: tidegate.Rollouts, model: Path, unused_tcp_port: int
) -> None:
    def train(tasks: Iterator[dict[str, int]]) -> list[object]:
        seen: list[object] = []
        with joined(run, f"tcp://127.0.0.1:{unused_tcp_port}") as rollouts:
            assert not rollouts._weights.reads_shared_memory  # so what follows is what it says
            for batch in rollouts.batches(tasks, episode="named"):
                seen += batch.tasks[::2]
                rollouts.publish(weights(model, batch.number))
        return seen

    tasks = [{"first": number} for number in range(80)]
    how = {"episode": None, "episodes": {"named": "tests.test_remote_trainer:named_turn"}}
    async with listening(run, f"tcp://0.0.0.0:{unused_tcp_port}", **how) as listen:
        seen = await asyncio.to_thread(train, iter(tasks))
        await listen
    assert seen == tasks
    (scores,) = await run.score([[10, 11, 12]])
    assert scores.version == run.version


async def test_what_a_trainers_own_tasks_fail_of_is_told_once_what_had_begun_is_trained(
    run: tidegate.Rollouts, model: Path, address: str
) -> None:
    def broken() -> Iterator[int]:
        yield from range(2)
        raise ZeroDivisionError("of the user's")

    numbers: list[int] = []

    def train(rollouts: tidegate.SyncRemoteRollouts) -> None:
        for batch in rollouts.batches(broken()):
            numbers.append(batch.number)
            rollouts.publish(weights(model, batch.number))

    def train_till_it_fails() -> None:
        with joined(run, address) as rollouts, pytest.raises(ZeroDivisionError):
            train(rollouts)

    async with listening(run, address) as listen:
        await asyncio.to_thread(train_till_it_fails)
        await listen
    assert len(numbers) == 1


# ---------------------------------------------------------------- checkpoints


async def test_a_trainer_that_goes_back_to_its_checkpoint_gets_what_came_after_it_again(
    run: tidegate.Rollouts, model: Path, address: str
) -> None:
    def until(count: int, resume: Any, *, acks: bool) -> tuple[list[list[int]], Any]:
        seen, state = [], resume
        rollouts = joined(run, address, resume=resume)
        try:
            with rollouts:
                for batch in rollouts.batches():
                    seen.append(batch.rollout_ids.tolist())
                    if len(seen) == 1:
                        state = rollouts.state_dict()
                        if acks:
                            rollouts.ack(state)
                    rollouts.publish(weights(model, batch.number))
                    if len(seen) == count:
                        raise InterruptedError("the trainer fails")
        except InterruptedError:
            pass
        return seen, state

    async with listening(run, address, tasks=range(8)) as listen:
        first, state = await asyncio.to_thread(until, 3, None, acks=True)
        second, _ = await asyncio.to_thread(until, 0, state, acks=False)
        with pytest.raises(ResumeMismatch, match="is asked for again, and of those before"):
            await asyncio.to_thread(until, 0, state | {"batches": state["batches"] - 1}, acks=False)
        with pytest.raises(ResumeMismatch, match="is of run other"):
            await asyncio.to_thread(until, 0, state | {"run_id": "other"}, acks=False)
        assert not listen.done()
    assert first[1:] == second[:2]
    assert len(second) == 3
    async for _ in run.batches(range(0), episode=one_turn):
        pass


# ---------------------------------------------------------------- what goes wrong


async def test_a_run_that_no_trainer_comes_to_says_so(run: tidegate.Rollouts, address: str) -> None:
    with pytest.raises(TrainerLost, match=r"waiting for a trainer at ipc://.* was not heard for"):
        await run.listen(address, episode=one_turn, rank_timeout_s=3.0, trainer_timeout_s=3.0)


async def test_a_trainer_is_told_when_its_run_ends_and_gives_up_one_that_is_silent(
    run: tidegate.Rollouts, address: str
) -> None:
    async with listening(run, address) as listen:
        rollouts = joined(run, address)
        await asyncio.to_thread(rollouts.__enter__)
        waiting = asyncio.create_task(asyncio.to_thread(rollouts.evaluate, range(400)))
        while (
            not run.statistics().running_groups and not run.statistics().evaluation_ledger.generated
        ):
            await asyncio.to_thread(rollouts.statistics)
        listen.cancel()
        with pytest.raises(RunClosed):
            await waiting
        with pytest.raises(RunClosed):
            rollouts.statistics()
        rollouts._close(is_done=False)
    with pytest.raises(RunLost, match=r"no place at the run at .* nobody answered"):
        joined(run, address, connect_timeout_s=0.1).__enter__()


async def test_strangers_second_processes_and_impossible_ranks_are_refused_by_name(
    run: tidegate.Rollouts, address: str
) -> None:
    refusals: list[tuple[dict[str, int], type[Exception], str]] = [
        ({}, RunLost, "rank 0 of 1 is held by a process that was heard"),
        ({"world_size": 2}, RunLost, "rank 0 of 1 is still here"),
        ({"rank": 3, "world_size": 2}, ConfigError, "rank=3 of world_size=2"),
    ]
    async with listening(run, address), tidegate.connect(address, keys=keys_of(run)):
        for who, kind, why in refusals:
            with pytest.raises(kind, match=why):
                await refused(run, address, **who)
        with pytest.raises(ConfigError, match="wants keys: `tidegate keys DIRECTORY"):
            await asyncio.to_thread(tidegate.connect_sync(address).__enter__)


async def test_a_request_that_comes_twice_is_done_once_and_what_was_lost_is_asked_for(
    run: tidegate.Rollouts, address: str
) -> None:
    from tidegate.transport.security import read_engine_keys

    keys = read_engine_keys(keys_of(run))
    idle, other_end = os.pipe()
    dealer = TrainerDealer(address, identity=b"by hand", keys=keys)

    async def heard(*messages: Any) -> Any:
        for message in messages:
            dealer.send((wire.encode(message),))
        frames = dealer.receive()
        while frames is None:
            await asyncio.to_thread(dealer.wait, idle, 0.2)
            frames = dealer.receive()
        return wire.decode_to_trainer(frames[0])

    join = wire.Request(request=1, ask=wire.Join(protocol=1, rank=0, world_size=1))
    pause = wire.Request(request=2, ask=wire.Control(wish="resume"))
    try:
        async with listening(run, address):
            welcome = await heard(join)
            first = await heard(pause)
            again = await heard(pause)
            on_asking = await heard(wire.TrainerAlive(newest=3, pending=[2, 3]))
            missing = await heard()
            settled = await heard(wire.TrainerAlive(newest=3, pending=[3]))
            ignored = await heard(pause, wire.TrainerAlive(newest=3, pending=[]))
            stranger = await heard(
                wire.Leave(is_done=False), wire.TrainerAlive(newest=3, pending=[])
            )
            dealer.send((b"garbage",))
            complaint = await heard()
    finally:
        dealer.close()
        os.close(idle)
        os.close(other_end)
    assert isinstance(welcome.answer, wire.Welcome)
    assert first == again == on_asking == wire.Reply(request=2, answer=wire.Done())
    assert missing == settled == wire.RunAlive(missing=[3])
    assert ignored == wire.RunAlive()
    assert stranger == wire.Stranger()
    assert (complaint.error, complaint.request) == ("BadFrame", 0)


def test_a_trainer_sends_again_what_the_run_says_it_never_got() -> None:
    from tidegate.orchestrator.remote.link import TrainerLink
    from tidegate.transport.trainer_sockets import TrainerRouter

    with tempfile.TemporaryDirectory(prefix="tg") as directory:
        router = TrainerRouter(f"ipc://{directory}/run")
        link = TrainerLink(router.address, None, run_timeout_s=30)

        def received() -> tuple[bytes, Any, list[bytes]]:
            while (got := router.receive()) is None:
                pass
            return got[0], wire.decode_from_trainer(got[1][0]), got[1]

        asked = link.ask(wire.Chunk(upload="a", start=0, nbytes_total=4), (b"data",))
        peer, request, frames = received()
        link.is_seated = True
        alive = received()[1]
        while not alive.pending:
            alive = received()[1]
        router.send(peer, (wire.encode(wire.RunAlive(missing=alive.pending)),))
        again = received()
        while isinstance(again[1], wire.TrainerAlive):
            again = received()
        assert again[2] == frames
        router.send(peer, (wire.encode(wire.Reply(request=request.request, answer=wire.Done())),))
        assert asked.result(10).answer == wire.Done()
        link.close(is_done=True)
        assert received()[1] == wire.Leave(is_done=True)
        router.close()
