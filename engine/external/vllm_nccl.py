"""How do weights get from this process' GPU to those of vLLM's? By NCCL, as its own trainers send.

This process is rank 0 of a communicator; each of the server's workers is another rank. They meet by
an id that the server is told over HTTP. Tensors go packed into buffers, or one by one. It knows no
versions, no labels, and not what else an update is made of. **NCCL does not encrypt.**
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

from tidegate.engine.external.http import HttpEngine, Refusal
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
"""NCCL's own handshake takes seconds, on many hosts tens of them."""

SEND_TIMEOUT_S = 600.0
"""A model of a terabyte, at 2 GB/s."""

LEAVE_TIMEOUT_S = 5.0

Result = TypeVar("Result")


class Broadcasts:
    """The sender's end of one server's communicator."""

    def __init__(
        self,
        http: HttpEngine,
        *,
        workers: int,
        library: ctypes.CDLL,
        device: torch.device,
        is_packed: bool,
    ) -> None:
        """``workers`` are all of the server's: tensor, pipeline and data parallel ranks."""
        self._http = http
        self._ranks = 1 + workers
        self._library, self._device = library, device
        self._is_packed = is_packed
        self._communicator: Communicator | None = None

    async def join(self) -> None:
        """Meet the server's workers, once.

        Raises:
            Refusal: the server won't.
            ConfigError: NCCL won't.
            EngineGone: somebody didn't come in time.
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
        except (NcclFailed, RuntimeError) as error:  # torch's: of a GPU without room, say
            raise ConfigError(f"weights can't go to {self._http.url} by nccl: {error}") from error

    def _meet(self, identity: bytes) -> Communicator:
        return Communicator(self._library, identity, rank=0, ranks=self._ranks, device=self._device)

    async def send(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Have the workers load them, all in one call, within an update that has begun.

        Raises:
            EngineGone: nobody knows how many are there.
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
        except (Refusal, NcclFailed, RuntimeError) as error:
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
        """Do both; where one fails the other would wait for it for long, or for ever."""
        doing = in_daemon(work)
        try:
            await asyncio.wait({asking, doing}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done() and doing.exception() is not None:  # the server may know why
                await asyncio.wait({asking}, timeout=LEAVE_TIMEOUT_S)
                if not asking.done():
                    doing.result()
            await asking
            # The server has all of it, so this end has, too.
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
        """Leave, and have the workers leave, which wait in a broadcast else."""
        communicator, self._communicator = self._communicator, None
        if communicator is None:
            return
        communicator.close()
        with suppress(Refusal, EngineGone):
            path = "/shutdown_weight_transfer_engine"
            await self._http.call("POST", path, timeout_s=LEAVE_TIMEOUT_S)


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def _seen(done: "asyncio.Future[Any]") -> None:
    """Of two that fail together only one error is told."""
    if not done.cancelled():
        done.exception()


def in_daemon(work: Callable[[], Result]) -> "asyncio.Future[Result]":
    """Do it in a thread that keeps no process from ending: NCCL's calls can't be woken."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()
    future.add_done_callback(_seen)

    def tell(result: Result | None, error: BaseException | None) -> None:
        if future.done():  # nobody waits any more
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, failed = None, None
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - raised where it is waited for
            failed = error
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, result, failed)

    threading.Thread(target=run, name="nccl", daemon=True).start()
    return future
