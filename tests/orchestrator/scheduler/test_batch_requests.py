"""Requests for batches between the trainer's loop and the run's: no batch is lost between them."""

import asyncio
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import tidegate
from tests.models import make_model_directory
from tidegate.errors import BatchNotHeld, ConfigError, PublishNeeded, PublishUnclear
from tidegate.orchestrator.core import events as ev
from tidegate.orchestrator.core.hand_over import HandOvers
from tidegate.orchestrator.scheduler.batch_requests import BatchRequest, BatchRequests

pytestmark = pytest.mark.wire


class RequestingTrainer:
    """:class:`BatchRequests` with a core whose batches are empty and always ready."""

    def __init__(
        self, when_safe: Callable[[Callable[[], None]], None] = lambda action: action()
    ) -> None:
        self.events: list[ev.Event] = []
        self.hand_overs = HandOvers(is_kept=False)
        self.requests = BatchRequests(self.hand_overs, self.handle, set(), when_safe, lambda: None)

    def handle(self, event: ev.Event) -> None:
        self.events.append(event)
        handed = self.hand_overs
        match event:
            case ev.BatchRequested(request=request):
                handed.request(request, batches_per_version=1)
            case ev.BatchRequestCancelled(request=request):
                handed.close_request(request)
            case ev.BatchTaken(request=request):
                handed.acknowledge(request)
            case ev.BatchReturned(request=waiting):
                handed.undo_newest()
                if waiting is not None:
                    handed.request(waiting, batches_per_version=1)
            case ev.HandOverPaused(is_paused=is_paused):
                handed.is_paused = is_paused
        while handed.wants_batch:
            request = handed.requests[0].number
            batch = handed.add([], 0, num_groups=1)
            self.requests.hand_over(ev.HandOver([], 0, batch.number, request=request))


async def taken(core: RequestingTrainer) -> BatchRequest:
    """Request a batch and take it, without an acknowledgement."""
    request = BatchRequest()
    assert await core.requests.wait(request)
    assert request.batch is not None
    assert request.take(request.batch)
    return request


async def test_an_offer_that_was_not_taken_is_withdrawn_when_a_publish_begins() -> None:
    core = RequestingTrainer()
    request = BatchRequest()
    assert await core.requests.wait(request)
    seen = request.batch
    core.requests.pause(True)
    assert seen is not None
    assert not request.take(seen)
    assert core.events == [ev.BatchRequested(1), ev.HandOverPaused(True), ev.BatchReturned(1, 1)]
    core.requests.pause(False)
    assert await core.requests.wait(request)
    assert request.batch is not None
    assert request.take(request.batch)
    assert core.events[3:] == [ev.HandOverPaused(False)]


async def test_a_batch_that_was_taken_outlives_a_publish() -> None:
    core = RequestingTrainer()
    request = await taken(core)
    core.requests.pause(True)
    core.requests.acknowledge(request)
    core.requests.close(request)  # of a call that is over: nothing goes back
    assert core.events == [ev.BatchRequested(1), ev.HandOverPaused(True), ev.BatchTaken(1)]


async def test_one_batch_at_a_time_is_on_offer() -> None:
    core = RequestingTrainer()
    first, second = BatchRequest(), BatchRequest()
    assert await core.requests.wait(first)
    waits = asyncio.ensure_future(core.requests.wait(second))
    await asyncio.sleep(0)
    assert not second.is_offered
    core.requests.close(first)
    assert await waits
    assert second.batch is not None
    assert second.batch.number == 1
    assert core.events == [ev.BatchRequested(1), ev.BatchRequested(2), ev.BatchReturned(1)]


async def test_a_cancelled_wait_takes_its_request_back() -> None:
    core = RequestingTrainer()
    core.requests.pause(True)
    waits = asyncio.ensure_future(core.requests.wait(BatchRequest()))
    await asyncio.sleep(0)
    waits.cancel()
    await asyncio.gather(waits, return_exceptions=True)
    assert core.events[1:] == [ev.BatchRequested(1), ev.BatchRequestCancelled(1)]
    core.requests.pause(False)
    assert core.hand_overs.count == 0


async def test_no_call_reaches_the_core_after_the_end_of_its_trainer() -> None:
    delayed: list[Callable[[], None]] = []
    core = RequestingTrainer(delayed.append)
    requests = [BatchRequest(), BatchRequest()]
    waits = [asyncio.ensure_future(core.requests.wait(request)) for request in requests]
    await asyncio.sleep(0)
    core.requests.end_all()
    waits[1].cancel()  # resolved already, but not woken yet
    await asyncio.gather(*waits, return_exceptions=True)
    assert waits[0].result() is False
    assert waits[1].cancelled()
    for action in delayed:
        action()  # the journal has committed the hand-over only now
    core.requests.acknowledge(requests[0])
    assert not requests[0].is_offered
    assert core.events == [ev.BatchRequested(1), ev.BatchRequested(2)]


