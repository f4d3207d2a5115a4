"""Program of a worker process: holds environments and tools, takes calls, sends replies.

    python -m tidegate.environments.worker --socket FD --parent PID

The pool starts it with any Python that has the environments' packages; it needs msgspec and this
package, but not the orchestrator's dependencies. It runs as two processes: the worker, and a keeper
that kills whatever the worker's environments started and left behind. The pool applies timeouts and
kills the process.

Plain methods run one after another in the main thread, because libraries that use signals need it.
``async`` methods run concurrently on an event loop in a second thread.
"""

import argparse
import asyncio
import ctypes
import faulthandler
import inspect
import os
import resource
import signal
import socket
import threading
import time
import traceback
import typing
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, NoReturn

import msgspec

from tidegate.environments import calls
from tidegate.environments.dotted_names import imported
from tidegate.environments.environment import TEXT_CHARACTERS_MAX, Environment, Observation
from tidegate.transport.trace_context import continued_trace

PR_SET_PDEATHSIG = 1
"""From <linux/prctl.h>: signal to receive when the parent dies."""

PR_SET_CHILD_SUBREAPER = 36
"""From <linux/prctl.h>: orphaned descendants become children of this process."""

KEEPER_SIGNALS = {signal.SIGTERM, signal.SIGCHLD}
"""Signals that the keeper waits for: a request to end, and the worker's end."""

KILLING_S = 5.0
"""Longest time that the keeper kills a worker's descendants, because a fork bomb can start new ones
faster than the keeper kills them; then the keeper gives up."""

KILLING_POLL_S = 0.005
"""Pause between two rounds of killing, for killed processes to end."""

TRACEBACK_CHARACTERS_MAX = 4000
"""Limit of a traceback; the end is kept, which names the error."""


