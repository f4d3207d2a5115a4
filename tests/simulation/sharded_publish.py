"""Simulation of a sharded trainer, whose ranks each publish their own parts, in virtual time.

:func:`simulate_sharded_publishes` runs one seed; tests sweep seeds. The code under test is the real
one on both sides: the ranks' copies and patches (``WeightUpload``), the run's collection of parts
(``ShardedPublishes``) and the joining of parts. Simulated are the trainer's ranks, the link between
ranks and run, and the engines, of which one stands for all.

Faults: late and lost messages of a rank (the link repeats them, and drops repetitions by their
number), ranks that die at any time and are replaced, calls that the trainer cancels and repeats,
versions that engines refuse, and steps that change too much for patches.

Invariants: a released version has, bit for bit, all ranks' weights of the step that it was
published after; every rank that is answered gets such a version; a failed publish changes nothing;
no publish is refused for its parts; and all steps are published in the end.
"""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt

from tidegate.errors import ConfigError, TidegateError, TrainerLost, WeightsRefused
from tidegate.orchestrator.trainer.remote.link import TrainerLink
from tidegate.orchestrator.trainer.remote.progress import TrainerProgress
from tidegate.orchestrator.trainer.remote.ranks import Barrier, RankRegistry, TrainerTimeouts
from tidegate.orchestrator.trainer.remote.sharded_publish import ShardedPublishes
from tidegate.orchestrator.trainer.remote.weight_transfer import ReceivedWeights, WeightUpload
from tidegate.orchestrator.trainer.weight_updates import CollectParts, PartsWanted
from tidegate.orchestrator.weight_sync.tensor_parts import TensorPart, joined
from tidegate.simulation.run.virtual_time import VirtualTime
from tidegate.transport import trainer_messages as wire
from tidegate.transport.messages import TensorSpec
from tidegate.transport.weight_channels.base import NamedBuffer
from tidegate.transport.weight_channels.patches import decode_patch

Result = TypeVar("Result")

Tensors = dict[str, npt.NDArray[np.uint16]]
"""Whole tensors by name, as the bits of bfloat16."""

CUT = {"rows": 0, "columns": 1}
"""Dimension along which the ranks' parts of a tensor are cut; tensors not named are rank 0's."""

SHAPES = {"rows": (256, 512), "columns": (96, 250), "norm": (64,)}
"""``rows`` is so large that a rank's patch of all its elements exceeds ``SMALL_PATCH_BYTES``."""

TIMEOUTS = TrainerTimeouts(trainer_s=60.0, rank_s=10.0)
LIMIT_S = 3600.0
HEARTBEAT_S = 1.0
REFUSAL = "refused by the simulated engines"
EXPECTED_FAILURES = (REFUSAL, "has failed on another rank", "without this publish")
"""Texts of refusals that follow from faults; any other refusal is a bug."""


@dataclass(frozen=True, slots=True)
class ShardedScenario:
    """What one seed simulates; probabilities are per message, call, step or version."""

    seed: int
    ranks: int
    steps: int
    late: float
    """Probability that a message takes up to 8 s."""
    lost: float
    """Probability that a message or its reply is lost and sent again."""
    deaths: float
    """Probability that a rank dies before a message of it is sent."""
    cancels: float
    """Probability that a call is cancelled and repeated."""
    refusals: float
    dense: float

    @classmethod
    def from_seed(cls, seed: int) -> "ShardedScenario":
        chance = random.Random(f"{seed}/sharded")

        def share(most: float) -> float:
            return chance.choice((0.0, most * chance.random()))

        return cls(
            seed,
            ranks=chance.randint(2, 4),
            steps=chance.randint(3, 7),
            late=share(0.3),
            lost=share(0.3),
            deaths=share(0.1),
            cancels=share(0.3),
            refusals=share(0.4),
            dense=share(0.4),
        )


class _Died(Exception):
    """A rank's process has died, in the middle of a call."""


