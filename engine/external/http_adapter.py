"""Base class of the adapters of vLLM and SGLang: what both do in the same way, over HTTP.

A subclass names its server's routes, and implements what only that server does.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec
import torch

from tidegate.engine.external.adapter import (
    LORA_NAMES,
    Capabilities,
    EngineAdapter,
    ExternalScores,
    ScoreRequest,
)
from tidegate.engine.external.http import CONTROL_TIMEOUT_S, HttpEngine, HttpStatusError, Query
from tidegate.engine.external.tensor_senders import TensorSender
from tidegate.engine.models.checkpoint import read_tensors
from tidegate.errors import ConfigError, EngineGone, ScoreRefused, TurnRefused, WeightsRefused
from tidegate.transport.weight_channels.cuda_nccl import NcclFailed

LORA_TIMEOUT_S = 120.0
"""Seconds to read an adapter after the current step, or to end the aborted requests that use it."""

MEMORY_TIMEOUT_S = 300.0
"""Seconds to copy a model to or from host memory."""

PAUSE_TIMEOUT_S = 60.0
"""Seconds for a pause, which waits for the current step: a long prefill at worst. To abort, SGLang
checks once a second whether clients still read."""

NO_LORA = "adapters are read from files; leave #weights= out of the server's URL"

SCORE_TIMEOUT_S = 600.0
"""Seconds for a score, which queues behind the running turns."""


class StreamEvent(msgspec.Struct):
    """JSON event of a server's token stream; servers add fields of their own."""

    error: Any = None
    """The server's error, which ends the stream; None in other events."""


Event = TypeVar("Event", bound=StreamEvent)