async def test_only_the_newest_batch_may_be_given_back_and_only_while_no_request_waits() -> None:
    core = RequestingTrainer()
    for _ in range(2):
        core.requests.acknowledge(await taken(core))
    assert not core.requests.return_batch(1)
    unanswered = await taken(core)
    assert not core.requests.return_batch(3)  # it is not acknowledged
    core.requests.acknowledge(unanswered)
    assert core.requests.return_batch(3)
    assert core.events[-1] == ev.BatchReturned(3)


async def test_the_end_of_the_tasks_ends_every_request_that_waits() -> None:
    core = RequestingTrainer()
    core.requests.pause(True)
    waits = [asyncio.ensure_future(core.requests.wait(BatchRequest())) for _ in range(2)]
    await asyncio.sleep(0)
    core.requests.end(1)
    core.requests.refuse(2, ConfigError("no batch can fill"))
    assert not await waits[0]
    with pytest.raises(ConfigError, match="no batch can fill"):
        await waits[1]


# ---------------------------------------------------------------- a trainer's own loop


async def solve(episode: tidegate.Episode, task: int) -> float:
    """Episode of one short turn."""
    episode.append([10 + task % 40, 11, 12])
    return float(len((await episode.generate(max_tokens=4)).token_ids))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_directory(tmp_path_factory.mktemp("model") / "qwen3")


SETTINGS: dict[str, Any] = {"engines": 1, "group_size": 1, "groups_per_batch": 1}


@pytest.mark.timeout(120)
async def test_no_batch_is_lost_by_a_trainer_that_keeps_stopping_to_wait(model: Path) -> None:
    tasks, numbers, groups, stopped = 40, list[int](), list[int](), 0
    async with tidegate.serve(model=model, **SETTINGS, max_staleness=4) as rollouts:
        await rollouts.offer(range(tasks), episode=solve)
        chance = random.Random(0)
        while True:
            try:
                timeout_s = chance.uniform(0, 0.004)
                batch = await asyncio.wait_for(rollouts.next_batch(), timeout_s)
            except TimeoutError:
                stopped += 1
                time.sleep(chance.choice((0, 0, 0.002)))  # noqa: ASYNC251 - a step that blocks
                continue
            if batch is None:
                break
            numbers.append(batch.number)
            groups += batch.group_ids.tolist()
            assert rollouts.batches_received == batch.number
            await rollouts.publish({}, batches=[batch], partial=True)
    assert stopped > 0
    assert numbers == list(range(1, tasks + 1))
    assert len(set(groups)) == tasks


@pytest.mark.timeout(120)
async def test_the_state_of_a_cancelled_call_claims_no_batch(model: Path, tmp_path: Path) -> None:
    settings = SETTINGS | {"journal": True, "run_directory": tmp_path / "run"}
    async with tidegate.serve(model=model, **settings, max_staleness=1) as rollouts:
        await rollouts.offer(range(4), episode=solve)
        asked = asyncio.create_task(rollouts.next_batch())
        await asyncio.sleep(0)  # it is on its way to the run's loop
        until_s = time.monotonic() + 60
        while not rollouts.statistics().batches and time.monotonic() < until_s:
            pass  # this loop doesn't poll, and the run's loop has a batch for it
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert rollouts.state_dict()["batches"] == 0
        batch = await rollouts.next_batch()
        assert batch is not None
        assert (batch.number, rollouts.state_dict()["batches"]) == (1, 1)


