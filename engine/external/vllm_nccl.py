"""Sends weights from this process's GPU to vLLM's by NCCL broadcast. **NCCL does not encrypt.**

Used by ``VllmWeights`` for ``#weights=nccl``; follows vLLM's own weight transfer. This process is
rank 0 of a communicator, each of the server's workers another rank. The communicator's unique id is
sent over HTTP. Tensors are packed into buffers, or sent one by one. Uses torch, vLLM's NCCL
bindings or torch's, and ``http.py``.
"""

import asyncio
import base64
import ctypes
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import torch

from tidegate.engine.external.http import HttpEngine, HttpStatusError
from tidegate.errors import ConfigError, EngineGone
from tidegate.transport.weight_channels.cuda_nccl import (
    Communicator,
    NcclFailed,
    new_unique_id,
    packs,
)

PACK_BYTES = 256 * 2**20
"""Each worker holds two buffers of this size, or of its largest tensor, beside its model."""

JOIN_TIMEOUT_S = 120.0
"""Seconds for NCCL's handshake, which takes seconds, or tens of them with many hosts."""

SEND_TIMEOUT_S = 600.0
"""Seconds for all tensors: a model of a terabyte, at 2 GB/s."""

LEAVE_TIMEOUT_S = 5.0

Result = TypeVar("Result")


class VllmNcclSender:
    """Rank 0 of one server's communicator."""

    def __init__(
        self,
        http: HttpEngine,
        *,
        workers: int,
        library: ctypes.CDLL,
        device: torch.device,
        is_packed: bool,
    ) -> None:
        """``workers`` counts all of the server's: tensor, pipeline and data parallel ranks."""
        self._http = http
        self._ranks = 1 + workers
        self._library, self._device = library, device
        self._is_packed = is_packed
        self._communicator: Communicator | None = None

    async def join(self) -> None:
        """Make the communicator with the server's workers, once.

        Raises:
            Refusal: the server does not accept it.
            ConfigError: NCCL fails.
            EngineGone: a rank did not join in time.
        """
        try:
            unique_id = new_unique_id(self._library)
            info = {
                "nccl_unique_id_b64": base64.b64encode(unique_id).decode(),
                "rank_offset": 1,
                "world_size": self._ranks,
                "packed": self._is_packed,
                "packed_buffer_size_bytes": PACK_BYTES,
            }
            request = self._start_request(
                "/init_weight_transfer_engine", {"init_info": info}, JOIN_TIMEOUT_S
            )
            self._communicator = await self._await_both(
                request, partial(self._make_communicator, unique_id)
            )
        except (NcclFailed, RuntimeError) as error:  # RuntimeError: torch, without GPU memory
            raise ConfigError(f"weights can't go to {self._http.url} by nccl: {error}") from error

    def _make_communicator(self, unique_id: bytes) -> Communicator:
        return Communicator(
            self._library, unique_id, rank=0, ranks=self._ranks, device=self._device
        )

    async def send(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the tensors, all in one call, within an update that has begun.

        Raises:
            EngineGone: it is unknown how many were loaded.
        """
        communicator = self._communicator
        if communicator is None:
            raise EngineGone(
                f"{self._http.url} has left the NCCL communicator of weight updates; restart the "
                "server"
            )
        info = {
            "names": list(tensors),
            "dtype_names": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
        }
        request = self._start_request("/update_weights", {"update_info": info}, SEND_TIMEOUT_S)
        try:
            await self._await_both(request, partial(self._broadcast, communicator, tensors))
        except (HttpStatusError, NcclFailed, RuntimeError) as error:
            raise EngineGone(
                f"vLLM may have loaded only some of the weights: {error}; its weights are unknown"
            ) from error

    def _broadcast(self, communicator: Communicator, tensors: Mapping[str, torch.Tensor]) -> None:
        if not self._is_packed:
            for tensor in tensors.values():
                on_device = tensor.detach().contiguous().to(self._device)
                communicator.broadcast(on_device, timeout_s=SEND_TIMEOUT_S)
            return
        for pack in packs(tensors.values(), lambda tensor: tensor.nbytes, PACK_BYTES):
            packed = torch.cat([_flat_bytes(tensor).to(self._device) for tensor in pack])
            communicator.broadcast(packed, timeout_s=SEND_TIMEOUT_S)

    def _start_request(self, path: str, body: object, timeout_s: float) -> "asyncio.Task[Any]":
        call = self._http.call("POST", path, body, timeout_s=timeout_s)
        request = asyncio.create_task(call, name=path)
        request.add_done_callback(_retrieve_exception)
        return request

    async def _await_both(self, request: "asyncio.Task[Any]", work: Callable[[], Result]) -> Result:
        """Await both. If one fails, abort the other, which would otherwise wait for long or for
        ever."""
        thread_future = in_daemon(work)
        try:
            await asyncio.wait({request, thread_future}, return_when=asyncio.FIRST_COMPLETED)
            if (
                not request.done() and thread_future.exception() is not None
            ):  # the server's error may have the reason
                await asyncio.wait({request}, timeout=LEAVE_TIMEOUT_S)
                if not request.done():
                    thread_future.result()
            await request
            # The server has received everything, so this end completes at once.
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                return await thread_future
        except TimeoutError:
            await self._abort(request)
            raise NcclFailed(
                "vLLM reported success of an NCCL weight update without taking part in the "
                "broadcast; does another client update its weights?"
            ) from None
        except BaseException:
            await self._abort(request)
            raise

    async def _abort(self, request: "asyncio.Task[Any]") -> None:
        request.cancel()
        await self.close()
        await asyncio.wait({request})

    async def close(self) -> None:
        """Leave the communicator, and make the workers leave, which would wait in a broadcast."""
        communicator, self._communicator = self._communicator, None
        if communicator is None:
            return
        communicator.close()
        with suppress(HttpStatusError, EngineGone):
            path = "/shutdown_weight_transfer_engine"
            await self._http.call("POST", path, timeout_s=LEAVE_TIMEOUT_S)


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _retrieve_exception(done: "asyncio.Future[Any]") -> None:
    """Retrieve the exception, so that asyncio does not warn when both tasks fail and
    one is reported."""
    if not done.cancelled():
        done.exception()


def in_daemon(work: Callable[[], Result]) -> "asyncio.Future[Result]":
    """Run ``work`` in a daemon thread, because NCCL's blocking calls cannot be interrupted."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()
    future.add_done_callback(_retrieve_exception)

    def set_outcome(result: Result | None, error: BaseException | None) -> None:
        if future.done():  # cancelled
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failed = None, None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - raised where the future is awaited
            failed = error
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(set_outcome, result, failed)

    threading.Thread(target=run, name="nccl", daemon=True).start()
    return future