class HttpAdapter(EngineAdapter):
    """Adapter of one server behind HTTP."""

    kind: ClassVar[str]
    """The server's name in error messages."""
    generate_path: ClassVar[str]
    load_lora_path: ClassVar[str]
    unload_lora_path: ClassVar[str]
    label_path: ClassVar[str]
    """Route that reports the weights' label as ``weight_version``."""
    label_fields: ClassVar[Mapping[str, object]] = {}
    """Further fields of the request that sets the label."""
    control_timeout_s: ClassVar[float] = CONTROL_TIMEOUT_S
    """Seconds for control calls without a deadline of their own."""

    _server_capabilities: Capabilities
    """Capabilities, except those that only a request can tell; set by :meth:`_inspect`."""

    def __init__(self, url: str, model: Path, *, weights: str = "disk") -> None:
        """``model`` is the directory of the served model; ``weights`` the transfer method."""
        self._http = HttpEngine(url)
        self._model = model
        self._method = weights
        self._has_labels = True
        """Whether the server's weights can be named, and their name read."""
        self._sender: TensorSender | None = None
        self._loaded: tuple[Path, str] | None = None
        """Directory and label of the loaded weights; None if no directory has them."""

    # ------------------------------------------------------------ for subclasses

    async def _inspect(self) -> None:
        """Read the server's properties, and refuse a server that cannot serve a run. Changes
        nothing."""
        raise NotImplementedError

    async def _stop_all(self) -> None:
        """Wake the server, end all requests, and pause with ``abort``, whatever its state."""
        raise NotImplementedError

    async def _capabilities(self, label: str) -> Capabilities:
        """Return all capabilities, after test requests. The running server's weights are
        ``label``."""
        raise NotImplementedError

    async def _make_sender(self) -> TensorSender:
        raise NotImplementedError

    async def _load_files(self, directory: Path, label: str) -> None:
        """Load a directory's weights, name and verify them; a refusal leaves them unknown."""
        raise NotImplementedError

    async def _begin_update(self) -> None:
        raise NotImplementedError

    async def _send(self, tensors: Mapping[str, torch.Tensor], label: str) -> bool:
        """Send tensors within an update; return whether the label is still to be set after it."""
        assert self._sender is not None, "takes_tensors was not declared"
        await self._sender.send(tensors, {})
        return False

    async def _end_update(self, label: str) -> None:
        raise NotImplementedError

    def _score_body(self, request: ScoreRequest) -> dict[str, Any]:
        raise NotImplementedError

    def _read_scores(self, answer: Any, request: ScoreRequest) -> ExternalScores:
        raise NotImplementedError

    async def _refused(self, refusal: HttpStatusError) -> Exception:
        return TurnRefused(f"{self.kind} refuses this turn: {refusal.why}")

    # ------------------------------------------------------------ start and end

    async def open(self, label: str) -> Capabilities:
        """Load the model's own weights; leave the server awake, unpaused and without requests."""
        try:
            await self._inspect()
            if self._takes_tensors:
                self._sender = await self._make_sender()
            await self._stop_all()
            for name in await self._loras():  # a dead worker may have left some
                await self.unload_lora(name)
            await self._load_model(label)
            await self.resume()
            capabilities = await self._capabilities(label)
        except (HttpStatusError, WeightsRefused, EngineGone) as error:
            raise ConfigError(f"{self.kind} at {self._http.url} can't be used: {error}") from error
        if self._sender is None:
            return capabilities
        return replace(
            capabilities,
            takes_tensors=True,
            takes_patches=False,
            lora_rank_max=0,
            lora_lacks=NO_LORA,
        )

    async def _load_model(self, label: str) -> None:
        if self._sender is None:
            await self._load_files(self._model, label)
            self._loaded = self._model, label
            return
        try:
            await self._sender.join()
        except (NcclFailed, RuntimeError) as error:  # RuntimeError: torch, without GPU memory
            raise ConfigError(
                f"weights can't go to {self._http.url} by {self._method}: {error}"
            ) from error
        tensors = await asyncio.to_thread(lambda: dict(read_tensors(self._model)))
        await self.load_tensors(tensors, label)

    async def close(self) -> None:
        """Close connections, which aborts the requests in flight."""
        if self._sender is not None:
            await self._sender.close()
        await self._http.close()

    async def check(self) -> None:
        """Check the server and the engine process behind it."""
        try:
            await self._http.call("GET", "/health")
        except HttpStatusError as refusal:
            raise EngineGone(
                f"{self._http.url} is not healthy ({refusal}); {self.kind}'s log says why"
            ) from refusal

    async def _control(
        self,
        path: str,
        body: object = None,
        *,
        method: str = "POST",
        query: Query | None = None,
        timeout_s: float | None = None,
    ) -> Any:
        """Make a call that is refused only if something is wrong with the server."""
        timeout_s = timeout_s or self.control_timeout_s
        try:
            return await self._http.call(method, path, body, query=query, timeout_s=timeout_s)
        except HttpStatusError as refusal:
            raise EngineGone(
                f"{self.kind} at {self._http.url} refuses {method} {path} with {refusal.status}: "
                f"{refusal.why}"
            ) from refusal

    # ------------------------------------------------------------ requests

    async def _events(
        self, body: object, decoder: "msgspec.json.Decoder[Event]"
    ) -> AsyncGenerator[Event, None]:
        """Yield the events of a request, of which the caller reads none after a finish reason."""
        where = f"{self._http.url}{self.generate_path}"
        try:
            async with aclosing(self._http.events(self.generate_path, body)) as events:
                async for data in events:
                    event = decoder.decode(data)
                    if event.error is not None:
                        raise EngineGone(
                            f"{where} ended a stream with an error: {event.error}. {self.kind}'s "
                            "log has the cause"
                        )
                    yield event
        except HttpStatusError as refusal:
            raise await self._refused(refusal) from refusal
        except msgspec.DecodeError as error:
            raise EngineGone(
                f"{where} sent a stream event that is not {self.kind}'s JSON ({error}); is a proxy "
                "in between, or another server?"
            ) from error
        raise EngineGone(
            f"{where} ended a stream without a finish reason; {self.kind}'s log says whether the "
            "server failed"
        )

    async def score(self, request: ScoreRequest) -> ExternalScores:
        """Return log-probs of given tokens at temperature 1."""
        if request.temperature != 1.0:
            raise ScoreRefused(
                f"{self.kind} scores at temperature 1 only, not at {request.temperature}; leave "
                "temperature out, or use Tidegate's own engine"
            )
        body = self._score_body(request)
        try:
            answer = await self._http.call(
                "POST", self.generate_path, body, timeout_s=SCORE_TIMEOUT_S
            )
        except HttpStatusError as refusal:
            raise ScoreRefused(
                f"{self.kind} refuses to score these tokens: {refusal.why}"
            ) from refusal
        return self._read_scores(answer, request)

    # ------------------------------------------------------------ weights

    @property
    def _takes_tensors(self) -> bool:
        """Whether new weights are sent as tensors, never as files."""
        return self._method != "disk"

    async def load_weights(self, directory: Path, label: str) -> None:
        """Load weights from files; after a failure load the previous ones again."""
        try:
            await self._load_files(directory, label)
        except HttpStatusError as refusal:
            if self._loaded is None:
                raise EngineGone(
                    f"{self._http.url} could not load new weights ({refusal}) after elements of "
                    "the old were changed, which no directory has; restart the server"
                ) from refusal
            try:
                await self._load_files(*self._loaded)
            except HttpStatusError as error:
                raise EngineGone(
                    f"{self._http.url} could load neither new weights ({refusal}) nor the previous "
                    f"ones ({error}); restart the server"
                ) from error
            raise WeightsRefused(
                f"{self.kind} can't load the weights in {directory}: {refusal.why}. It must see "
                "that directory by the same path as its adapter does (--weights-directory)"
            ) from refusal
        self._loaded = directory, label

    async def load_tensors(self, tensors: Mapping[str, torch.Tensor], label: str) -> None:
        """Load weights without files. A failure half way cannot be undone, and ends the adapter."""
        try:
            await self._begin_update()
        except HttpStatusError as error:
            raise WeightsRefused(
                f"{self.kind} refuses to begin a weight update: {error.why}. Its log has the cause"
            ) from error
        try:
            is_unnamed = await self._send(tensors, label)
        except (HttpStatusError, WeightsRefused, NcclFailed, RuntimeError) as error:
            raise EngineGone(  # torch raises RuntimeError if a GPU or a group member fails
                f"{self.kind} may have loaded only some of the weights: {error}; its weights are "
                "unknown"
            ) from error
        try:
            await self._end_update(label)
        except HttpStatusError as error:
            raise EngineGone(
                f"{self.kind} failed to finish a weight update ({error}), so its weights are "
                "unknown; restart the server"
            ) from error
        await (self._set_label(label) if is_unnamed else self._verify(label))

    async def rename_weights(self, label: str) -> None:
        """Set the label of the live weights, which later tokens are attributed to."""
        await self._set_label(label)
        if self._loaded is not None:
            self._loaded = self._loaded[0], label

    async def _set_label(self, label: str) -> None:
        if self._has_labels:
            body = {"new_version": label, **self.label_fields}
            await self._control("/update_weight_version", body)
            await self._verify(label)

    async def _verify(self, label: str) -> None:
        if self._has_labels and (current := await self._label()) != label:
            raise EngineGone(
                f"{self._http.url} labels its weights {current!r}, and {label!r} was set; does "
                "another client load weights into it?"
            )

    async def _label(self) -> str:
        answer = await self._control(self.label_path, method="GET")
        return str(answer.get("weight_version"))

    # ------------------------------------------------------------ LoRA adapters

    async def load_lora(self, name: str, directory: Path) -> None:
        """Load an adapter from files, which the server may read again until it is unloaded."""
        body = {"lora_name": name, "lora_path": str(directory)}
        try:
            await self._http.call("POST", self.load_lora_path, body, timeout_s=LORA_TIMEOUT_S)
        except HttpStatusError as refusal:
            raise WeightsRefused(f"{self.kind} can't load the adapter: {refusal.why}") from refusal

    async def unload_lora(self, name: str) -> None:
        """Unload an adapter that no request uses, except those that are being aborted."""
        body = {"lora_name": name}
        try:
            await self._http.call("POST", self.unload_lora_path, body, timeout_s=LORA_TIMEOUT_S)
        except HttpStatusError as refusal:
            if name in await self._loras():  # else an earlier call's answer was lost
                raise EngineGone(f"{self.kind} can't unload an adapter: {refusal}") from refusal

    async def _loras(self) -> list[str]:
        """Return the names of a run's adapters in the server."""
        models = (await self._control("/v1/models", method="GET"))["data"]
        return [name for model in models if (name := str(model["id"])).startswith(LORA_NAMES)]