@pytest.mark.timeout(120)
def test_a_batch_that_ctrl_c_comes_in_between_with_is_given_once_more(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tidegate.serve_sync(model=model, **SETTINGS, max_staleness=2) as rollouts:
        batches = rollouts.batches(range(3), episode=solve)
        first = next(batches)
        rollouts.publish({}, batches=[first], partial=True)
        with monkeypatch.context() as patch:  # between the batch's arrival and its acknowledgement
            patch.setattr(rollouts._handle._forecaster, "add_batch", interrupt)
            with pytest.raises(KeyboardInterrupt):
                next(batches)
        assert rollouts.batches_received == 1
        second = next(rollouts.batches(range(2, 5), episode=solve))
        assert (first.number, second.number) == (1, 2)
        assert second.tasks == (1,)


def interrupt(*_: Any, **__: Any) -> None:
    raise KeyboardInterrupt


def ages(batch: tidegate.Batch, version: int) -> list[int]:
    """Return the age of each of a batch's tokens when it is trained on at ``version``."""
    return [version - int(v) for v in batch.weight_versions.flatten() if v >= 0]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("eta", [1, 3])
async def test_a_prefetcher_that_names_its_batches_keeps_the_bound_and_is_told_their_version(
    model: Path, eta: int
) -> None:
    """One task fills a queue of ``eta`` batches, and another trains them in order."""
    batches: asyncio.Queue[tidegate.Batch | None] = asyncio.Queue(maxsize=max(1, eta - 1))
    async with tidegate.serve(model=model, **SETTINGS, max_staleness=eta) as rollouts:

        async def prefetch() -> None:
            await rollouts.offer(range(40), episode=solve)
            while (batch := await next_or_wait()) is not None:
                await batches.put(batch)
            await batches.put(None)

        async def next_or_wait() -> tidegate.Batch | None:
            while True:
                try:
                    return await rollouts.next_batch()
                except PublishNeeded:
                    published.clear()
                    await published.wait()

        published = asyncio.Event()
        fetching = asyncio.create_task(prefetch())
        trained = 0
        while (batch := await batches.get()) is not None:
            trained += 1
            assert batch.number == trained
            assert batch.trainer_version == rollouts.version
            assert max(ages(batch, rollouts.version)) <= eta
            await rollouts.publish({}, batches=[batch], partial=True)
            published.set()
        await fetching
        statistics = rollouts.statistics()
    assert trained == 40
    assert statistics.max_staleness_seen <= eta
    assert statistics.held_batches == ()


@pytest.mark.timeout(120)
async def test_a_publish_that_says_nothing_is_refused_where_a_batch_was_asked_ahead(
    model: Path,
) -> None:
    async with tidegate.serve(model=model, **SETTINGS, max_staleness=2) as rollouts:
        await rollouts.offer(range(8), episode=solve)
        first, second = await rollouts.next_batch(), await rollouts.next_batch()
        assert first is not None
        assert second is not None
        with pytest.raises(PublishUnclear, match=r"batches 1, 2.*batches=\[1\]"):
            await rollouts.publish({})
        assert (rollouts.version, rollouts.statistics().held_batches) == (0, (1, 2))
        await rollouts.publish({}, batches=[first], partial=True)
        with pytest.raises(BatchNotHeld, match="names batch 1, which is in version"):
            await rollouts.publish({}, batches=[1], partial=True)
        assert (rollouts.version, rollouts.statistics().held_batches) == (1, (2,))
        await rollouts.publish({}, batches=[second], partial=True)
        third = await rollouts.next_batch()
        assert third is not None
        assert rollouts.statistics().held_batches == (3,)


@pytest.mark.timeout(120)
async def test_a_position_names_the_batch_that_the_checkpoint_has_where_one_was_asked_ahead(
    model: Path, tmp_path: Path
) -> None:
    settings = SETTINGS | {"journal": True, "run_directory": tmp_path / "run"}
    async with tidegate.serve(model=model, **settings, max_staleness=2) as rollouts:
        await rollouts.offer(range(8), episode=solve)
        first, second = await rollouts.next_batch(), await rollouts.next_batch()
        with pytest.raises(ConfigError, match=r"batch 2, received last.*state_dict\(trained=batch"):
            rollouts.state_dict()
        assert rollouts.state_dict(trained=first)["batches"] == 1
        assert rollouts.state_dict(trained=0)["batches"] == 0
        with pytest.raises(ConfigError, match=r"trained=3\) names a batch that was not received"):
            rollouts.state_dict(trained=3)
        await rollouts.publish({}, batches=[1, 2], partial=True)
        assert rollouts.state_dict()["batches"] == 2
        assert second is not None


@pytest.mark.timeout(120)
async def test_a_checkpoint_in_mid_version_is_resumed_with_the_batch_that_it_contains(
    model: Path, tmp_path: Path
) -> None:
    policy = tidegate.BoundedStaleness(max_staleness=1, groups_per_batch=1, batches_per_version=2)
    settings: dict[str, Any] = {
        "engines": 1,
        "group_size": 1,
        "staleness_policy": policy,
        "journal": True,
        "run_directory": tmp_path / "run",
    }
    weights = load_file(model / "model.safetensors")
    async with tidegate.serve(model=model, **settings) as rollouts:
        await rollouts.offer(range(8), episode=solve)
        for _ in range(2):
            await rollouts.next_batch()
        await rollouts.publish(weights)
        assert await rollouts.next_batch() is not None
        position = rollouts.state_dict()
        assert position["batches"] == 3
    async with tidegate.serve(model=model, **settings, resume=position) as rollouts:
        assert rollouts.is_resumed
        assert rollouts.statistics().held_batches == ()
        await rollouts.publish(weights)
        await rollouts.offer(range(8), episode=solve)
        numbers = []
        while (batch := await rollouts.next_batch()) is not None:
            numbers.append(batch.number)
            if batch.number % 2 == 0:
                await rollouts.publish({}, batches=rollouts.statistics().held_batches, partial=True)
        assert numbers == [4, 5, 6, 7, 8]
        assert rollouts.statistics().max_staleness_seen <= 1