class ToolSignature:
    """Description, argument schema and argument check of one tool, from its type hints.

    ``def search(query: str, limit: int = 5)`` takes a string and an optional integer, and nothing
    else.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Read the function's signature.

        Raises:
            TypeError: an argument can't be passed by name.
        """
        self.description = inspect.getdoc(function) or ""
        self._arguments = msgspec.defstruct(
            "Arguments", _fields(function), kw_only=True, forbid_unknown_fields=True
        )

    @property
    def parameters(self) -> dict[str, Any]:
        """JSON schema of the arguments, self-contained."""
        _, parts = msgspec.json.schema_components([self._arguments])
        own = parts.pop("Arguments")
        own.pop("title", None)
        own["additionalProperties"] = False
        if parts:
            own["$defs"] = parts
        local: dict[str, Any] = _with_local_references(own)
        return local

    def convert(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Check the arguments, and convert them to their type hints.

        Raises:
            msgspec.ValidationError: they do not match the hints.
        """
        given = msgspec.convert(arguments, self._arguments)
        return {name: getattr(given, name) for name in self._arguments.__struct_fields__}


def _fields(function: Callable[..., Any]) -> list[tuple[str, Any] | tuple[str, Any, Any]]:
    hints = typing.get_type_hints(function, include_extras=True)
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(
                f"a tool takes its arguments by name, but {parameter} of {function.__qualname__} "
                f"can't be given so"
            )
        kind = hints.get(parameter.name, Any)
        if parameter.default is parameter.empty:
            fields.append((parameter.name, kind))
        else:
            fields.append((parameter.name, kind, msgspec.field(default=parameter.default)))
    return fields


def _with_local_references(part: Any) -> Any:
    if isinstance(part, dict):
        return {
            key: value.replace("#/components/schemas/", "#/$defs/")
            if key == "$ref" and isinstance(value, str)
            else _with_local_references(value)
            for key, value in part.items()
        }
    return [_with_local_references(each) for each in part] if isinstance(part, list) else part


class Worker:
    """The environments and tools of one process."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        """Event loop for awaitables; started with the first one."""
        self._environments: dict[int, Environment] = {}
        self._running: dict[int, asyncio.Task[Any]] = {}
        """Running awaitable of each environment, by environment id."""
        self._tools: dict[str, tuple[Callable[..., Any], ToolSignature]] = {}

    def serve(self) -> None:
        """Answer calls until the pool closes the socket; then close open environments."""
        self._send(calls.WorkerReady(call_id=0))
        with suppress(EOFError, OSError):
            while True:
                length = calls.body_bytes(self._read(calls.LENGTH_BYTES))
                self._handle(calls.decode_call(self._read(length)))
        for environment_id in list(self._environments):
            call = calls.CloseEnvironment(call_id=0, environment_id=environment_id, timeout_s=1.0)
            with suppress(Exception):
                self._close(call)

    def _read(self, count: int) -> bytearray:
        body = bytearray(count)
        view = memoryview(body)
        while view:
            received = self._connection.recv_into(view)
            if not received:
                raise EOFError
            view = view[received:]
        return body

    def _handle(self, call: calls.WorkerCall) -> None:
        try:
            with continued_trace(call.trace):
                result = self._execute(call)
            if inspect.isawaitable(result):
                self._await_on_loop(call, result)
                return
            reply = _reply(call, result)
        except BaseException as error:  # noqa: BLE001 (an environment may even call sys.exit)
            reply = _failed(call, error)
        self._send(reply)

    def _execute(self, call: calls.WorkerCall) -> Any:
        """Execute the call, and return its result or an awaitable."""
        match call:
            case calls.CreateEnvironment():
                environment = imported(call.factory)(**call.arguments)
                self._environments[call.environment_id] = environment
                return environment.reset(seed=call.seed, task=call.task)
            case calls.StepEnvironment():
                return self._environments[call.environment_id].step(call.action)
            case calls.CloseEnvironment():
                return self._close(call)
            case calls.CallTool():
                function, signature = self._tool(call.tool)
                return function(**signature.convert(call.arguments))
            case calls.DescribeTool():
                return self._tool(call.tool)[1]

    def _close(self, call: calls.CloseEnvironment) -> Any:
        running = self._running.pop(call.environment_id, None)
        if running is not None:
            running.get_loop().call_soon_threadsafe(running.cancel)
        environment = self._environments.pop(call.environment_id, None)
        return None if environment is None else environment.close()

    def _tool(self, name: str) -> tuple[Callable[..., Any], ToolSignature]:
        if name not in self._tools:
            function = imported(name)
            self._tools[name] = function, ToolSignature(function)
        return self._tools[name]

    # ------------------------------------------------------------ awaitables

    def _await_on_loop(self, call: calls.WorkerCall, result: Awaitable[Any]) -> None:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="awaiting", daemon=True).start()
        # Sent first, because the reply itself must not come before it.
        self._send(calls.CallAwaiting(call_id=call.call_id))
        self._loop.call_soon_threadsafe(self._start, self._loop, call, result)

    def _start(
        self, loop: asyncio.AbstractEventLoop, call: calls.WorkerCall, result: Awaitable[Any]
    ) -> None:
        task = loop.create_task(self._await_result(call, result))
        if isinstance(call, calls.CreateEnvironment | calls.StepEnvironment):
            self._running[call.environment_id] = task

    async def _await_result(self, call: calls.WorkerCall, result: Awaitable[Any]) -> None:
        limit_s = None if isinstance(call, calls.DescribeTool) else call.timeout_s
        limit = asyncio.timeout(limit_s)
        try:
            with continued_trace(call.trace):
                async with limit:
                    value = await result
            reply = _reply(call, value)
        except BaseException as error:  # noqa: BLE001 (cancellation is reported, too)
            reply = _failed(call, error, is_timeout=limit.expired())
        self._send(reply)

    def _send(self, reply: calls.WorkerReply) -> None:
        try:
            frame = calls.frame(reply)
        except (TypeError, ValueError) as error:
            frame = calls.frame(
                calls.CallFailed(call_id=reply.call_id, error=f"the result can't be sent: {error}")
            )
        with self._sending, suppress(OSError):  # the pool has gone, so this process will end
            self._connection.sendall(frame)


def _reply(call: calls.WorkerCall, result: Any) -> calls.WorkerReply:
    match call:
        case calls.CreateEnvironment() | calls.StepEnvironment():
            if not isinstance(result, Observation):
                method = "reset" if isinstance(call, calls.CreateEnvironment) else "step"
                raise TypeError(
                    f"{method}() must return a tidegate.Observation, got a "
                    f"{type(result).__name__}: {result!r:.80}"
                )
            return calls.ObservationReply(
                call_id=call.call_id,
                **{name: getattr(result, name) for name in result.__struct_fields__},
            )
        case calls.DescribeTool():
            return calls.ToolDescription(
                call_id=call.call_id,
                description=result.description,
                parameters=result.parameters,
            )
        case calls.CloseEnvironment():
            return calls.CallResult(call_id=call.call_id)
        case calls.CallTool():
            return calls.CallResult(call_id=call.call_id, text=_as_text(result))


def _as_text(result: Any) -> str:
    """Return a tool's result: strings unchanged, plain data as JSON, anything else with ``str``."""
    if isinstance(result, str):
        text = result
    else:
        try:
            text = msgspec.json.encode(result).decode()
        except (TypeError, ValueError, OverflowError, RecursionError):
            text = str(result)
    if len(text) > TEXT_CHARACTERS_MAX:
        raise ValueError(
            f"a tool returned {len(text)} characters, and the limit is {TEXT_CHARACTERS_MAX}; cut "
            "the text in the tool"
        )
    return text


def _failed(
    call: calls.WorkerCall, error: BaseException, *, is_timeout: bool = False
) -> calls.CallFailed:
    message = str(error)
    return calls.CallFailed(
        call_id=call.call_id,
        error=f"{type(error).__name__}: {message}" if message else type(error).__name__,
        traceback="".join(traceback.format_exception(error))[-TRACEBACK_CHARACTERS_MAX:],
        is_timeout=is_timeout,
        is_out_of_memory=isinstance(error, MemoryError),
        is_bad_arguments=isinstance(call, calls.CallTool)
        and isinstance(error, msgspec.ValidationError),
    )


def _fork_keeper(parent: int, connection: int) -> None:
    """Fork: return in the child, the worker, while the parent becomes its keeper.

    The keeper adopts all processes that the worker starts and leaves behind, daemons in sessions of
    their own included (PR_SET_CHILD_SUBREAPER, see prctl(2)). When the worker ends, or the keeper
    is terminated or loses its parent, it kills them all and ends with the worker's status.
    """
    prctl = ctypes.CDLL(None).prctl
    # Block the signals before the fork: a blocked signal waits for sigwait.
    signal.pthread_sigmask(signal.SIG_BLOCK, KEEPER_SIGNALS)
    prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:
        os._exit(1)  # the parent died before PR_SET_PDEATHSIG was set
    keeper, worker = os.getpid(), os.fork()
    if not worker:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != keeper:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, KEEPER_SIGNALS)
        return
    faulthandler.disable()
    os.close(connection)  # so that the pool sees it closed when the worker ends
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in range(3):
        os.dup2(null, descriptor)
    status: int | None = None
    while status is None and signal.sigwait(KEEPER_SIGNALS) != signal.SIGTERM:
        status = _reap(worker)
    worker_status = _kill_descendants(worker)
    _exit_like(worker_status if status is None else status)


