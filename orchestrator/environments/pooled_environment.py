"""How is an environment used that is in another process? As any, and it survives its neighbours.

When a process dies, the environment that it was busy with fails. The others are begun again in
another process: reset by the same seed and task, given the same actions, and held to what they
answered then. Who uses them notices nothing.
"""

import hashlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Protocol, TypeVar

import msgspec

from tidegate.errors import (
    ConfigError,
    EnvironmentCrashed,
    EnvironmentFailed,
    EnvironmentHung,
    NotRepeatable,
    RunClosed,
)
from tidegate.orchestrator.environments import calls
from tidegate.orchestrator.environments.environment import Observation
from tidegate.orchestrator.environments.worker_process import ProcessDied, WorkerProcess

DEATHS_MAX = 3
"""Of the processes around one environment, that it may have caused or that befell it. It then
fails, for going on could take for ever."""

Result = TypeVar("Result")


class Home(Protocol):
    """Where environments live: what of the pool they use."""

    call_timeout_s: float

    async def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run it on the pool's loop."""

    def submit(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The same, without waiting."""

    def next_id(self) -> int:
        """A number that nothing else has."""

    async def take_place(self) -> None:
        """Wait until another environment may be open."""

    def give_place(self) -> None:
        """One is open no more."""

    def count_again(self) -> None:
        """One was begun again in another process."""

    def home(self) -> WorkerProcess:
        """The process for one more environment."""


class PooledEnvironment:
    """One environment in a pool; made by ``EnvironmentPool.environment``."""

    def __init__(self, pool: Home, factory: str, arguments: dict[str, Any]) -> None:
        self._pool = pool
        self._factory = factory
        self._arguments = arguments
        self._process: WorkerProcess | None = None
        self._id = 0
        self._seed = 0
        self._task: Any = None
        self._lived: list[tuple[str, bytes]] = []
        """Actions, and digests of what they were answered; the first is the reset's."""
        self._deaths = 0
        self._has_place = False
        self._is_closed = False

    async def reset(self, *, seed: int, task: Any) -> Observation:
        """Begin, in a process that has room.

        Raises:
            EnvironmentFailed: it could not; :class:`EnvironmentHung` and
                :class:`EnvironmentCrashed` say why it was not its own doing to say so.
            ConfigError: ``task`` or the arguments are not plain data.
        """
        return await self._pool.run(self._begin(seed, task))

    async def step(self, action: str) -> Observation:
        """Give it an action.

        Raises:
            EnvironmentFailed: as for ``reset``; :class:`NotRepeatable` if it had to be begun again
                and went another way.
        """
        return await self._pool.run(self._go_on(action))

    def close(self) -> None:
        """Have it closed, soon. Never fails, and waits for nothing; harmless if repeated."""
        try:
            self._pool.submit(self._close())
        except RunClosed:
            return  # and so are its environments

    # ------------------------------------------------------------ on the pool's loop

    async def _begin(self, seed: int, task: Any) -> Observation:
        if self._is_closed:
            raise RunClosed(f"environment {self._factory} is closed")
        if self._lived:
            raise EnvironmentFailed(
                environment=self._factory, doing="reset", why="it was reset before; make another"
            )
        self._seed, self._task = seed, task
        await self._pool.take_place()
        self._has_place = True
        if self._is_closed:
            self._give_back()
            raise RunClosed(f"environment {self._factory} was closed before it could begin")
        return await self._lived_on("reset", lambda: self._ask("", is_reset=True))

    async def _go_on(self, action: str) -> Observation:
        doing = f"step {len(self._lived)}"
        if self._is_closed or not self._lived:
            raise EnvironmentFailed(
                environment=self._factory, doing=doing, why="it is not open; reset it first"
            )
        return await self._lived_on(doing, lambda: self._ask(action))

    async def _lived_on(self, doing: str, ask: Callable[[], Awaitable[Observation]]) -> Observation:
        """What comes of asking, in as many processes as it takes."""
        while True:
            try:
                if self._lived and (self._process is None or self._process.is_dead):
                    await self._begin_again()
                return await ask()
            except ProcessDied as death:
                self._deaths += 1
                kind = EnvironmentHung if death.was_late else EnvironmentCrashed
                if death.suspects == 1 or self._deaths >= DEATHS_MAX:
                    raise kind(
                        environment=self._factory,
                        doing=doing,
                        why=f"its {self._process_name} ended: {death.how}",
                    ) from None

    async def _begin_again(self) -> None:
        lived, self._lived = self._lived, []
        try:
            for number, (action, digest) in enumerate(lived):
                await self._ask(action, is_reset=number == 0)
                if self._lived[-1][1] != digest:
                    raise NotRepeatable(
                        environment=self._factory,
                        doing=f"step {number}" if number else "reset",
                        why=f"begun again after its process died, by the same seed ({self._seed}) "
                        f"and actions, it answered something else; take all its chance from the "
                        f"seed, or give it processes of its own",
                    )
        finally:
            self._lived = lived
        self._pool.count_again()

    async def _ask(self, action: str, *, is_reset: bool = False) -> Observation:
        timeout_s = self._pool.call_timeout_s
        call: calls.Begin | calls.Step
        if is_reset:
            self._move_in()
            call = calls.Begin(
                call_id=self._pool.next_id(),
                environment_id=self._id,
                factory=self._factory,
                arguments=self._arguments,
                seed=self._seed,
                task=self._task,
                timeout_s=timeout_s,
            )
        else:
            call = calls.Step(
                call_id=self._pool.next_id(),
                environment_id=self._id,
                action=action,
                timeout_s=timeout_s,
            )
        assert self._process is not None
        try:
            reply = await self._process.ask(call, timeout_s)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"environment {self._factory}: its task, arguments and actions must be plain data "
                f"that can be sent to another process: {error}"
            ) from None
        return self._taken(action, reply)

    def _taken(self, action: str, reply: calls.Reply) -> Observation:
        if isinstance(reply, calls.Failed):
            self._fail(reply)
        assert isinstance(reply, calls.Observed)
        observation = Observation(
            reply.text, reply.reward, reply.done, reply.truncated, reply.messages
        )
        body = msgspec.msgpack.encode(observation)
        self._lived.append((action, hashlib.blake2b(body, digest_size=8).digest()))
        return observation

    def _fail(self, reply: calls.Failed) -> None:
        doing = f"step {len(self._lived)}" if self._lived else "reset"
        if reply.is_timeout:
            why = f"it gave no answer in {self._pool.call_timeout_s:g} s"
            raise EnvironmentHung(environment=self._factory, doing=doing, why=why)
        if reply.is_out_of_memory and self._process is not None:
            # Its neighbours would be next: they are begun again where there is room.
            self._process.kill("an environment in it ran out of memory")
        raise EnvironmentFailed(
            environment=self._factory, doing=doing, why=f"{reply.error}\n{reply.story}".rstrip()
        )

    def _move_in(self) -> None:
        self._move_out()
        self._process = self._pool.home()
        self._process.environments += 1
        self._id = self._pool.next_id()

    def _move_out(self) -> WorkerProcess | None:
        process, self._process = self._process, None
        if process is not None:
            process.environments -= 1
        return process

    @property
    def _process_name(self) -> str:
        return "process" if self._process is None else self._process.name

    async def _close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        process = self._process
        try:
            if process is not None and not process.is_dead:
                timeout_s = self._pool.call_timeout_s
                call_id = self._pool.next_id()
                await process.ask(
                    calls.Close(call_id=call_id, environment_id=self._id, timeout_s=timeout_s),
                    timeout_s,
                )
        except ProcessDied:
            pass
        finally:
            self._give_back()

    def _give_back(self) -> None:
        self._move_out()
        if self._has_place:
            self._has_place = False
            self._pool.give_place()
