"""What does vLLM compute with, what is that called, and how is it given others? Files, or tensors.

Called while it is paused: an update of a vLLM that samples ends it. What has become of the weights
is always looked at afterwards. It knows no requests; what its versions differ in is in
``vllm_releases``.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import torch

from tidegate.engine.external.host_weights import is_tied
from tidegate.engine.external.http import HttpEngine, Refusal
from tidegate.engine.external.vllm_ipc import SharedBuffers
from tidegate.engine.external.vllm_nccl import Broadcasts
from tidegate.engine.external.vllm_releases import Release, refuse_transfer
from tidegate.engine.models.checkpoint import read_tensors
from tidegate.errors import ConfigError, EngineGone, WeightsRefused
from tidegate.transport.printable import say
from tidegate.transport.weight_channels.cuda_memory import CudaGpu as gpu_of
from tidegate.transport.weight_channels.cuda_nccl import NcclFailed, nccl_library, own_device

WAYS = ("disk", "nccl", "nccl-unpacked", "ipc")
"""What may follow ``#weights=`` in its URL."""

LOAD_TIMEOUT_S = 600.0
"""To read a model from disk. An update that goes wrong inside of vLLM may never be answered."""

PHASE_TIMEOUT_S = 120.0
"""To take a model's layers apart, and to put them together."""

NEVER_GIVEN_WEIGHTS = "default"
"""What a server calls its weights until somebody names them."""


