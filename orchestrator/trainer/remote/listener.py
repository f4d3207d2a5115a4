"""Listener for a trainer in another process: a ZeroMQ ROUTER socket, and a task for each request.

Users call ``tidegate.listen``. Lost messages are requested again by number, and no request is
executed twice; `service.py` executes the requests. The listener ends when the trainer is done, or
has been gone for too long.
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
from tidegate.orchestrator.trainer.remote.ranks import (
    Barrier,
    RankRegistry,
    RankTaken,
    TrainerTimeouts,
)
from tidegate.orchestrator.trainer.remote.service import TrainerService
from tidegate.orchestrator.trainer.remote.weight_transfer import ReceivedWeights
from tidegate.orchestrator.trainer.rollouts import Rollouts
from tidegate.transport import trainer_messages as wire
from tidegate.transport.addresses import is_on_this_host
from tidegate.transport.limits import cut
from tidegate.transport.message import Message
from tidegate.transport.security import OrchestratorKeys, read_orchestrator_keys
from tidegate.transport.trainer_sockets import TrainerRouter

CHECK_INTERVAL_S = 0.5
"""Time between two checks whether the trainer is still there."""

MESSAGES_PER_TURN = 64
"""Messages read before other tasks of the loop run: a chunk of weights takes a millisecond."""

REQUESTS_AT_ONCE_MAX = 64
"""Requests of one rank that may run at once; a well-behaved trainer has a dozen."""

log = logging.getLogger("tidegate")


@dataclass(slots=True, eq=False)
class _Client:
    """The process of one rank, by its socket identity."""

    peer: bytes
    rank: int
    weights: ReceivedWeights
    running: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    replies: dict[int, Sequence[bytes]] = field(default_factory=dict)
    """Replies that were sent and may not have been received, by request number."""
    settled: int = 0
    """Number up to which the client has all replies, except those in ``replies``."""

    def close(self) -> None:
        """Cancel the client's requests, except a publish, which runs to its end."""
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
    """Serve a run to a trainer in another process; return once that trainer is done.

    The trainer calls ``tidegate.connect(address)``, as one process or as several ranks. A trainer
    that vanishes may reconnect within ``trainer_timeout_s``. If one of several ranks is silent for
    ``rank_timeout_s``, the calls of ranks that wait for it fail.

    Args:
        rollouts: the run, entered.
        address: ZeroMQ endpoint, e.g. ``tcp://0.0.0.0:5600``. If other hosts can reach it, keys are
            required.
        tasks: the run's tasks; without them, the trainer sends its own, as plain data.
        episode: runs the tasks; a string ``"module:function"`` is imported.
        episodes: further episodes that the trainer may name.
        keys: keys that trainers need; by default those in the run's ``curve_key_directory``.
        on_bound: called with the address once trainers can connect to it.

    Raises:
        TrainerLost: no trainer connected, or reconnected, in time.
        AddressInUse, ConfigError: the address is taken, or an argument is wrong.
        EngineLost, EpisodeError: the run has failed.
    """
    functions = {name: _imported(function) for name, function in (episodes or {}).items()}
    if episode is not None:
        functions[""] = _imported(episode)
    if not functions or (tasks is not None and "" not in functions):
        raise ConfigError("listen() needs an episode to run its tasks; pass episode=")
    if not trainer_timeout_s >= rank_timeout_s >= 3:
        raise ConfigError(
            f"rank_timeout_s must be at least 3 s, three heartbeats, and trainer_timeout_s must "
            f"not be less; got rank_timeout_s={rank_timeout_s}, "
            f"trainer_timeout_s={trainer_timeout_s}"
        )
    timeouts = TrainerTimeouts(trainer_timeout_s, rank_timeout_s)
    if keys is None and rollouts.settings.fleet.curve_key_directory is not None:
        keys = read_orchestrator_keys(rollouts.settings.fleet.curve_key_directory)
    router = TrainerRouter(address, keys)
    try:
        if on_bound is not None:
            on_bound(router.address)
        if tasks is not None:
            await rollouts.offer(tasks, episode=functions[""])
        listener = _Listener(rollouts, router, functions, timeouts, has_tasks=tasks is not None)
        await listener.run()
    finally:
        router.close()


