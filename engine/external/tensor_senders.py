"""Sends weights to external engines without files: in HTTP bodies, broadcasts or CUDA IPC buffers.

**Broadcasts are not encrypted.** A request announces the tensors of each broadcast or GPU buffer.
vLLM and SGLang expect pickled tensors and handles, so this module writes pickles; it reads none.
SGLang's own unpickler accepts tensors only.
"""

import asyncio
import base64
import concurrent.futures
import ctypes
import pickle
import socket
import threading
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch

from tidegate.engine.external.http import HttpEngine, HttpStatusError
from tidegate.errors import ConfigError, EngineGone
from tidegate.transport.addresses import listening_host, local_address_towards
from tidegate.transport.messages import CudaIpcHandle
from tidegate.transport.weight_channels.collective import (
    BroadcastGroup,
    join_custom_group,
    open_store,
)
from tidegate.transport.weight_channels.cuda_memory import EVENT_BYTES, Gpu
from tidegate.transport.weight_channels.cuda_nccl import Communicator, new_unique_id, packs

PACK_BYTES = 256 * 2**20
"""Size of a buffer on vLLM's GPUs, which may exceed it by one tensor. With NCCL each worker holds
two of them beside its model."""

JOIN_TIMEOUT_S = 120.0
"""Seconds for NCCL's handshake, which takes seconds, or tens of them with many hosts."""

SEND_TIMEOUT_S = 600.0
"""Seconds for the tensors of one request: a model of a terabyte, at 2 GB/s."""

LEAVE_TIMEOUT_S = 5.0

Tensors = Mapping[str, torch.Tensor]

Result = TypeVar("Result")


class TensorSender:
    """Transfer method for the tensors of one server."""

    def __init__(self, http: HttpEngine) -> None:
        self._http = http

    async def join(self) -> None:
        """Prepare the server; called once, before the first update.

        Raises:
            HttpStatusError: the server refuses.
            NcclFailed, RuntimeError: this end fails.
            EngineGone: a rank did not join in time.
        """

    async def send(self, tensors: Tensors, fields: Mapping[str, object]) -> None:
        """Load tensors, within an update that has begun. ``fields``: more fields of
        the request.

        Raises:
            HttpStatusError, NcclFailed, RuntimeError: some of the tensors may be loaded.
        """
        raise NotImplementedError

    async def close(self) -> None:
        """Release what :meth:`join` made, here and in the server."""


class SglangInlineSender(TensorSender):
    """Sends tensors by value in HTTP bodies: works for any server, with its API key."""

    def __init__(self, http: HttpEngine, ranks: int) -> None:
        super().__init__(http)
        self._ranks = ranks

    async def send(self, tensors: Tensors, fields: Mapping[str, object]) -> None:
        """Send all tensors to each rank, which takes its part."""
        # As SGLang's MultiprocessingSerializer encodes them, with the bytes in place of a handle.
        # Cloned, because torch pickles the whole storage of a view.
        payload = await asyncio.to_thread(
            lambda: _pickle([(name, t.detach().clone()) for name, t in tensors.items()])
        )
        body = {**fields, "serialized_named_tensors": [payload] * self._ranks}
        path = "/update_weights_from_tensor"
        await self._http.call("POST", path, body, timeout_s=SEND_TIMEOUT_S)


class BroadcastSender(TensorSender):
    """Broadcasts from this process, as rank 0, to the server's workers. **Not encrypted.**"""

    group: str
    """The group's backend with its article, for messages."""

    async def _call_beside(
        self, path: str, body: object, timeout_s: float, work: Callable[[], Result]
    ) -> Result:
        """Make a request while ``work`` runs in a thread; return the result of ``work``.

        If one fails, abort the other, which would otherwise wait for long or for ever.

        Raises:
            RuntimeError: the server reported success, and ``work`` still waits for it.
        """
        call = self._http.call("POST", path, body, timeout_s=timeout_s)
        request = asyncio.create_task(call, name=path)
        thread = in_daemon(work)
        for future in (request, thread):
            future.add_done_callback(_retrieve_exception)
        try:
            await asyncio.wait({request, thread}, return_when=asyncio.FIRST_COMPLETED)
            if not request.done() and thread.exception() is not None:
                await asyncio.wait({request}, timeout=LEAVE_TIMEOUT_S)  # it may have the reason
                if not request.done():
                    thread.result()
            await request
            # The server has received everything, so this end completes at once.
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                return await thread
        except BaseException as error:
            request.cancel()
            thread.cancel()  # nobody waits for it any more
            await self.close()
            await asyncio.wait({request})
            if not isinstance(error, TimeoutError):
                raise
            raise RuntimeError(
                f"{self._http.url} reported success of {self.group} weight update without taking "
                "part in the broadcast; does another client update its weights?"
            ) from None


