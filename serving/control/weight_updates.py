"""Weight updates by vLLM's four phases: receives tensors, then publishes them to all engines.

A trainer calls ``init`` once; then, for each version, ``start``, any number of ``update``, and
``finish``, which publishes the tensors to every engine as one version. Until then engines serve the
old version, so an update that fails changes nothing. Files are read only below the directories that
were named when the server started.
"""

import asyncio
import concurrent.futures
import hashlib
import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tidegate.errors import TidegateError
from tidegate.orchestrator.trainer.weight_updates import (
    AdapterPublish,
    AdapterRemoval,
    WeightPublish,
)
from tidegate.serving.control.receivers import UpdateReceiver, read_tensors
from tidegate.serving.http.errors import ApiError, UpdateError
from tidegate.serving.openai.model_info import HEAD, ModelInfo, VersionLabels
from tidegate.transport.weight_names import wrapper_hint

if TYPE_CHECKING:
    import torch

    from tidegate.orchestrator.scheduler.scheduler import Scheduler
    from tidegate.orchestrator.trainer.run import Run

FLOAT_BYTES_MIN = 2
"""Bytes of the smallest floating-point numbers that weights are published in, as ``publish`` has
it."""

RANK_NAME = "dp0:pp0:pcp0:tp0:"
"""Prefix that vLLM puts before a tensor's name in checksums; the server is one rank."""

LORA_DIRECTORY_ADAPTERS_MAX = 32
"""Adapters of the LoRA directory that stay loaded; SkyRL's jax engine trains as many by default. An
adapter of rank 32 for a model of 8 billion parameters takes about 175 MB in each engine."""

_ONLY_BELOW = (
    "files are read below the model's directory, and below those that the server was started with "
    "as --weight-directory"
)


@dataclass(slots=True)
class _Session:
    """Tensors received between the start and the end of an update."""

    tensors: "dict[str, torch.Tensor]" = field(default_factory=dict)
    checksums: dict[str, str] = field(default_factory=dict)
    label: str | None = None
    """Name of the weights, if it came with the tensors."""
    is_whole: bool = False
    """Whether files were sent without ``names``, which must have all tensors of the model."""


