"""Loads weights into a vLLM server, from files or as tensors, and names them.

Used by ``VllmAdapter``, only while the server is paused, because an update of a running vLLM
crashes it. The outcome is always verified. Differences between releases are in ``vllm_releases``.
``vllm_ipc.py`` and ``vllm_nccl.py`` send tensors without files.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path

import torch

from tidegate.engine.external.host_weights import is_tied, read_sizes
from tidegate.engine.external.http import HttpEngine, HttpStatusError
from tidegate.engine.external.vllm_ipc import VllmIpcSender
from tidegate.engine.external.vllm_nccl import VllmNcclSender
from tidegate.engine.external.vllm_patches import RPC
from tidegate.engine.external.vllm_releases import VllmServerInfo, refuse_transfer
from tidegate.engine.models.checkpoint import read_tensors
from tidegate.errors import ConfigError, EngineGone, WeightsRefused
from tidegate.transport.printable import print_stderr
from tidegate.transport.weight_channels.cuda_memory import CudaGpu as gpu_of
from tidegate.transport.weight_channels.cuda_nccl import NcclFailed, nccl_library, own_device

TRANSFER_METHODS = ("disk", "nccl", "nccl-unpacked", "ipc")
"""Values of ``#weights=`` in an engine URL."""

LOAD_TIMEOUT_S = 600.0
"""Seconds to read a model from disk. vLLM may never answer an update that fails inside it."""

PHASE_TIMEOUT_S = 120.0
"""Seconds to begin or finish an update, in which vLLM converts the model's layers."""