class VllmNcclSender(BroadcastSender):
    """Rank 0 of a communicator with vLLM's workers, as in vLLM's own weight transfer."""

    group = "an NCCL"

    def __init__(
        self,
        http: HttpEngine,
        *,
        workers: int,
        library: ctypes.CDLL,
        device: torch.device,
        is_packed: bool,
    ) -> None:
        """``workers``: number of all the server's tensor, pipeline and data parallel ranks."""
        super().__init__(http)
        self._ranks = 1 + workers
        self._library, self._device = library, device
        self._is_packed = is_packed
        self._communicator: Communicator | None = None

    async def join(self) -> None:
        """Make the communicator with the server's workers; its unique id is sent over HTTP."""
        unique_id = new_unique_id(self._library)
        info = {
            "nccl_unique_id_b64": base64.b64encode(unique_id).decode(),
            "rank_offset": 1,
            "world_size": self._ranks,
            "packed": self._is_packed,
            "packed_buffer_size_bytes": PACK_BYTES,
        }
        make = partial(
            Communicator, self._library, unique_id, rank=0, ranks=self._ranks, device=self._device
        )
        self._communicator = await self._call_beside(
            "/init_weight_transfer_engine", {"init_info": info}, JOIN_TIMEOUT_S, make
        )

    async def send(self, tensors: Tensors, fields: Mapping[str, object]) -> None:
        """Load all tensors in one request."""
        if self._communicator is None:
            raise EngineGone(
                f"{self._http.url} has left the NCCL communicator of weight updates; restart the "
                "server"
            )
        body = {**fields, "update_info": _described(tensors, "dtype_names")}
        work = partial(self._broadcast, self._communicator, tensors)
        await self._call_beside("/update_weights", body, SEND_TIMEOUT_S, work)

    def _broadcast(self, communicator: Communicator, tensors: Tensors) -> None:
        if not self._is_packed:
            for tensor in tensors.values():
                on_device = tensor.detach().contiguous().to(self._device)
                communicator.broadcast(on_device, timeout_s=SEND_TIMEOUT_S)
            return
        for pack in packs(tensors.values(), lambda tensor: tensor.nbytes, PACK_BYTES):
            packed = torch.cat([_flat_bytes(tensor).to(self._device) for tensor in pack])
            communicator.broadcast(packed, timeout_s=SEND_TIMEOUT_S)

    async def close(self) -> None:
        """Leave the communicator, and make the workers leave, which would wait in a broadcast."""
        communicator, self._communicator = self._communicator, None
        if communicator is None:
            return
        communicator.close()
        with suppress(HttpStatusError, EngineGone):
            path = "/shutdown_weight_transfer_engine"
            await self._http.call("POST", path, timeout_s=LEAVE_TIMEOUT_S)


class SglangBroadcastSender(BroadcastSender):
    """Rank 0 of a torch process group with SGLang's ranks."""

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
        super().__init__(http)
        self._size = 1 + ranks
        self._backend = backend
        self.group = f"a {backend}"
        self._group_name = ""
        self._process_group: BroadcastGroup | None = None

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
        self._group_name = f"tidegate-{port}-{uuid.uuid4().hex[:8]}"
        body = {
            "master_address": own_host,
            "master_port": port,
            "rank_offset": 1,
            "world_size": self._size,
            "group_name": self._group_name,
            "backend": self._backend,
        }
        make = partial(
            join_custom_group,
            store,
            self._group_name,
            backend=self._backend,
            rank=0,
            world_size=self._size,
            own_host=own_host,
        )
        return await self._call_beside("/init_weights_update_group", body, JOIN_TIMEOUT_S, make)

    async def send(self, tensors: Tensors, fields: Mapping[str, object]) -> None:
        """Broadcast the tensors one by one, in a new group if an update was reported as failed."""
        group = self._process_group = self._process_group or await self._join()

        def broadcast() -> None:
            for tensor in tensors.values():
                group.broadcast(tensor.detach().contiguous().to(group.device))

        body = {**fields, **_described(tensors, "dtypes"), "group_name": self._group_name}
        path = "/update_weights_from_distributed"
        await self._call_beside(path, body, SEND_TIMEOUT_S, broadcast)

    async def close(self) -> None:
        """Destroy the group in the server, which also wakes threads blocked at this end."""
        if self._group_name:
            body, self._group_name = {"group_name": self._group_name}, ""
            with suppress(HttpStatusError, EngineGone):
                path = "/destroy_weights_update_group"
                await self._http.call("POST", path, body, timeout_s=LEAVE_TIMEOUT_S)
        if self._process_group is not None:
            self._process_group.leave()
            self._process_group = None