class _SimulatedRun:
    """The run's side: the engines' weights, and the requests of ranks."""

    def __init__(self, scenario: ShardedScenario, chance: random.Random) -> None:
        self.chance = chance
        self.scenario = scenario
        self.registry = RankRegistry()
        self.progress = TrainerProgress()
        self.barrier = Barrier(self.registry, TIMEOUTS)
        self.publishes = ShardedPublishes(self.progress, self.barrier, self._publish)
        self.states = _states(scenario, chance)
        self.seen: Counter[str] = Counter()
        """What has happened, by name, to show that a sweep reaches it."""
        self.step_of_version: dict[int, int] = {0: 0}
        self._live = self.states[0]
        self._released = 0
        self._newest = 0
        self._written: tuple[int, str] = (0, "")
        """Version and plan that ranks wrote last."""
        self._publishing = asyncio.Lock()

    @property
    def published_step(self) -> int:
        return self.step_of_version[self._released]

    async def _publish(self, ask: wire.PrepareParts, collect: CollectParts) -> int:
        """Reserve a version, collect its parts, stage and release, as the run does."""
        async with self._publishing:
            self._newest += 1
            version, base = self._newest, self._released
            written_version, plan = self._written
            wanted = PartsWanted(
                version,
                plan if written_version == base else "",
                keep_copy=True,
                has_checksums=self.scenario.seed % 2 == 0,
            )
            collected = await collect(wanted)
            buffers = joined(collected.parts)
            self._written = version, collected.plan
            staged = self._staged(buffers)
            await asyncio.sleep(self.chance.random())
            if self.chance.random() < self.scenario.refusals:
                self.seen["refused"] += 1
                raise WeightsRefused(REFUSAL)
            expected = self.states[ask.batch_number]
            for name, tensor in expected.items():
                assert np.array_equal(staged[name], tensor), (
                    f"v{version} has other elements of {name!r} than step {ask.batch_number}"
                )
            self._live, self._released = staged, version
            self.step_of_version[version] = ask.batch_number
            return version

    def _staged(self, buffers: Sequence[NamedBuffer]) -> Tensors:
        """Apply whole tensors or patches to a copy of the live weights, as engines do."""
        staged: Tensors = {}
        for buffer in buffers:
            shape = SHAPES[buffer.name]
            if buffer.patch is None:
                staged[buffer.name] = np.frombuffer(buffer.data, np.uint16).reshape(shape)
                continue
            self.seen["patched"] += 1
            spec = TensorSpec(
                buffer.name, "bfloat16", list(shape), 0, buffer.data.nbytes, patch=buffer.patch
            )
            patch = decode_patch(spec, buffer.data)
            bits = self._live[buffer.name].reshape(-1).copy()
            bits[patch.index] += patch.difference.astype(np.uint16)
            staged[buffer.name] = bits.reshape(shape)
        assert staged.keys() == SHAPES.keys(), f"a publish has only the tensors {sorted(staged)}"
        return staged

    # ------------------------------------------------------------ requests, as in service.py

    def join(self, peer: bytes, rank: int) -> None:
        now_s = asyncio.get_running_loop().time()
        if self.registry.join(peer, rank, self.scenario.ranks, now_s):
            self.progress.begin(self.scenario.ranks)
        self.publishes.rank_joined(rank)
        self.progress.join(rank, None)
        self.barrier.notify()

    async def next_batch(self, rank: int, number: int) -> None:
        self.progress.set_consumed(rank, number - 1)
        self.progress.requested[rank] = max(number, self.progress.requested.get(rank, 0))
        self.barrier.notify()

        def missing() -> list[int]:
            return self.progress.without_request(number)

        await self.barrier.wait_until(lambda: not missing(), missing, doing="requesting a batch")

    async def send(
        self, rank: int, weights: ReceivedWeights, ask: wire.PublishWeights
    ) -> wire.PublishReply | wire.SendWholeParts:
        reply = await self.publishes.send(rank, weights, ask)
        if isinstance(reply, wire.PublishReply):
            self.progress.set_consumed(rank, ask.batch_number)
            self.barrier.notify()
        else:
            self.seen["whole after dense"] += 1
        return reply