class _Listener:
    """The socket, its clients and their running requests."""

    def __init__(
        self,
        rollouts: Rollouts,
        router: TrainerRouter,
        episodes: Mapping[str, EpisodeFunction],
        timeouts: TrainerTimeouts,
        *,
        has_tasks: bool,
    ) -> None:
        self._rollouts = rollouts
        self._router = router
        self._timeouts = timeouts
        self._loop = asyncio.get_running_loop()
        self._ranks = RankRegistry()
        self._barrier = Barrier(self._ranks, timeouts)
        journal = rollouts.state_dict() if rollouts.settings.records.journal else {}
        self._run_id = str(journal.get("run_id") or uuid.uuid4().hex)
        self._service = TrainerService(
            rollouts,
            self._ranks,
            self._barrier,
            run_id=self._run_id,
            episodes=episodes,
            has_own_tasks=has_tasks,
        )
        self._clients: dict[bytes, _Client] = {}
        self._group = asyncio.TaskGroup()
        self._silent: set[bytes] = set()

    async def run(self) -> None:
        """Serve until the trainer is done."""
        why = f"the run no longer listens at {self._router.address}"
        over = wire.RunTerminated(error="RunClosed", message=why)
        self._loop.add_reader(self._router.descriptor, self._drain)
        log.info("trainer_address=%s", self._router.address)
        try:
            async with self._group:
                self._drain()
                await self._watch()
                for client in self._clients.values():
                    client.close()
        except BaseException as error:
            while isinstance(error, BaseExceptionGroup):
                error = error.exceptions[0]
            if not isinstance(error, asyncio.CancelledError):
                over = wire.RunTerminated(error=_class_name(error), message=_message(error))
            raise error from None
        finally:
            self._loop.remove_reader(self._router.descriptor)
            for client in self._clients.values():
                client.close()
                self._send(client.peer, over)
            await self._service.close()

    async def _watch(self) -> None:
        """Return once the trainer is done.

        Raises:
            TrainerLost: no rank was heard for too long.
        """
        last_message_s = self._loop.time()
        while not self._ranks.has_left_done:
            await asyncio.sleep(CHECK_INTERVAL_S)
            now_s = self._loop.time()
            self._rollouts.raise_if_ended()
            self._log_silent_ranks(now_s)
            if self._ranks.has_message_within(now_s, self._timeouts.rank_s):
                last_message_s = now_s
            elif now_s - last_message_s > self._timeouts.trainer_s:
                raise TrainerLost(
                    ranks=list(range(max(1, self._ranks.world_size))),
                    world_size=max(1, self._ranks.world_size),
                    doing=f"waiting for a trainer at {self._router.address}",
                    why=f"sent nothing for {now_s - last_message_s:.0f} s",
                )

    def _log_silent_ranks(self, now_s: float) -> None:
        for peer, client in self._clients.items():
            silent_s = self._ranks.silent_s(client.rank, now_s) or 0.0
            if silent_s > self._timeouts.rank_s and peer not in self._silent:
                self._silent.add(peer)
                log.warning("trainer rank=%d not heard for %.0f s", client.rank, silent_s)

    # ------------------------------------------------------------ the socket

    def _drain(self) -> None:
        """Read all queued messages, because ZeroMQ's descriptor is edge-triggered."""
        for _ in range(MESSAGES_PER_TURN):
            received = self._router.receive()
            if received is None:
                return
            try:
                self._receive(*received)
            except BadFrame as error:
                self._router.malformed += 1
                self._send(
                    received[0],
                    wire.RequestFailed(request_id=0, error="BadFrame", message=str(error)),
                )
        self._loop.call_soon(self._drain_if_open)

    def _send(self, peer: bytes, message: Message, frames: Sequence[bytes] = ()) -> None:
        self._send_frames(peer, (wire.encode(message), *frames))

    def _send_frames(self, peer: bytes, frames: Sequence[bytes]) -> None:
        self._router.send(peer, frames)
        self._loop.call_soon(self._drain_if_open)  # a send may clear the descriptor's signal

    def _drain_if_open(self) -> None:
        if not self._router.is_closed:
            self._drain()

    def _receive(self, peer: bytes, frames: list[bytes]) -> None:
        message = wire.decode_from_trainer(frames[0])
        process = self._ranks.message_received(peer, self._loop.time())
        self._silent.discard(peer)
        client = self._clients.get(peer)
        if isinstance(message, wire.RequestEnvelope) and isinstance(message.request, wire.JoinRun):
            self._start_request(peer, message, b"")
        elif process is None or client is None:
            self._send(peer, wire.UnknownTrainer())
        elif isinstance(message, wire.RequestEnvelope):
            self._start_request(peer, message, frames[1] if len(frames) > 1 else b"")
        elif isinstance(message, wire.TrainerHeartbeat):
            self._resend_lost(client, message)
        else:
            self._leave(client, is_done=message.is_done)

    def _resend_lost(self, client: _Client, alive: wire.TrainerHeartbeat) -> None:
        """Resend replies that were lost, and ask the client for requests that never arrived."""
        pending = set(alive.pending_request_ids)
        client.settled = max(client.settled, min(pending, default=alive.last_request_id + 1) - 1)
        for number in [
            n for n in client.replies if n <= alive.last_request_id and n not in pending
        ]:
            del client.replies[number]
        for number in pending & client.replies.keys():
            self._send_frames(client.peer, client.replies[number])
        missing = sorted(pending - client.replies.keys() - client.running.keys())
        self._send(client.peer, wire.RunHeartbeat(missing_request_ids=missing))

    # ------------------------------------------------------------ ranks

    def _start_request(self, peer: bytes, request: wire.RequestEnvelope, data: bytes) -> None:
        """Start a task for a request, unless the request is running or answered."""
        client = self._clients.get(peer)
        number = request.request_id
        if client is not None:
            if number in client.replies:
                self._send_frames(peer, client.replies[number])
            if number in client.running or number in client.replies or number <= client.settled:
                return
            if len(client.running) >= REQUESTS_AT_ONCE_MAX:
                raise BadFrame(f"more than {REQUESTS_AT_ONCE_MAX} requests at once")
        elif isinstance(request.request, wire.JoinRun):
            client = self._join(peer, number, request.request)
        if client is not None:
            name = f"{type(request.request).__name__} of rank {client.rank}"
            task = self._group.create_task(self._answer(client, request, data), name=name)
            client.running[number] = task

    def _join(self, peer: bytes, number: int, join: wire.JoinRun) -> _Client | None:
        """Return the client of a process that joins; refuse it by a reply, and return None."""
        try:
            self._check(join)
            is_new = self._ranks.join(peer, join.rank, join.world_size, self._loop.time())
        except (TidegateError, RankTaken) as error:
            self._send(peer, _failed(number, error))
            return None
        for replaced in [c for c in self._clients.values() if is_new or c.rank == join.rank]:
            replaced.close()
            del self._clients[replaced.peer]
        is_local = is_on_this_host(self._router.address)
        client = _Client(peer, join.rank, ReceivedWeights(join.shared_memory if is_local else None))
        client.settled = number - 1
        self._clients[peer] = client
        if is_new:
            self._service.begin(join.world_size)
        log.info("trainer rank=%d of %d joined", join.rank, join.world_size)
        return client

    def _check(self, join: wire.JoinRun) -> None:
        if join.protocol != wire.PROTOCOL:
            raise ConfigError(
                f"the trainer uses protocol version {join.protocol}, the run {wire.PROTOCOL}; "
                f"install the same Tidegate version on both"
            )
        if join.run_id not in ("", self._run_id):
            raise ResumeMismatch(
                f"the trainer's checkpoint is of run {join.run_id}, but this is run "
                f"{self._run_id}; resume the run that the checkpoint belongs to"
            )

    def _leave(self, client: _Client, *, is_done: bool) -> None:
        rank = self._ranks.leave(client.peer, is_done=is_done)
        client.close()
        del self._clients[client.peer]
        if rank is not None:
            log.info("trainer rank=%d left is_done=%s", rank, is_done)
            self._service.left(rank)

    # ------------------------------------------------------------ replies

    async def _answer(self, client: _Client, request: wire.RequestEnvelope, data: bytes) -> None:
        frames: Sequence[bytes] = ()
        reply: Message
        try:
            answer: wire.AnyTrainerReply
            if isinstance(request.request, wire.JoinRun):
                answer = await self._service.join(client.rank, request.request, client.weights)
            else:
                answer, frames = await self._service.answer(
                    client.rank, client.weights, request.request, data
                )
            reply = wire.ReplyEnvelope(request_id=request.request_id, reply=answer)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - sent to the trainer; _watch raises a run's own
            reply = _failed(request.request_id, error)
        finally:
            client.running.pop(request.request_id, None)
        sent = (wire.encode(reply), *frames)
        client.replies[request.request_id] = sent
        self._send_frames(client.peer, sent)


def _failed(number: int, error: Exception) -> wire.RequestFailed:
    return wire.RequestFailed(
        request_id=number,
        error=_class_name(error),
        message=_message(error),
        may_retry=isinstance(error, RankTaken),
    )


def _class_name(error: BaseException) -> str:
    return type(error).__name__ if isinstance(error, TidegateError) else "TidegateError"


def _message(error: BaseException) -> str:
    return cut(str(error) if isinstance(error, TidegateError | RankTaken) else repr(error))


def _imported(episode: Any) -> EpisodeFunction:
    """Return an episode function, imported if it is given as ``module:function``.

    Raises:
        ConfigError: there is no such function.
    """
    if not isinstance(episode, str):
        return episode  # type: ignore[no-any-return]
    module, _, name = episode.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"episode={episode!r} is not a 'module:function': {error}") from error
    return found  # type: ignore[no-any-return]