class VllmIpcSender(TensorSender):
    """Packs tensors into a buffer on the GPU of vLLM's only worker, which opens it."""

    def __init__(self, http: HttpEngine, *, workers: int, gpu: Gpu) -> None:
        """``gpu`` is the worker's own GPU.

        Raises:
            ConfigError: the server has several workers.
        """
        if workers != 1:
            raise ConfigError(
                f"weights go by ipc to one worker on one GPU, and {http.url} has {workers}: start "
                f"servers of one worker each, or use #weights=nccl, or files"
            )
        super().__init__(http)
        self._gpu = gpu

    async def join(self) -> None:
        """Announce the transfer method to the server."""
        body = {"init_info": {"packed": True}}
        path = "/init_weight_transfer_engine"
        await self._http.call("POST", path, body, timeout_s=JOIN_TIMEOUT_S)

    async def send(self, tensors: Tensors, fields: Mapping[str, object]) -> None:
        """Load the tensors, one buffer per request, which vLLM loads before it answers."""
        all_packs = list(packs(tensors.items(), lambda named: named[1].nbytes, PACK_BYTES))
        buffer = self._gpu.allocate(max(sum(t.nbytes for _, t in pack) for pack in all_packs))
        memory = self._gpu.share(buffer)
        try:
            # The pickle has plain values, as vLLM's own trainers send it.
            handles = _pickle({memory.gpu: _rebuild_arguments(memory)})
            for pack in map(dict, all_packs):
                await asyncio.to_thread(self._fill, buffer, pack)
                info = _described(pack, "dtype_names") | {
                    "tensor_sizes": [tensor.nbytes for tensor in pack.values()],
                    "ipc_handles_pickled": handles,
                }
                body = {**fields, "update_info": info}
                await self._http.call("POST", "/update_weights", body, timeout_s=SEND_TIMEOUT_S)
        except BaseException:
            self._gpu.unshare(memory)  # on success vLLM drops its reference itself
            raise

    def _fill(self, buffer: torch.Tensor, pack: Tensors) -> None:
        start = 0
        for flat in map(_flat_bytes, pack.values()):
            buffer[start : start + flat.numel()].copy_(flat)
            start += flat.numel()
        self._gpu.settle()


def _described(tensors: Tensors, dtypes: str) -> dict[str, Any]:
    """Return the fields that announce tensors; ``dtypes`` is the server's name of one of them."""
    return {
        "names": list(tensors),
        dtypes: [str(tensor.dtype).removeprefix("torch.") for tensor in tensors.values()],
        "shapes": [list(tensor.shape) for tensor in tensors.values()],
    }


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _pickle(value: object) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def _rebuild_arguments(memory: CudaIpcHandle) -> tuple[object, ...]:
    """Return the arguments of torch's ``rebuild_cuda_tensor`` for the buffer as bytes.

    Source: torch 2.13, torch/multiprocessing/reductions.py. No event is needed, because the buffer
    is complete before the message is sent.
    """
    return (
        torch.Tensor,
        torch.Size([memory.nbytes]),
        (1,),
        0,
        torch.storage.TypedStorage,
        torch.uint8,
        0,  # device index, which the reader replaces by its own
        memory.handle,
        memory.nbytes,
        memory.offset,
        False,
        memory.ref_counter_handle,
        memory.ref_counter_offset,
        bytes(EVENT_BYTES),
        False,
    )


def _retrieve_exception(done: "asyncio.Future[Any]") -> None:
    """Retrieve the exception, so that asyncio does not warn when both ends fail and one error is
    reported."""
    if not done.cancelled():
        done.exception()


def in_daemon(work: Callable[[], Result]) -> "asyncio.Future[Result]":
    """Run ``work`` in a daemon thread, because blocking collectives cannot be interrupted."""
    outcome: concurrent.futures.Future[Result] = concurrent.futures.Future()
    outcome.set_running_or_notify_cancel()  # so that cancelling the waiter does not cancel it

    def run() -> None:
        try:
            outcome.set_result(work())
        except Exception as error:  # noqa: BLE001 - raised where the future is awaited
            outcome.set_exception(error)

    threading.Thread(target=run, name="weights", daemon=True).start()
    return asyncio.wrap_future(outcome)
