"""Sends weights to an SGLang server without files: in HTTP bodies, or by a gloo or NCCL broadcast.

Used by ``SglangAdapter.load_tensors``. One update is a session: begin, tensors in buckets, end.
SGLang expects pickled tensors, so they are written as pickles; nothing is unpickled here, and
SGLang's own unpickler accepts tensors only. Built on ``external/http.py``, ``sglang_server.py`` and
``transport/weight_channels/collective.py``.
"""

import asyncio
import base64
import itertools
import pickle
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Protocol
from urllib.parse import urlsplit

import torch

from tidegate.engine.external.http import HttpEngine, HttpStatusError
from tidegate.engine.external.sglang_server import SglangServerInfo
from tidegate.errors import ConfigError, EngineGone, WeightsRefused
from tidegate.transport.addresses import listening_host, local_address_towards
from tidegate.transport.weight_channels.collective import (
    BroadcastGroup,
    join_custom_group,
    open_store,
)

TRANSFER_METHODS = ("disk", "http", "gloo", "nccl")
"""Values of ``#weights=`` in an engine URL."""

BUCKET_BYTES = 64 * 1024 * 1024
"""Bytes per call: a body of 85 MiB over HTTP, of which server and adapter hold a few copies."""

BUCKET_TIMEOUT_S = 300.0

GROUP_TIMEOUT_S = 60.0

LEAVE_TIMEOUT_S = 5.0
"""Seconds to leave a process group. A thread blocked in a broadcast cannot be interrupted; it gives
up by itself after 30 s."""

Tensors = Mapping[str, torch.Tensor]

Bucket = list[tuple[str, torch.Tensor]]


class BucketSender(Protocol):
    """Transfer method for one bucket of tensors."""

    async def send(self, bucket: Bucket, fields: dict[str, Any]) -> None:
        """Load a bucket; ``fields`` holds the fields common to all methods' requests.

        Raises:
            Refusal: SGLang refuses it.
            EngineGone: the outcome is unknown.
        """

    async def close(self) -> None:
        """Close what the method has opened."""


def make_sender(http: HttpEngine, name: str, server: SglangServerInfo) -> BucketSender:
    """Make the transfer method ``name``.

    Raises:
        ConfigError: there is no such method, or it is not available here or for that server.
    """
    if server.stages > 1:
        raise ConfigError(
            f"SGLang at {http.url} is pipeline-parallel (--pp-size {server.stages}), and accepts "
            "weights for its first stage only; leave #weights= out"
        )
    match name:
        case "http":
            return InlineBucketSender(http, server.ranks)
        case "gloo" | "nccl":
            return SglangBroadcastSender(http, server.ranks, name)
    raise ConfigError(
        f"SGLang at {http.url} can't load weights by {name!r}; methods are "
        f"{', '.join(TRANSFER_METHODS)}"
    )


async def load(
    http: HttpEngine, sender: BucketSender, tensors: Tensors, label: str, *, flushes: bool
) -> None:
    """Load all tensors, and name the weights ``label``.

    Raises:
        WeightsRefused: nothing has changed.
        Refusal: all tensors are loaded, but something else failed; the session has ended.
        EngineGone: some tensors may be loaded.
    """
    await _begin(http)
    buckets = list(_buckets(tensors.items()))
    flush_error = None
    for number, bucket in enumerate(buckets, 1):
        is_last = number == len(buckets)
        fields: dict[str, Any] = {"flush_cache": flushes and is_last, "abort_all_requests": False}
        if is_last:
            fields["weight_version"] = label
        try:
            await sender.send(bucket, fields)
        except HttpStatusError as error:
            if not is_last or "Weights were updated" not in error.why:
                raise EngineGone(
                    f"SGLang loaded some of the weights, and then refused: {error}; its weights "
                    f"are unknown"
                ) from error
            flush_error = error
    await _end(http)
    if flush_error is not None:
        raise flush_error


async def _begin(http: HttpEngine) -> None:
    try:
        try:
            await http.call("POST", "/begin_weight_update", {"selector": "all"})
        except HttpStatusError:  # a dead adapter has left a session open
            await http.call("POST", "/end_weight_update", {})
            await http.call("POST", "/begin_weight_update", {"selector": "all"})
    except HttpStatusError as error:
        raise WeightsRefused(
            f"SGLang refuses to begin a weight update: {error.why}. Its log has the cause"
        ) from error


async def _end(http: HttpEngine) -> None:
    try:
        await http.call("POST", "/end_weight_update", {}, timeout_s=BUCKET_TIMEOUT_S)
    except HttpStatusError as error:
        raise EngineGone(
            f"SGLang failed to finish a weight update ({error}), so its weights are unknown; "
            "restart the server"
        ) from error


def _buckets(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Bucket]:
    bucket: Bucket = []
    nbytes = 0
    for name, tensor in tensors:
        if bucket and nbytes + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, nbytes = [], 0
        bucket.append((name, tensor))
        nbytes += tensor.nbytes
    yield bucket


