"""Sends weights from this process's GPU to vLLM's by NCCL broadcast. **NCCL does not encrypt.**

Used by ``VllmWeights`` for ``#weights=nccl``; follows vLLM's own weight transfer. This process is
rank 0 of a communicator, each of the server's workers another rank. The communicator's unique id is
sent over HTTP. Tensors are packed into buffers, or sent one by one.
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
            identity = new_unique_id(self._library)
            info = {
                "nccl_unique_id_b64": base64.b64encode(identity).decode(),
                "rank_offset": 1,
                "world_size": self._ranks,
                "packed": self._is_packed,
                "packed_buffer_size_bytes": PACK_BYTES,
            }
            asking = self._ask("/init_weight_transfer_engine", {"init_info": info}, JOIN_TIMEOUT_S)
            self._communicator = await self._both(asking, partial(self._meet, identity))
        except (NcclFailed, RuntimeError) as error:  # RuntimeError: torch, without GPU memory
            raise ConfigError(f"weights can't go to {self._http.url} by nccl: {error}") from error

    def _meet(self, identity: bytes) -> Communicator:
        return Communicator(self._library, identity, rank=0, ranks=self._ranks, device=self._device)

    async def send(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Load the tensors, all in one call, within an update that has begun.

        Raises:
            EngineGone: it is unknown how many were loaded.
        """
        communicator = self._communicator
        if communicator is None:
            raise EngineGone(f"nobody of {self._http.url} takes weights by nccl any more")
        info = {
            "names": list(tensors),
            "dtype_names": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
            "shapes": [list(tensor.shape) for tensor in tensors.values()],
        }
        asking = self._ask("/update_weights", {"update_info": info}, SEND_TIMEOUT_S)
        try:
            await self._both(asking, partial(self._broadcast, communicator, tensors))
        except (HttpStatusError, NcclFailed, RuntimeError) as error:
            raise EngineGone(
                f"vLLM may have taken some of the weights, and then not all: {error}; nobody knows "
                f"what it computes with"
            ) from error

    def _broadcast(self, communicator: Communicator, tensors: Mapping[str, torch.Tensor]) -> None:
        if not self._is_packed:
            for tensor in tensors.values():
                there = tensor.detach().contiguous().to(self._device)
                communicator.broadcast(there, patience_s=SEND_TIMEOUT_S)
            return
        for together in packs(tensors.values(), lambda tensor: tensor.nbytes, PACK_BYTES):
            packed = torch.cat([_flat_bytes(tensor).to(self._device) for tensor in together])
            communicator.broadcast(packed, patience_s=SEND_TIMEOUT_S)

    def _ask(self, path: str, body: object, timeout_s: float) -> "asyncio.Task[Any]":
        call = self._http.call("POST", path, body, timeout_s=timeout_s)
        asking = asyncio.create_task(call, name=path)
        asking.add_done_callback(_seen)
        return asking

    async def _both(self, asking: "asyncio.Task[Any]", work: Callable[[], Result]) -> Result:
        """Await both; if one fails, break off the other, which would wait for it for
        long or for ever."""
        doing = in_daemon(work)
        try:
            await asyncio.wait({asking, doing}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done() and doing.exception() is not None:  # the server may know why
                await asyncio.wait({asking}, timeout=LEAVE_TIMEOUT_S)
                if not asking.done():
                    doing.result()
            await asking
            # The server has received everything, so this end is done, too.
            async with asyncio.timeout(LEAVE_TIMEOUT_S):
                return await doing
        except TimeoutError:
            await self._break_off(asking)
            raise NcclFailed("the server says that it took part, and it didn't") from None
        except BaseException:
            await self._break_off(asking)
            raise

    async def _break_off(self, asking: "asyncio.Task[Any]") -> None:
        asking.cancel()
        await self.close()
        await asyncio.wait({asking})

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


def _seen(done: "asyncio.Future[Any]") -> None:
    """Retrieve the exception, so that asyncio does not warn when both tasks fail and
    one is reported."""
    if not done.cancelled():
        done.exception()


def in_daemon(work: Callable[[], Result]) -> "asyncio.Future[Result]":
    """Run ``work`` in a daemon thread, because NCCL's blocking calls cannot be interrupted."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()
    future.add_done_callback(_seen)

    def tell(result: Result | None, error: BaseException | None) -> None:
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
            loop.call_soon_threadsafe(tell, result, failed)

    threading.Thread(target=run, name="nccl", daemon=True).start()
    return future
