"""How does a run hear a trainer in another process? A socket, and a task for each wish.

What is lost on the way is asked for again by number, and no wish is done twice; what is done for
one is the service's. It ends when the trainer has done, or is gone for too long.
"""

import asyncio
import importlib
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tidegate.errors import BadFrame, ConfigError, ResumeMismatch, TidegateError, TrainerLost
from tidegate.orchestrator.batches.tasks import Tasks
from tidegate.orchestrator.episodes.runner import EpisodeFunction
from tidegate.orchestrator.trainer.remote.barrier import Barrier, Patience
from tidegate.orchestrator.trainer.remote.seats import Seats, SeatTaken
from tidegate.orchestrator.trainer.remote.service import TrainerService
from tidegate.orchestrator.trainer.remote.weights_in import TrainersWeights
from tidegate.orchestrator.trainer.rollouts import Rollouts
from tidegate.transport import trainer_messages as wire
from tidegate.transport.addresses import is_on_this_host
from tidegate.transport.limits import cut
from tidegate.transport.message import Message
from tidegate.transport.security import OrchestratorKeys, read_orchestrator_keys
from tidegate.transport.trainer_sockets import TrainerRouter

LOOK_INTERVAL_S = 0.5
"""Between two looks at whether anybody is still there."""

MESSAGES_PER_TURN = 64
"""Read before others on the loop get a turn: pieces of weights take a millisecond each."""

REQUESTS_AT_ONCE_MAX = 64
"""Of one trainer; honest ones have a dozen."""

log = logging.getLogger("tidegate")


@dataclass(slots=True, eq=False)
class _Client:
    """A rank's process."""

    peer: bytes
    rank: int
    weights: TrainersWeights
    running: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    replies: dict[int, Sequence[bytes]] = field(default_factory=dict)
    """Sent, and perhaps not received."""
    settled: int = 0
    """It has the answers to all requests up to this one, but for those above."""

    def close(self) -> None:
        """Nobody waits for anything any more. A publish that has begun goes on."""
        for task in self.running.values():
            if not task.get_name().startswith("Publish"):
                task.cancel()
        self.weights.close()


async def listen(
    rollouts: Rollouts,
    address: str,
    *,
    tasks: Tasks | None = None,
    episode: EpisodeFunction | str | None = None,
    episodes: Mapping[str, EpisodeFunction | str] | None = None,
    trainer_timeout_s: float = 600.0,
    rank_timeout_s: float = 60.0,
    keys: OrchestratorKeys | None = None,
    on_bound: Callable[[str], None] | None = None,
) -> None:
    """Give a run to a trainer in another process; return once that trainer is done.

    The trainer calls ``tidegate.connect(address)``, as one process or as several ranks. A trainer
    that vanishes may come again within ``trainer_timeout_s``; of several ranks, one that is silent
    for ``rank_timeout_s`` fails the calls of those that wait for it.

    Args:
        rollouts: the run, entered.
        address: of ZeroMQ, e.g. ``tcp://0.0.0.0:5600``. One that other hosts can reach needs keys.
        tasks: the run's tasks; without, the trainer brings its own, as plain data.
        episode: runs the tasks; a string ``"module:function"`` is imported.
        episodes: others that the trainer may ask for by name.
        keys: whom to let in; left out, those whom the run's ``keys`` let in.
        on_bound: called with the address once trainers can connect to it.

    Raises:
        TrainerLost: no trainer came, or came again.
        AddressInUse, ConfigError: nobody can listen there, or with these arguments.
        EngineLost, EpisodeError: the run has failed.
    """
    functions = {name: _imported(function) for name, function in (episodes or {}).items()}
    if episode is not None:
        functions[""] = _imported(episode)
    if not functions or (tasks is not None and "" not in functions):
        raise ConfigError("listen() needs an episode for its tasks: give episode=")
    if not trainer_timeout_s >= rank_timeout_s >= 3:
        raise ConfigError(
            f"rank_timeout_s={rank_timeout_s} must be at least 3 s, three heartbeats, and "
            f"trainer_timeout_s={trainer_timeout_s} not less"
        )
    patience = Patience(trainer_timeout_s, rank_timeout_s)
    if keys is None and rollouts.settings.fleet.keys is not None:
        keys = read_orchestrator_keys(rollouts.settings.fleet.keys)
    router = TrainerRouter(address, keys)
    try:
        if on_bound is not None:
            on_bound(router.address)
        if tasks is not None:
            await rollouts.offer(tasks, episode=functions[""])
        listener = _Listener(rollouts, router, functions, patience, has_tasks=tasks is not None)
        await listener.run()
    finally:
        router.close()