class VllmWeights:
    """One server's."""

    def __init__(self, http: HttpEngine, model: Path, way: str) -> None:
        """``way`` is how new ones get there, one of :data:`WAYS`.

        Raises:
            ConfigError: it is none.
        """
        if way not in WAYS:
            raise ConfigError(
                f"vLLM at {http.url} can't be given weights by {way!r}; #weights= may name "
                f"{', '.join(WAYS)}"
            )
        self._http, self._model, self._way = http, model, way
        self._has_labels = False
        self._sender: Broadcasts | SharedBuffers | None = None
        self._serves: tuple[Path, str] | None = None
        """The directory whose weights it has, and their label; of weights from files only."""

    @property
    def takes_tensors(self) -> bool:
        """Whether new ones come as tensors, and never as files."""
        return self._way != "disk"

    def refuse(self, release: Release) -> None:
        """Before anything is done to the server.

        Raises:
            ConfigError: it, or this process, can't do what is wanted; says why.
        """
        _refuse_tied(release, self._model)
        if not self.takes_tensors:
            return
        refuse_transfer(release, self._http.url, self._backend)
        if own_device() is None:
            wanted = (
                "its worker's is seen"
                if self._backend == "ipc"
                else "one is free that no worker of the server's has"
            )
            raise ConfigError(
                f"weights can't go to {self._http.url} by {self._backend}, for this process sees "
                f"no GPU: start the adapter where {wanted}, or leave #weights= out, and files are "
                f"read"
            )

    @property
    def _backend(self) -> str:
        """As --weight-transfer-config names it."""
        return self._way.removesuffix("-unpacked")

    async def open(self, release: Release, label: str) -> None:
        """Have it compute with the model directory's weights, called ``label``.

        Raises:
            ConfigError: they can't get there that way.
            WeightsRefused, Refusal, EngineGone: they didn't.
        """
        self._has_labels = release.has_labels
        if self.takes_tensors:
            await self._settle()
            self._sender = await self._join()
            own = await asyncio.to_thread(lambda: dict(read_tensors(self._model)))
            await self.load_tensors(own, label)
            return
        is_another = _is_another(Path(release.model), self._model)
        if not release.has_labels or is_another or await self._label() != NEVER_GIVEN_WEIGHTS:
            say(f"{self._http.url} may have other weights; loads {self._model}")
            await self._read(self._model, label)
        elif release.has_labels:
            await self._name(label)
        self._serves = (self._model, label)

    async def close(self) -> None:
        """Let go of what weights came by."""
        if self._sender is not None:
            await self._sender.close()

    # ------------------------------------------------------------ files

    async def load(self, directory: Path, label: str) -> None:
        """From files; if that fails, those of before again, for it may have got half way."""
        before = self._serves
        try:
            await self._read(directory, label)
        except Refusal as refusal:
            if before is None:
                raise WeightsRefused(str(refusal)) from refusal
            try:
                await self._read(*before)
            except Refusal as error:
                raise EngineGone(
                    f"{self._http.url} could load neither new weights ({refusal}) nor those of "
                    f"before ({error})"
                ) from error
            raise WeightsRefused(f"vLLM can't load them: {refusal.why}") from refusal
        self._serves = (directory, label)

    async def _read(self, directory: Path, label: str) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        await self._http.call("POST", "/collective_rpc", body, timeout_s=LOAD_TIMEOUT_S)
        if self._has_labels:
            await self._name(label)

    # ------------------------------------------------------------ tensors

    async def _join(self) -> Broadcasts | SharedBuffers:
        device = own_device()
        assert device is not None, "refuse() comes first"
        size = await self._http.call("GET", "/get_world_size")
        sender = self._new_sender(device, int(size["world_size"]))
        await sender.join()
        return sender

    def _new_sender(self, device: torch.device, workers: int) -> Broadcasts | SharedBuffers:
        if self._backend == "ipc":
            return SharedBuffers(self._http, workers=workers, gpu=gpu_of(device))
        try:
            library = nccl_library()
        except NcclFailed as error:
            raise ConfigError(f"weights can't go to {self._http.url} by nccl: {error}") from error
        is_packed = self._way == "nccl"
        return Broadcasts(
            self._http, workers=workers, library=library, device=device, is_packed=is_packed
        )

    async def _settle(self) -> None:
        """End the update that an adapter has left which died, and put half-loaded layers together.

        A layer counts what it was given, so that all of it would be too much for one that has had
        a part; an empty update counts from 0 again. What it computes with then is overwritten.
        """
        try:
            await self._phase("/start_weight_update")
        except Refusal as refusal:
            if "already active" not in refusal.why:
                raise
        await self._phase("/finish_weight_update")

    async def load_tensors(self, tensors: Mapping[str, torch.Tensor], label: str) -> None:
        """Without files. There is no way back: what fails halfway ends the adapter."""
        assert self._sender is not None, "takes_tensors was not declared"
        try:
            await self._phase("/start_weight_update")
        except Refusal as error:
            raise WeightsRefused(f"vLLM begins no update of its weights: {error.why}") from error
        await self._sender.send(tensors)
        try:
            await self._phase("/finish_weight_update", {"weight_version": label})
        except Refusal as error:
            raise EngineGone(f"vLLM can't finish an update of its weights: {error}") from error
        await self._verify(label)

    async def _phase(self, path: str, body: object = None) -> None:
        await self._http.call("POST", path, body, timeout_s=PHASE_TIMEOUT_S)

    # ------------------------------------------------------------ names

    async def rename(self, label: str) -> None:
        """Releases without labels have nothing to name."""
        if self._has_labels:
            await self._name(label)
        if self._serves is not None:
            self._serves = (self._serves[0], label)

    async def _name(self, label: str) -> None:
        try:
            await self._http.call("POST", "/update_weight_version", {"new_version": label})
        except Refusal as refusal:
            raise EngineGone(f"vLLM gives its weights no name: {refusal}") from refusal
        await self._verify(label)

    async def _verify(self, label: str) -> None:
        if (found := await self._label()) != label:
            raise EngineGone(f"{self._http.url} calls its weights {found!r}, named {label!r}")

    async def _label(self) -> str:
        try:
            answer = await self._http.call("GET", "/weight_info")
        except Refusal as refusal:
            raise EngineGone(
                f"vLLM doesn't say what its weights are called: {refusal}"
            ) from refusal
        return str(answer["weight_version"])


def _refuse_tied(release: Release, model: Path) -> None:
    """Refuse a model of which vLLM would update all but the head.

    On a CPU it multiplies by a packed copy of the head, which loading the embedding that it is tied
    to does not touch: the tokens after it are of neither the old weights nor the new.

    Raises:
        ConfigError: it is such a model, on a CPU.
    """
    if release.is_on_cpu and is_tied(model):
        raise ConfigError(
            f"vLLM {release.text} on a CPU goes on with the old lm_head of a tied model when it is "
            f"given new weights; untie {model} (tie_word_embeddings=false in config.json, and "
            f"lm_head.weight in the files), or use Tidegate's own engine"
        )


def _is_another(started_with: Path, model: Path) -> bool:
    """Whether the server was started with another directory, as far as that can be seen here."""
    return started_with.is_dir() and started_with.resolve() != model