class WeightUpdates:
    """Receives weights and adapters from clients, and publishes them to all engines."""

    def __init__(
        self,
        run: "Run",
        scheduler: "Scheduler",
        info: ModelInfo,
        receiver: UpdateReceiver,
        published: Callable[[WeightPublish], None],
        *,
        adapters_in_use: Callable[[], Collection[str]],
        directories: Sequence[Path] = (),
        lora_directory: Path | None = None,
    ) -> None:
        """``published`` is called with every publish, for the run's records. ``directories``: files
        are read only below them. ``lora_directory``: adapters there are loaded when a request
        names them, and those that were not named for longest are unloaded, unless they are in
        ``adapters_in_use``."""
        permitted = [*directories, *([] if lora_directory is None else [lora_directory])]
        self._directories = [Path(os.path.realpath(each)) for each in permitted]
        self._lora_directory = lora_directory
        self._adapters_in_use = adapters_in_use
        self._on_demand: dict[str, None] = {}
        """Loaded adapters of the LoRA directory; in the order in which requests named them last."""
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
        """Connect to the trainer; drop an update that another trainer began and never finished."""
        async with self._one_at_a_time:
            self._forget()
            await in_daemon_thread(self._receiver.connect, info)

    async def shut_down(self) -> None:
        """Disconnect from the trainer, and drop its unfinished update."""
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
        """Receive some tensors, or all; a failure drops the whole update."""
        pieces = [info] if isinstance(info, Mapping) else list(info)
        if len(pieces) != 1:
            raise UpdateError(
                "the server is one rank, so update_info must be one object, got a list of "
                f"{len(pieces)}"
            )
        async with self._one_at_a_time:
            session = self._session
            if session is None:
                raise UpdateError("start_weight_update must be called before update_weights.")
            try:
                piece = pieces[0]
                if isinstance(path := piece.get("path"), str):
                    piece = {**piece, "path": str(self._permitted(path))}
                await in_daemon_thread(self._add, session, partial(self._receiver.receive, piece))
                session.is_whole |= "path" in piece and piece.get("names") is None
            except BaseException:
                self._forget()
                raise

    async def add(
        self, receive: "Callable[[], dict[str, torch.Tensor]]", *, label: str | None
    ) -> None:
        """Add tensors to the open update, or publish them at once if there is none.

        ``receive`` returns them; it runs in a thread, because it blocks. A failure drops the whole
        update. ``label`` names the weights.
        """
        async with self._one_at_a_time:
            is_open, session = self.is_open, self._session or _Session()
            try:
                await in_daemon_thread(self._add, session, receive)
            except BaseException:
                self._forget()
                raise
            session.label = session.label if label is None else label
            if not is_open:
                await self._publish_tensors(session, label)

    @property
    def is_open(self) -> bool:
        """Whether an update has begun and not finished."""
        return self._session is not None

    def _forget(self) -> None:
        self._session = None
        self._receiver.finished()

    def _add(self, session: _Session, receive: "Callable[[], dict[str, torch.Tensor]]") -> None:
        tensors = self._fitted(receive())
        session.tensors |= tensors
        if self._run.settings.weights.weight_checksums:
            session.checksums |= self._checksums_of(tensors)

    async def finish(self, label: str | None) -> None:
        """Publish the update to every engine as one version, named ``label``."""
        async with self._one_at_a_time:
            session = self._session
            self._forget()
            if session is None:
                raise UpdateError(
                    "finish_weight_update called without a matching start_weight_update."
                )
            await self._publish_tensors(session, session.label if label is None else label)

    async def reload(self, path: str | None, label: str | None = None) -> None:
        """Read all weights from files, and publish them to every engine, named ``label``."""
        async with self._one_at_a_time:
            session = _Session(is_whole=True)
            where = Path(self._info.path) if path is None else self._permitted(path)
            await asyncio.to_thread(self._add, session, partial(read_tensors, where))
            await self._publish_tensors(session, label)

    def _checksums_of(self, tensors: "Mapping[str, torch.Tensor]") -> dict[str, str]:
        """Return checksums by name; a tied model's head has none, because it is the embedding."""
        known = self._info.tensors
        named = {n: tensor for n, tensor in tensors.items() if n in known or n != HEAD}
        return {name: _checksum(tensor) for name, tensor in named.items()}

    def _permitted(self, path: str) -> Path:
        """Resolve a path of a request, which must be below one of the directories.

        Raises:
            UpdateError: the path is elsewhere. The error is the same whether it exists or not.
        """
        real = self._below_directories(path)
        if real is None:
            raise UpdateError(f"No such file or directory: {path}; {_ONLY_BELOW}")
        return real

    def _adapter_at(self, path: str) -> Path | None:
        real = self._below_directories(path)
        found = real is not None and os.path.isfile(real / "adapter_config.json")
        return real if found else None

    def _below_directories(self, path: str) -> Path | None:
        try:
            real = Path(os.path.realpath(path))
        except (OSError, ValueError):  # such as a NUL in it
            return None
        return real if any(real.is_relative_to(each) for each in self._directories) else None

    # ------------------------------------------------------------ names and checks

    def rename(self, label: str) -> None:
        """Name the weights that are served now."""
        self.labels.name(self._scheduler.core.trainer_version, label)

    async def check(self, action: str, baseline: Mapping[str, str] | None) -> dict[str, Any]:
        """Return the body of ``/weight_checker``."""
        if action not in ("checksum", "compare"):
            why = f"action is checksum or compare, got {action}; weights can't be reset"
            raise ApiError(501 if action == "reset" else 400, why, param="action")
        if not self._run.settings.weights.weight_checksums:
            raise ApiError(
                501,
                f"{action} needs checksums of published weights; start the server with "
                "--weight-checksums",
            )
        if not self._checksums:
            facts = await asyncio.to_thread(read_tensors, self._info.path)
            self._checksums = {name: _checksum(tensor) for name, tensor in facts.items()}
        sums = {RANK_NAME + name: checksum for name, checksum in sorted(self._checksums.items())}
        if action == "checksum":
            return {"checksums": sums}
        if baseline is None:
            raise ApiError(
                400,
                "compare needs a baseline, the result of an earlier action=checksum",
                param="baseline",
            )
        differ = sorted(n for n in sums.keys() | baseline.keys() if sums.get(n) != baseline.get(n))
        return {"match": not differ, "mismatches": differ}

    # ------------------------------------------------------------ adapters

    async def load_adapter(self, name: str, path: str, *, is_in_place: bool) -> None:
        """Read a LoRA adapter from its directory, and publish it to every engine."""
        async with self._one_at_a_time:
            if name in self._info.adapters and not is_in_place:
                raise ApiError(
                    400,
                    f"The lora adapter '{name}' has already been loaded. If you want to load the "
                    f"adapter in place, set 'load_inplace' to True.",
                )
            if name == self._info.name:
                raise ApiError(400, f"'{name}' is the model's own name; choose another")
            real = self._adapter_at(path)
            if real is None:
                why = f"No adapter found for '{path}'; {_ONLY_BELOW}"
                raise ApiError(404, why, param="lora_path")
            await self._load_adapter(name, real, path)
            if path != self._lora_path(name):  # the LoRA directory has no copy of it to load again
                self._on_demand.pop(name, None)

    async def adapter_of(self, model: str | None) -> str:
        """Return the adapter of a request's model name; empty: the model itself.

        An unknown name that is a directory below the LoRA directory is loaded first, once: other
        requests that name it meanwhile wait.

        Raises:
            ApiError: no model or adapter has this name.
        """
        path = self._lora_path(model)
        # An unknown name is refused without the lock, which an update may hold for minutes.
        if model and path and not self._info.knows(model) and self._adapter_at(path) is not None:
            async with self._one_at_a_time:
                if not self._info.knows(model) and (real := self._adapter_at(path)) is not None:
                    await self._load_adapter(model, real, path)
                    self._on_demand[model] = None
                    await self._unload_surplus(model)
        if model in self._on_demand:
            self._on_demand[model] = self._on_demand.pop(model)
        return self._info.adapter_of(model)

    async def _unload_surplus(self, newest: str) -> None:
        """Unload adapters of the LoRA directory above its limit that no request uses."""
        while len(self._on_demand) > LORA_DIRECTORY_ADAPTERS_MAX:
            kept = {newest, *self._adapters_in_use()}
            idle = next((name for name in self._on_demand if name not in kept), None)
            if idle is None:
                return
            await self._unload(idle)

    def _lora_path(self, model: str | None) -> str | None:
        """Return the adapter directory of this name; None if the name cannot be one."""
        if self._lora_directory is None or not model or model != os.path.basename(model):
            return None
        return None if model in (os.curdir, os.pardir) else str(self._lora_directory / model)

    async def _load_adapter(self, name: str, real: Path, path: str) -> None:
        call = await asyncio.to_thread(AdapterPublish, self._run, name, str(real), None, "live")
        await self._publish(call, None)
        self._info.adapters[name] = path

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter from every engine; requests may no longer name it."""
        async with self._one_at_a_time:
            if name not in self._info.adapters:
                raise ApiError(404, f"The lora adapter '{name}' cannot be found.")
            await self._unload(name)

    async def _unload(self, name: str) -> None:
        path = self._info.adapters.pop(name)
        try:
            await self._publish(AdapterRemoval(self._run, name, "live"), None)
        except BaseException:
            self._info.adapters[name] = path
            raise
        self._on_demand.pop(name, None)

    # ------------------------------------------------------------ publishing

    def _fitted(self, tensors: "dict[str, torch.Tensor]") -> "dict[str, torch.Tensor]":
        """Return tensors in the model's dtypes; raise UpdateError if one does not fit the model."""
        import torch

        fitted = {}
        dtype = self._run.settings.engine.dtype
        for name, tensor in tensors.items():
            facts = self._info.facts_of(name)
            if facts is None:
                raise UpdateError(
                    f"the model has no tensor {name!r}; send the names that the model directory "
                    f"has{wrapper_hint(name)}"
                )
            if not hasattr(torch, facts.dtype) and self._info.transformers_names.is_passed_over(
                name
            ):
                continue  # a mask in bytes, such as old GPT-2s have
            if tuple(tensor.shape) != facts.shape:
                raise UpdateError(
                    f"{name} has shape {list(tensor.shape)}, and the model's has "
                    f"{list(facts.shape)}"
                )
            if not tensor.is_floating_point() or tensor.element_size() < FLOAT_BYTES_MIN:
                raise UpdateError(
                    f"{name} is {tensor.dtype}; send float32, bfloat16, float16 or float64"
                )
            wanted = getattr(torch, facts.dtype if dtype == "auto" else dtype)
            fitted[name] = tensor.to(wanted)
        return fitted

    async def _publish_tensors(self, session: _Session, label: str | None) -> None:
        lacking = await asyncio.to_thread(self._info.lacking, list(session.tensors))
        if lacking and session.is_whole:
            raise UpdateError(
                f"the files lack {len(lacking)} of the model's tensors, such as {lacking[0]!r}: "
                f"save all of them, or select by `names` those that an update changes"
            )
        call = WeightPublish(self._run, session.tensors, "live", partial=bool(lacking))
        await self._publish(call, label)
        if session.checksums:
            sums = {**self._checksums, **session.checksums}
            if not sums.keys() <= self._info.tensors.keys():  # some came by other names
                names = session.checksums.keys()
                stale = await asyncio.to_thread(self._info.known_also_as, names)
                sums = {name: each for name, each in sums.items() if name not in stale}
            self._checksums = sums

    async def _publish(self, call: WeightPublish, label: str | None) -> None:
        expected = self._scheduler.core.next_version
        if label is not None:
            self.labels.name(
                expected, label
            )  # its first tokens may be reported before the call returns
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
    """Run work that may wait minutes for a trainer in a thread that does not delay shutdown."""
    done: concurrent.futures.Future[None] = concurrent.futures.Future()
    thread = threading.Thread(
        target=_carry_out, args=(done, work, arguments), name="tidegate weights", daemon=True
    )
    thread.start()
    try:
        await asyncio.wrap_future(done)
    finally:
        del done  # an error's traceback refers to this frame, and the future to the error


def _carry_out(
    done: concurrent.futures.Future[None], work: Callable[..., None], arguments: tuple[Any, ...]
) -> None:
    if not done.set_running_or_notify_cancel():
        return
    try:
        work(*arguments)
    except BaseException as error:  # noqa: BLE001 - raised where it is waited for
        done.set_exception(error)
    else:
        done.set_result(None)
    finally:
        del done  # as above


def _checksum(tensor: "torch.Tensor") -> str:
    import torch

    host = tensor.detach().contiguous().cpu()
    return hashlib.sha256(host.view(-1).view(torch.uint8).numpy().data).hexdigest()
