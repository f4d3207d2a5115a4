"""Which phase is a weight update in? vLLM's four, of one receiver, then a publish to all engines.

``init`` once; then ``start``, any number of ``update``, and ``finish``, which brings what came to
every engine as one version. Until then the old one serves: an update that fails changes nothing.
It knows no HTTP, and not how tensors travel.
"""

import asyncio
import concurrent.futures
import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidegate.errors import TidegateError
from tidegate.orchestrator.vllm_server.failures import ServerError, UpdateError
from tidegate.orchestrator.vllm_server.labels import VersionLabels
from tidegate.orchestrator.vllm_server.model_info import ModelInfo
from tidegate.orchestrator.vllm_server.receivers import Receiver, read_tensors
from tidegate.orchestrator.weights.adapter_call import AdapterCall, UnloadCall
from tidegate.orchestrator.weights.publish_call import PublishCall

if TYPE_CHECKING:
    import torch

    from tidegate.orchestrator.run import Run
    from tidegate.orchestrator.scheduler import Scheduler

RANK_NAME = "dp0:pp0:pcp0:tp0:"
"""What vLLM puts before a tensor's name: the server is one rank."""

TIED = "lm_head.weight"
"""Sent by some trainers though it is the embeddings; checkpoints leave it out."""


@dataclass(slots=True)
class _Session:
    """An update between its start and its end."""

    tensors: "dict[str, torch.Tensor]" = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)