class _Listener:
    """The socket's side of it."""

    def __init__(
        self,
        rollouts: Rollouts,
        router: TrainerRouter,
        episodes: Mapping[str, EpisodeFunction],
        patience: Patience,
        *,
        has_tasks: bool,
    ) -> None:
        self._rollouts = rollouts
        self._router = router
        self._patience = patience
        self._loop = asyncio.get_running_loop()
        self._seats = Seats()
        self._barrier = Barrier(self._seats, patience)
        journal = rollouts.state_dict() if rollouts.settings.records.journal else {}
        self._run_id = str(journal.get("run_id") or uuid.uuid4().hex)
        self._service = TrainerService(
            rollouts,
            self._seats,
            self._barrier,
            run_id=self._run_id,
            episodes=episodes,
            has_own_tasks=has_tasks,
        )
        self._clients: dict[bytes, _Client] = {}
        self._group = asyncio.TaskGroup()
        self._silent: set[bytes] = set()

    async def run(self) -> None:
        """Until the trainer has done."""
        why = f"the run does not listen at {self._router.address} any more"
        over = wire.RunOver(error="RunClosed", message=why)
        self._loop.add_reader(self._router.descriptor, self._drain)
        log.info("trainer_address=%s", self._router.address)
        try:
            async with self._group:
                self._drain()
                await self._watch()
                for client in self._clients.values():
                    client.close()
        except BaseException as error:
            error = _first(error)
            if not isinstance(error, asyncio.CancelledError):
                over = wire.RunOver(error=_name(error), message=_say(error))
            raise error from None
        finally:
            self._loop.remove_reader(self._router.descriptor)
            for client in self._clients.values():
                client.close()
                self._send(client.peer, over)
            await self._service.close()

    async def _watch(self) -> None:
        """Return once the trainer has done."""
        heard_s = self._loop.time()
        while not self._seats.has_left_done:
            await asyncio.sleep(LOOK_INTERVAL_S)
            now_s = self._loop.time()
            self._rollouts.raise_if_over()
            self._tell_silent(now_s)
            if self._seats.has_anybody(now_s, self._patience.rank_s):
                heard_s = now_s
            elif now_s - heard_s > self._patience.trainer_s:
                raise TrainerLost(
                    ranks=list(range(max(1, self._seats.world_size))),
                    world_size=max(1, self._seats.world_size),
                    doing=f"waiting for a trainer at {self._router.address}",
                    why=f"was not heard for {now_s - heard_s:.0f} s",
                )

    def _tell_silent(self, now_s: float) -> None:
        for peer, client in self._clients.items():
            silent_s = self._seats.silent_s(client.rank, now_s) or 0.0
            if silent_s > self._patience.rank_s and peer not in self._silent:
                self._silent.add(peer)
                log.warning("trainer rank=%d not heard for %.0f s", client.rank, silent_s)

    # ------------------------------------------------------------ the socket

    def _drain(self) -> None:
        """Read what is there; ZeroMQ's descriptor signals changes, not state."""
        for _ in range(MESSAGES_PER_TURN):
            received = self._router.receive()
            if received is None:
                return
            try:
                self._hear(*received)
            except BadFrame as error:
                self._router.malformed += 1
                self._send(
                    received[0], wire.Failed(request=0, error="BadFrame", message=str(error))
                )
        self._loop.call_soon(self._drain_if_open)

    def _send(self, peer: bytes, message: Message, frames: Sequence[bytes] = ()) -> None:
        self._send_frames(peer, (wire.encode(message), *frames))

    def _send_frames(self, peer: bytes, frames: Sequence[bytes]) -> None:
        self._router.send(peer, frames)
        self._loop.call_soon(self._drain_if_open)  # a send may take the signal away

    def _drain_if_open(self) -> None:
        if not self._router.is_closed:
            self._drain()

    def _hear(self, peer: bytes, frames: list[bytes]) -> None:
        message = wire.decode_from_trainer(frames[0])
        seat = self._seats.heard(peer, self._loop.time())
        self._silent.discard(peer)
        client = self._clients.get(peer)
        if isinstance(message, wire.Request) and isinstance(message.ask, wire.Join):
            self._begin(peer, message, b"")
        elif seat is None or client is None:
            self._send(peer, wire.Stranger())
        elif isinstance(message, wire.Request):
            self._begin(peer, message, frames[1] if len(frames) > 1 else b"")
        elif isinstance(message, wire.TrainerAlive):
            self._compare(client, message)
        else:
            self._part(client, is_done=message.is_done)

    def _compare(self, client: _Client, alive: wire.TrainerAlive) -> None:
        """Answer again what was lost on its way, and ask for what never came."""
        pending = set(alive.pending)
        client.settled = max(client.settled, min(pending, default=alive.newest + 1) - 1)
        for number in [n for n in client.replies if n <= alive.newest and n not in pending]:
            del client.replies[number]
        for number in pending & client.replies.keys():
            self._send_frames(client.peer, client.replies[number])
        missing = sorted(pending - client.replies.keys() - client.running.keys())
        self._send(client.peer, wire.RunAlive(missing=missing))

    # ------------------------------------------------------------ seats

    def _begin(self, peer: bytes, request: wire.Request, data: bytes) -> None:
        """Have a task answer a request, unless one does, or has."""
        client = self._clients.get(peer)
        number = request.request
        if client is not None:
            if number in client.replies:
                self._send_frames(peer, client.replies[number])
            if number in client.running or number in client.replies or number <= client.settled:
                return
            if len(client.running) >= REQUESTS_AT_ONCE_MAX:
                raise BadFrame(f"more than {REQUESTS_AT_ONCE_MAX} requests at once")
        elif isinstance(request.ask, wire.Join):
            client = self._seated(peer, number, request.ask)
        if client is not None:
            name = f"{type(request.ask).__name__} of rank {client.rank}"
            task = self._group.create_task(self._answer(client, request, data), name=name)
            client.running[number] = task

    def _seated(self, peer: bytes, number: int, join: wire.Join) -> _Client | None:
        """Give a process its seat; None if it can't have it, which it is told."""
        try:
            self._check(join)
            is_new = self._seats.sit(peer, join.rank, join.world_size, self._loop.time())
        except (TidegateError, SeatTaken) as error:
            self._refuse(peer, number, error)
            return None
        for other in [c for c in self._clients.values() if is_new or c.rank == join.rank]:
            other.close()
            del self._clients[other.peer]
        is_near = is_on_this_host(self._router.address)
        client = _Client(peer, join.rank, TrainersWeights(join.shared_memory if is_near else None))
        client.settled = number - 1
        self._clients[peer] = client
        if is_new:
            self._service.begin(join.world_size)
        log.info("trainer rank=%d of %d joined", join.rank, join.world_size)
        return client

    def _check(self, join: wire.Join) -> None:
        if join.protocol != wire.PROTOCOL:
            raise ConfigError(
                f"the trainer speaks version {join.protocol} of the protocol, the run "
                f"{wire.PROTOCOL}; install the same Tidegate on both"
            )
        if join.run_id not in ("", self._run_id):
            raise ResumeMismatch(
                f"the trainer's checkpoint is of run {join.run_id}, and this is run {self._run_id}"
            )

    def _part(self, client: _Client, *, is_done: bool) -> None:
        rank = self._seats.leave(client.peer, is_done=is_done)
        client.close()
        del self._clients[client.peer]
        if rank is not None:
            log.info("trainer rank=%d left, having done: %s", rank, is_done)
            self._service.left(rank)

    # ------------------------------------------------------------ wishes

    async def _answer(self, client: _Client, request: wire.Request, data: bytes) -> None:
        frames: Sequence[bytes] = ()
        reply: Message
        try:
            answer: wire.AnyAnswer
            if isinstance(request.ask, wire.Join):
                answer = await self._service.join(client.rank, request.ask, client.weights)
            else:
                answer, frames = await self._service.answer(
                    client.rank, client.weights, request.ask, data
                )
            reply = wire.Reply(request=request.request, answer=answer)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - told to who asked; a run's own end is watched
            reply = _failed(request.request, error)
        finally:
            client.running.pop(request.request, None)
        sent = (wire.encode(reply), *frames)
        client.replies[request.request] = sent
        self._send_frames(client.peer, sent)

    def _refuse(self, peer: bytes, number: int, error: Exception) -> None:
        self._send(peer, _failed(number, error))


def _failed(number: int, error: Exception) -> wire.Failed:
    return wire.Failed(
        request=number,
        error=_name(error),
        message=_say(error),
        may_retry=isinstance(error, SeatTaken),
    )


def _name(error: BaseException) -> str:
    return type(error).__name__ if isinstance(error, TidegateError) else "TidegateError"


def _say(error: BaseException) -> str:
    return cut(str(error) if isinstance(error, TidegateError | SeatTaken) else repr(error))


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _imported(episode: Any) -> EpisodeFunction:
    """A function, or one by its place ``module:function``.

    Raises:
        ConfigError: there is none.
    """
    if not isinstance(episode, str):
        return episode  # type: ignore[no-any-return]
    module, _, name = episode.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"episode={episode!r} is no 'module:function': {error}") from error
    return found  # type: ignore[no-any-return]