PATCHED_ARCHITECTURES = frozenset(
    {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
)
"""Architectures of whose weights vLLM computes with no other copy or layout, which a change of
elements would not reach. Mixtures, latent attention and state-space layers have such."""

UNNAMED_LABEL = "default"
"""Name of a server's weights until they are named."""


class VllmWeights:
    """Weights of one server."""

    def __init__(self, http: HttpEngine, model: Path, method: str) -> None:
        """``method`` is the transfer method, one of :data:`TRANSFER_METHODS`.

        Raises:
            ConfigError: it is none of them.
        """
        if method not in TRANSFER_METHODS:
            raise ConfigError(
                f"vLLM at {http.url} can't be given weights by {method!r}; #weights= may name "
                f"{', '.join(TRANSFER_METHODS)}"
            )
        self._http, self._model, self._method = http, model, method
        self._has_labels = False
        self._sender: VllmNcclSender | VllmIpcSender | None = None
        self._loaded: tuple[Path, str] | None = None
        """Directory and label of the loaded weights; used with files only."""

    @property
    def takes_tensors(self) -> bool:
        """Whether new weights are sent as tensors, never as files."""
        return self._method != "disk"

    def check_transfer(self, release: VllmServerInfo) -> None:
        """Check the server and this process before changing anything.

        Raises:
            ConfigError: the transfer method is not available; says why.
        """
        _refuse_tied(release, self._model)
        if not self.takes_tensors:
            return
        refuse_transfer(release, self._http.url, self._backend)
        if own_device() is None:
            where = (
                "its worker's is seen"
                if self._backend == "ipc"
                else "one is free that no worker of the server's has"
            )
            raise ConfigError(
                f"weights can't go to {self._http.url} by {self._backend}, because this process "
                f"sees no GPU: start the adapter where {where}, or leave #weights= out to load "
                "files"
            )

    @property
    def _backend(self) -> str:
        """Name of the transfer method in --weight-transfer-config."""
        return self._method.removesuffix("-unpacked")

    async def open(self, release: VllmServerInfo, label: str) -> None:
        """Load the model directory's weights, and name them ``label``.

        Raises:
            ConfigError: the transfer method does not work.
            WeightsRefused, Refusal, EngineGone: loading failed.
        """
        self._has_labels = release.has_labels
        if self.takes_tensors:
            await self._end_stale_update()
            self._sender = await self._join()
            tensors = await asyncio.to_thread(lambda: dict(read_tensors(self._model)))
            await self.load_tensors(tensors, label)
            return
        is_another = _differs(Path(release.model), self._model)
        if not release.has_labels or is_another or await self._label() != UNNAMED_LABEL:
            print_stderr(f"{self._http.url} may have other weights; loading {self._model}")
            await self._load_files(self._model, label)
        elif release.has_labels:
            await self._set_label(label)
        self._loaded = (self._model, label)

    async def close(self) -> None:
        """Close the sender."""
        if self._sender is not None:
            await self._sender.close()

    # ------------------------------------------------------------ files

    async def load(self, directory: Path, label: str) -> None:
        """Load weights from files; after a failure reload the previous ones."""
        previous = self._loaded
        try:
            await self._load_files(directory, label)
        except HttpStatusError as refusal:
            if previous is None:
                raise EngineGone(
                    f"{self._http.url} could not load new weights ({refusal}) after elements of "
                    "the old were changed, which no directory has; restart the server"
                ) from refusal
            try:
                await self._load_files(*previous)
            except HttpStatusError as error:
                raise EngineGone(
                    f"{self._http.url} could load neither new weights ({refusal}) nor the previous "
                    f"ones ({error}); restart the server"
                ) from error
            raise WeightsRefused(
                f"vLLM can't load the published weights: {refusal.why}"
            ) from refusal
        self._loaded = (directory, label)

    async def _load_files(self, directory: Path, label: str) -> None:
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(directory)}}
        await self._http.call("POST", "/collective_rpc", body, timeout_s=LOAD_TIMEOUT_S)
        if self._has_labels:
            await self._set_label(label)

    def takes_patches(self, release: VllmServerInfo) -> bool:
        """Whether elements of the server's weights can be changed in place."""
        architecture, _ = read_sizes(self._model)
        return (
            release.applies_patches
            and not self.takes_tensors
            and architecture in PATCHED_ARCHITECTURES
        )

    async def load_patches(self, file: Path, label: str) -> None:
        """Change elements of the weights in place. A failure half way is not undone."""
        self._loaded = None  # no directory has the weights any more
        body = {"method": RPC, "kwargs": {"path": str(file)}}
        try:
            await self._http.call("POST", "/collective_rpc", body, timeout_s=LOAD_TIMEOUT_S)
        except HttpStatusError as refusal:
            raise WeightsRefused(
                f"vLLM can't change elements of its weights: {refusal.why}"
            ) from refusal
        if self._has_labels:
            await self._set_label(label)

    # ------------------------------------------------------------ tensors

    async def _join(self) -> VllmNcclSender | VllmIpcSender:
        device = own_device()
        assert device is not None, "refuse() comes first"
        size = await self._http.call("GET", "/get_world_size")
        sender = self._new_sender(device, int(size["world_size"]))
        await sender.join()
        return sender

    def _new_sender(self, device: torch.device, workers: int) -> VllmNcclSender | VllmIpcSender:
        if self._backend == "ipc":
            return VllmIpcSender(self._http, workers=workers, gpu=gpu_of(device))
        try:
            library = nccl_library()
        except NcclFailed as error:
            raise ConfigError(f"weights can't go to {self._http.url} by nccl: {error}") from error
        is_packed = self._method == "nccl"
        return VllmNcclSender(
            self._http, workers=workers, library=library, device=device, is_packed=is_packed
        )

    async def _end_stale_update(self) -> None:
        """End an update that a dead adapter left open, and restore half-loaded layers.

        vLLM counts what each layer has received, so a full set after a partial one would exceed the
        layer's size; an empty update resets the count. The weights are overwritten afterwards.
        """
        try:
            await self._phase("/start_weight_update")
        except HttpStatusError as refusal:
            if "already active" not in refusal.why:
                raise
        await self._phase("/finish_weight_update")

    async def load_tensors(self, tensors: Mapping[str, torch.Tensor], label: str) -> None:
        """Load weights without files. A failure half way cannot be undone, and ends the adapter."""
        assert self._sender is not None, "takes_tensors was not declared"
        try:
            await self._phase("/start_weight_update")
        except HttpStatusError as error:
            raise WeightsRefused(
                f"vLLM refuses to begin a weight update: {error.why}. Its log has the cause"
            ) from error
        await self._sender.send(tensors)
        try:
            await self._phase("/finish_weight_update", {"weight_version": label})
        except HttpStatusError as error:
            raise EngineGone(
                f"vLLM failed to finish a weight update ({error}), so its weights are unknown; "
                "restart the server"
            ) from error
        await self._verify(label)

    async def _phase(self, path: str, body: object = None) -> None:
        await self._http.call("POST", path, body, timeout_s=PHASE_TIMEOUT_S)

    # ------------------------------------------------------------ names

    async def rename(self, label: str) -> None:
        """Relabel the weights; releases without labels need nothing."""
        if self._has_labels:
            await self._set_label(label)
        if self._loaded is not None:
            self._loaded = (self._loaded[0], label)

    async def _set_label(self, label: str) -> None:
        try:
            await self._http.call("POST", "/update_weight_version", {"new_version": label})
        except HttpStatusError as refusal:
            raise EngineGone(f"vLLM can't label its weights: {refusal}") from refusal
        await self._verify(label)

    async def _verify(self, label: str) -> None:
        if (current := await self._label()) != label:
            raise EngineGone(
                f"{self._http.url} labels its weights {current!r}, and {label!r} was set; does "
                "another client load weights into it?"
            )

    async def _label(self) -> str:
        try:
            answer = await self._http.call("GET", "/weight_info")
        except HttpStatusError as refusal:
            raise EngineGone(f"vLLM does not report its weights' label: {refusal}") from refusal
        return str(answer["weight_version"])


def _refuse_tied(release: VllmServerInfo, model: Path) -> None:
    """Refuse a tied model on a CPU, of which vLLM would update all but the LM head.

    On a CPU vLLM multiplies by a packed copy of the head, which loading the tied embedding does not
    update: later tokens would be of neither the old weights nor the new.

    Raises:
        ConfigError: the model is tied, and the server runs on a CPU.
    """
    if release.is_on_cpu and is_tied(model):
        raise ConfigError(
            f"vLLM {release.text} on a CPU keeps the old lm_head of a tied model when it is "
            f"given new weights; untie {model} (tie_word_embeddings=false in config.json, and "
            f"lm_head.weight in the files), or use Tidegate's own engine"
        )


def _differs(started_with: Path, model: Path) -> bool:
    """Whether the server was started with another directory, as far as this host can see."""
    return started_with.is_dir() and started_with.resolve() != model