class WeightDesk:
    """The weights that the server's engines serve, as clients change them."""

    def __init__(
        self,
        run: "Run",
        scheduler: "Scheduler",
        info: ModelInfo,
        receiver: Receiver,
        published: Callable[[PublishCall], None],
    ) -> None:
        """``published`` is told of every version, for the run's records."""
        self._run = run
        self._scheduler = scheduler
        self._info = info
        self._receiver = receiver
        self._published = published
        self.labels = VersionLabels()
        self._session: _Session | None = None
        self._checksums: dict[str, str] = {}
        self._one_at_a_time = asyncio.Lock()

    # ------------------------------------------------------------ the four phases

    async def init(self, info: Mapping[str, Any]) -> None:
        """Meet the trainer; an update that another one began and never finished is forgotten."""
        async with self._one_at_a_time:
            self._forget()
            await in_daemon_thread(self._receiver.connect, info)

    async def shut_down(self) -> None:
        """Let go of the trainer, and of what it has not finished."""
        async with self._one_at_a_time:
            self._session = None
            await asyncio.to_thread(self._receiver.close)

    async def start(self) -> None:
        """Begin an update."""
        if self._session is not None:
            raise UpdateError(
                "start_weight_update called while a weight update is already active. "
                "Call finish_weight_update first."
            )
        self._session = _Session()

    async def update(self, info: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Take in some tensors, or all. If that fails, so has the update."""
        pieces = [info] if isinstance(info, Mapping) else list(info)
        if len(pieces) != 1:
            raise UpdateError(f"update_info is for one rank, got {len(pieces)} of them")
        async with self._one_at_a_time:
            session = self._session
            if session is None:
                raise UpdateError("start_weight_update must be called before update_weights.")
            try:
                await in_daemon_thread(self._receive, session, pieces[0])
            except BaseException:
                self._forget()
                raise

    def _forget(self) -> None:
        self._session = None
        self._receiver.finished()

    def _receive(self, session: _Session, info: Mapping[str, Any]) -> None:
        tensors = self._fitted(self._receiver.receive(info))
        session.tensors |= tensors
        if self._run.settings.weight_checksums:
            session.checksums |= {name: _checksum(tensor) for name, tensor in tensors.items()}

    async def finish(self, label: str | None) -> None:
        """Bring what came to every engine, as one version, called ``label`` from now on."""
        async with self._one_at_a_time:
            session = self._session
            self._forget()
            if session is None:
                raise UpdateError(
                    "finish_weight_update called without a matching start_weight_update."
                )
            await self._bring(session, label)

    async def reload(self, path: str | None) -> None:
        """Read all weights from files, and bring them to every engine."""
        async with self._one_at_a_time:
            session = _Session()
            await asyncio.to_thread(self._read, session, Path(path or self._info.path))
            await self._bring(session, None)

    def _read(self, session: _Session, path: Path) -> None:
        session.tensors = self._fitted(read_tensors(path))
        if self._run.settings.weight_checksums:
            session.checksums = {n: _checksum(tensor) for n, tensor in session.tensors.items()}

    # ------------------------------------------------------------ names and checks

    def rename(self, label: str) -> None:
        """Call what is served now so."""
        self.labels.name(self._scheduler.core.trainer_version, label)

    async def check(self, action: str, baseline: Mapping[str, str] | None) -> dict[str, Any]:
        """The body of ``/weight_checker``."""
        if action not in ("checksum", "compare"):
            told = f"action is checksum or compare, got {action}; weights can't be reset"
            raise ServerError(501 if action == "reset" else 400, told, param="action")
        if not self._run.settings.weight_checksums:
            raise ServerError(501, "start the server with --weight-checksums")
        if not self._checksums:
            facts = await asyncio.to_thread(read_tensors, self._info.path)
            self._checksums = {name: _checksum(tensor) for name, tensor in facts.items()}
        sums = {RANK_NAME + name: told for name, told in sorted(self._checksums.items())}
        if action == "checksum":
            return {"checksums": sums}
        if baseline is None:
            raise ServerError(400, "compare needs a baseline", param="baseline")
        differ = sorted(n for n in sums.keys() | baseline.keys() if sums.get(n) != baseline.get(n))
        return {"match": not differ, "mismatches": differ}

    # ------------------------------------------------------------ adapters

    async def load_adapter(self, name: str, path: str, *, is_in_place: bool) -> None:
        """Read a LoRA adapter from its directory, and bring it to every engine."""
        if name in self._info.adapters and not is_in_place:
            raise ServerError(
                400,
                f"The lora adapter '{name}' has already been loaded. If you want to load the "
                f"adapter in place, set 'load_inplace' to True.",
            )
        if name == self._info.name:
            raise ServerError(400, f"'{name}' is the model's own name; choose another")
        if not (Path(path) / "adapter_config.json").is_file():
            raise ServerError(404, f"No adapter found for '{path}'", param="lora_path")
        async with self._one_at_a_time:
            call = await asyncio.to_thread(AdapterCall, self._run, name, path, None, "live")
            await self._publish(call, None)
            self._info.adapters[name] = path

    async def unload_adapter(self, name: str) -> None:
        """Have every engine forget an adapter; no request may name it any more."""
        if name not in self._info.adapters:
            raise ServerError(404, f"The lora adapter '{name}' cannot be found.")
        async with self._one_at_a_time:
            path = self._info.adapters.pop(name)
            try:
                await self._publish(UnloadCall(self._run, name, "live"), None)
            except BaseException:
                self._info.adapters[name] = path
                raise

    # ------------------------------------------------------------ publishing

    def _fitted(self, tensors: "dict[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
        """As the model has them: in its dtypes; raises UpdateError where they don't fit."""
        import torch

        fitted = {}
        dtype = self._run.settings.dtype
        for name, tensor in tensors.items():
            facts = self._info.tensors.get(name)
            if facts is None and name == TIED:
                continue
            if facts is None:
                raise UpdateError(f"the model has no tensor {name!r}")
            if tuple(tensor.shape) != facts.shape:
                raise UpdateError(
                    f"{name} has shape {list(tensor.shape)}, the model's {list(facts.shape)}"
                )
            wanted = getattr(torch, facts.dtype if dtype == "auto" else dtype)
            fitted[name] = tensor.to(wanted)
        return fitted

    async def _bring(self, session: _Session, label: str | None) -> None:
        is_partial = not self._info.tensors.keys() <= session.tensors.keys()
        call = PublishCall(self._run, session.tensors, "live", partial=is_partial)
        await self._publish(call, label)
        if session.checksums:
            self._checksums = {**self._checksums, **session.checksums}

    async def _publish(self, call: PublishCall, label: str | None) -> None:
        expected = self._scheduler.core.next_version
        if label is not None:
            self.labels.name(expected, label)  # its first tokens may be told of before it is done
        try:
            await call.run(self._scheduler)
        except TidegateError as error:
            self.labels.forget(expected)
            raise UpdateError(str(error)) from error
        except BaseException:
            self.labels.forget(expected)
            raise
        finally:
            await asyncio.to_thread(self._published, call)  # it may write files


async def in_daemon_thread(work: Callable[..., None], *arguments: Any) -> None:
    """Wait for what may wait for a trainer for minutes: the server's end does not wait for it."""
    done: concurrent.futures.Future[None] = concurrent.futures.Future()

    def run() -> None:
        if not done.set_running_or_notify_cancel():
            return
        try:
            work(*arguments)
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            done.set_exception(error)
        else:
            done.set_result(None)

    threading.Thread(target=run, name="tidegate weights", daemon=True).start()
    await asyncio.wrap_future(done)


def _checksum(tensor: "torch.Tensor") -> str:
    import torch

    host = tensor.detach().contiguous().cpu()
    return hashlib.sha256(host.view(-1).view(torch.uint8).numpy().data).hexdigest()