class InlineBucketSender:
    """Sends tensors by value in HTTP bodies: works for any server, with its API key."""

    def __init__(self, http: HttpEngine, ranks: int) -> None:
        self._http = http
        self._ranks = ranks

    async def send(self, bucket: Bucket, fields: dict[str, Any]) -> None:
        """Send the whole bucket to each rank, which takes its part."""
        payload = await asyncio.to_thread(pickle_tensors, bucket)
        body = fields | {"serialized_named_tensors": [payload] * self._ranks}
        path = "/update_weights_from_tensor"
        await self._http.call("POST", path, body, timeout_s=BUCKET_TIMEOUT_S)

    async def close(self) -> None:
        """Do nothing: nothing is open."""


def pickle_tensors(bucket: Bucket) -> str:
    """Encode like SGLang's MultiprocessingSerializer, with the bytes in place of a handle."""
    # Cloned, because torch pickles the whole storage of a view.
    tensors = [(name, tensor.detach().clone()) for name, tensor in bucket]
    return base64.b64encode(pickle.dumps(tensors)).decode()


class SglangBroadcastSender:
    """Broadcasts from this process, as rank 0, to the server's ranks. **Not encrypted.**"""

    def __init__(self, http: HttpEngine, ranks: int, backend: str) -> None:
        """With ``nccl`` this process needs a GPU that no rank of the server uses.

        Raises:
            ConfigError: it has none.
        """
        if backend == "nccl" and not torch.cuda.is_available():
            raise ConfigError(
                f"weights can't go to {http.url} by nccl, because this process sees no GPU; use "
                f"#weights=gloo, which also reaches a server's GPUs, or start the adapter where "
                f"one is free"
            )
        self._http = http
        self._size = 1 + ranks
        self._backend = backend
        self._group_numbers = itertools.count()
        self._group = ""
        self._process_group: BroadcastGroup | None = None

    async def send(self, bucket: Bucket, fields: dict[str, Any]) -> None:
        """Broadcast the tensors while a request announces them; it ends once they are loaded."""
        if self._process_group is None:
            self._process_group = await self._join()
        body = fields | {
            "names": [name for name, _ in bucket],
            "dtypes": [str(tensor.dtype).removeprefix("torch.") for _, tensor in bucket],
            "shapes": [list(tensor.shape) for _, tensor in bucket],
            "group_name": self._group,
        }
        path = "/update_weights_from_distributed"
        call = asyncio.create_task(
            self._http.call("POST", path, body, timeout_s=BUCKET_TIMEOUT_S), name=path
        )
        broadcast = asyncio.create_task(
            asyncio.to_thread(_broadcast, self._process_group, bucket), name="broadcast"
        )
        await self._await_both(call, broadcast)

    async def _join(self) -> BroadcastGroup:
        """Make a new group, whose name must differ from that of a failed one."""
        parts = urlsplit(self._http.url)
        host = parts.hostname or ""
        url_host = f"[{host}]" if ":" in host else host
        own_host = listening_host(local_address_towards(f"tcp://{url_host}:{parts.port or 80}"))
        family = socket.AF_INET6 if ":" in own_host else socket.AF_INET
        with socket.create_server((own_host, 0), family=family) as listener:
            port = listener.getsockname()[1]
            store = await asyncio.to_thread(open_store, own_host, port, listen_fd=listener.detach())
        self._group = f"tidegate-{port}-{next(self._group_numbers)}"
        body = {
            "master_address": own_host,
            "master_port": port,
            "rank_offset": 1,
            "world_size": self._size,
            "group_name": self._group,
            "backend": self._backend,
        }
        call = asyncio.create_task(
            self._http.call("POST", "/init_weights_update_group", body, timeout_s=GROUP_TIMEOUT_S)
        )
        join = asyncio.create_task(
            asyncio.to_thread(
                join_custom_group,
                store,
                self._group,
                backend=self._backend,
                rank=0,
                world_size=self._size,
                own_host=own_host,
            )
        )
        await self._await_both(call, join)
        return join.result()

    async def _await_both(self, call: "asyncio.Task[Any]", work: "asyncio.Task[Any]") -> None:
        """Await both. If one fails, abort the other, which would otherwise wait for long."""
        try:
            await asyncio.wait({call, work}, return_when=asyncio.FIRST_EXCEPTION)
            if work.done() and (error := work.exception()) is not None:
                raise EngineGone(
                    f"sending weights to {self._http.url} by {self._backend} failed: {error}"
                )
            await call
            await work
        except BaseException:
            call.cancel()
            await self.close()
            await asyncio.wait({call, work}, timeout=LEAVE_TIMEOUT_S)
            work.add_done_callback(lambda late: late.cancelled() or late.exception())
            raise

    async def close(self) -> None:
        """Destroy the group in the server, which also wakes threads blocked at this end."""
        if self._group:
            with suppress(HttpStatusError, EngineGone):
                body, path = {"group_name": self._group}, "/destroy_weights_update_group"
                await self._http.call("POST", path, body, timeout_s=LEAVE_TIMEOUT_S)
            self._group = ""
        if self._process_group is not None:
            self._process_group.leave()
            self._process_group = None


def _broadcast(group: BroadcastGroup, bucket: Bucket) -> None:
    for _, tensor in bucket:
        group.broadcast(tensor.detach().contiguous().to(group.device))