def _states(scenario: ShardedScenario, chance: random.Random) -> list[Tensors]:
    """Return the weights after each step, from step 0 on."""
    generator = np.random.default_rng(chance.getrandbits(32))
    states = [
        {name: generator.integers(0, 2**16, shape, np.uint16) for name, shape in SHAPES.items()}
    ]
    for _ in range(scenario.steps):
        share = 1.0 if chance.random() < scenario.dense else 0.01
        states.append(
            {
                name: tensor
                + generator.integers(1, 2**16, tensor.shape, np.uint16)
                * (generator.random(tensor.shape) < share).astype(np.uint16)
                for name, tensor in states[-1].items()
            }
        )
    return states


class _Uploads:
    """Link of a rank's process for chunks, which arrive at once."""

    def __init__(self, received: ReceivedWeights) -> None:
        self._received = received

    def request(self, chunk: wire.UploadChunk, frames: Sequence[bytes]) -> "Future[None]":
        self._received.take(chunk, frames[0])
        answered: Future[None] = Future()
        answered.set_result(None)
        return answered


class _RankProcess:
    """One process of a rank, from its start until it dies or all steps are published."""

    def __init__(self, run: _SimulatedRun, rank: int, number: int) -> None:
        self._run = run
        self._rank = rank
        self._peer = f"{rank}/{number}".encode()
        self._upload = WeightUpload()
        self._received = ReceivedWeights(None)
        self._handlers: set[asyncio.Task[Any]] = set()

    async def train(self) -> None:
        run, loop = self._run, asyncio.get_running_loop()
        run.join(self._peer, self._rank)
        beating = asyncio.create_task(self._beat(loop), name=f"heartbeats of {self._peer!r}")
        try:
            step = run.published_step + 1
            while step <= run.scenario.steps:
                try:
                    await self._call(partial(run.next_batch, self._rank, step))
                    await self._publish_repeatedly(step)
                except (TrainerLost, WeightsRefused, ConfigError) as error:
                    _check_failure(error)
                    run.seen[type(error).__name__] += 1
                step = run.published_step + 1
        finally:
            beating.cancel()
            self._upload.close()

    async def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            self._run.registry.message_received(self._peer, loop.time())
            await asyncio.sleep(HEARTBEAT_S)

    async def _publish_repeatedly(self, step: int) -> None:
        """Publish, and again after a call that was cancelled."""
        chance, scenario = self._run.chance, self._run.scenario
        while chance.random() < scenario.cancels:
            try:
                async with asyncio.timeout(6 * chance.random()):
                    return await self._publish(step)
            except TimeoutError:
                self._run.seen["cancelled"] += 1
                if self._run.published_step >= step:
                    return None
        return await self._publish(step)

    async def _publish(self, step: int) -> None:
        """As ``RemoteRollouts.publish(sharded=True)``."""
        run = self._run
        prepare = wire.PrepareParts(batch_number=step, publish_index=0, held=self._upload.held_plan)
        run.progress.set_ready(self._rank, step)
        plan = await self._call(partial(run.publishes.prepare, self._rank, prepare))
        publish = wire.PublishWeights(batch_number=step, publish_index=0)
        parts = _parts_of(run.states[step], self._rank, run.scenario.ranks)
        link = cast(TrainerLink, _Uploads(self._received))
        while True:
            sent = self._upload.send_parts(link, parts, plan, publish)
            reply = await self._call(partial(run.send, self._rank, self._received, sent))
            if isinstance(reply, wire.PublishReply):
                published = run.step_of_version[reply.version]
                assert published == step, (
                    f"rank {self._rank} published step {step}, and is told v{reply.version}, which "
                    f"is of step {published}"
                )
                return
            plan = msgspec.structs.replace(plan, are_patches=False)

    async def _call(self, request: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
        """Send a request over the link, and return its reply.

        The run handles a request once, however often it arrives, and continues if the caller is
        gone.
        """
        run, chance = self._run, self._run.chance
        if chance.random() < run.scenario.deaths:
            run.seen["died"] += 1
            raise _Died
        await self._deliver()
        handler = asyncio.create_task(request(), name=f"request of {self._peer!r}")
        self._handlers.add(handler)
        handler.add_done_callback(_consume)
        reply = await asyncio.shield(_settled(handler))
        await self._deliver()
        if chance.random() < run.scenario.deaths:
            run.seen["died with a reply on the way"] += 1
            raise _Died
        if isinstance(reply, BaseException):
            raise reply
        return reply

    async def _deliver(self) -> None:
        run, chance = self._run, self._run.chance
        await asyncio.sleep(0.1 * chance.random())
        while chance.random() < run.scenario.lost:
            run.seen["lost message"] += 1
            await asyncio.sleep(HEARTBEAT_S)  # after which the link asks for it again
        if chance.random() < run.scenario.late:
            run.seen["late"] += 1
            await asyncio.sleep(8 * chance.random())


def _check_failure(error: TidegateError) -> None:
    is_expected = any(text in str(error) for text in EXPECTED_FAILURES)
    assert is_expected or isinstance(error, TrainerLost), f"a publish failed: {error}"


async def _settled(task: "asyncio.Task[Result]") -> Result | TidegateError:
    """Return a request's reply, or the failure that is sent in place of one."""
    try:
        return await task
    except TidegateError as error:
        return error


def _consume(task: "asyncio.Task[Any]") -> None:
    """Retrieve a request's failure, which may have no waiter."""
    if not task.cancelled():
        task.exception()


def _parts_of(state: Tensors, rank: int, ranks: int) -> list[TensorPart]:
    parts = []
    for name, tensor in state.items():
        dimension = CUT.get(name)
        if dimension is None:
            if rank:
                continue
            start, stop, dimension = 0, tensor.shape[0], 0
        else:
            each = -(-tensor.shape[dimension] // ranks)
            start, stop = (min(r * each, tensor.shape[dimension]) for r in (rank, rank + 1))
        box = [slice(None)] * tensor.ndim
        box[dimension] = slice(start, stop)
        own = np.ascontiguousarray(tensor[tuple(box)])
        starts = tuple(start if d == dimension else 0 for d in range(tensor.ndim))
        buffer = NamedBuffer(name, "bfloat16", own.shape, own.reshape(-1).view(np.uint8).data)
        parts.append(TensorPart(buffer, tensor.shape, starts))
    return parts


def simulate_sharded_publishes(seed: int) -> Counter[str]:
    """Run a seed to its end; return what has happened, by name.

    Raises:
        AssertionError: an invariant does not hold.
        NothingLeftToHappen, VirtualTimeUp: a call never ends.
    """
    scenario = ShardedScenario.from_seed(seed)
    time = VirtualTime(limit_s=LIMIT_S)
    try:
        return time.run(_simulate(scenario))
    finally:
        time.close()


async def _simulate(scenario: ShardedScenario) -> Counter[str]:
    run = _SimulatedRun(scenario, random.Random(f"{scenario.seed}/events"))

    async def rank_of(rank: int) -> None:
        number = 0
        while run.published_step < scenario.steps:
            number += 1
            try:
                await _RankProcess(run, rank, number).train()
            except _Died:
                # Another process may take a rank over once the dead one has been silent.
                await asyncio.sleep(5.5 + 5 * run.chance.random())

    async with asyncio.TaskGroup() as ranks:
        for rank in range(scenario.ranks):
            ranks.create_task(rank_of(rank), name=f"rank {rank}")
    await run.publishes.close()
    steps = [step for _, step in sorted(run.step_of_version.items())]
    assert steps[-1] == scenario.steps
    assert all(later - earlier in (0, 1) for earlier, later in pairwise(steps)), steps
    run.seen["versions"] = len(steps) - 1
    return run.seen