def _reap(worker: int) -> int | None:
    """Reap all children that have ended; return the worker's status if it is one of them."""
    worker_status: int | None = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == worker:
                worker_status = ended[1]
    return worker_status


def _kill_descendants(worker: int) -> int | None:
    """Kill all descendants until none is left; return the worker's status, if known.

    Children of a killed process become children of this one, and are found in the next round.
    """
    status: int | None = None
    deadline_s = time.monotonic() + KILLING_S
    while time.monotonic() < deadline_s:
        for pid in _descendants(os.getpid()):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        worker_status = _reap(worker)
        status = status if worker_status is None else worker_status
        try:
            os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            break
        time.sleep(KILLING_POLL_S)
    return status


def _descendants(pid: int) -> list[int]:
    """Return the ids of all processes that descend from ``pid``, according to /proc."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdecimal():
            continue
        with suppress(OSError), open(f"/proc/{entry}/stat", "rb") as stat:
            # "pid (name) state ppid …": the name may hold parentheses and spaces.
            fields = stat.read().rpartition(b")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(entry))
    descendants = list(children.get(pid, ()))
    for descendant in descendants:
        descendants += children.get(descendant, ())
    return descendants


def _exit_like(status: int | None) -> NoReturn:
    """End this process with the same status as another one."""
    if status is not None and os.WIFEXITED(status):
        os._exit(os.WEXITSTATUS(status))
    number = signal.SIGKILL if status is None else os.WTERMSIG(status)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
    os._exit(1)


def main() -> None:
    """Serve the pool that started this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--memory-bytes", type=int)
    options = parser.parse_args()
    _fork_keeper(options.parent, options.socket)
    if options.memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_AS, (options.memory_bytes, options.memory_bytes))
    connection = socket.socket(fileno=options.socket)
    connection.set_inheritable(False)  # processes started by environments must not hold it open
    Worker(connection).serve()
    os._exit(0)  # end even if environments left threads running


if __name__ == "__main__":
    main()
