"""How does a run become a server that vLLM's clients take for vLLM? Started here, and ended.

    with tidegate.VLLMServer(model=path, engines=2, port=8000) as server:
        ...  # clients of vLLM ask server.url

The server runs on the run's own thread. It knows no paths and no bodies.
"""

import asyncio
import concurrent.futures
import contextlib
import secrets
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from tidegate.errors import ConfigError
from tidegate.orchestrator.config import RunSettings, run_settings
from tidegate.orchestrator.faces import SyncFace
from tidegate.orchestrator.gateway.gateway import KEEP_ALIVE_S
from tidegate.orchestrator.listening import listen, url_of
from tidegate.orchestrator.vllm_server.receivers import Backend, receiver

if TYPE_CHECKING:
    from tidegate.orchestrator.scheduler import Scheduler
    from tidegate.orchestrator.vllm_server.desks import Desks

REQUEST_TIMEOUT_S = 7 * 24 * 3600.0
"""vLLM has none: whoever asks goes away when it has waited long enough."""

END_TIMEOUT_S = 10.0
"""What is being answered when the server ends has so long."""


class VLLMServer(SyncFace):
    """Engines behind vLLM's HTTP API; use it in ``with``, or in ``async with``."""

    def __init__(
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        served_model_name: str | None = None,
        api_key: str | None = None,
        weight_transfer: Backend = "disk",
        rejects_while_paused: bool = True,
        **settings: Any,
    ) -> None:
        """``settings`` are those of :class:`~tidegate.RunSettings`; ``port`` 0 takes a free one.

        ``weight_transfer``: how ``/update_weights`` gets tensors, from safetensors (``disk``) or
        from the trainer's process: over TCP (``gloo``), or as vLLM's own do (``nccl``, or ``ipc``
        on one GPU; refused as the trainer asks for it where there is no CUDA).
        ``rejects_while_paused``: whether engines paused by ``abort`` or ``wait`` answer new
        requests with 503, as vLLM's from 0.33 on; else they queue.

        Whoever reaches the port may do anything with the server: only /v1 wants the ``api_key``.

        Raises:
            ConfigError: a setting is out of range, a package is missing, or the address is taken.
        """
        super().__init__(_settings(settings))
        self._receiver = receiver(weight_transfer)
        self._backend = weight_transfer
        self._model_name = served_model_name
        self._api_key = api_key
        self._rejects_while_paused = rejects_while_paused
        try:
            import starlette  # noqa: F401
            import uvicorn  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"{error.name} is missing: pip install 'tidegate[gateway]'") from None
        self._socket = listen(host, port, "the server")
        self.url = url_of(self._socket)
        """Without a slash at its end; OpenAI's clients want ``/v1`` added."""
        self._serving: concurrent.futures.Future[None] | None = None

    def __enter__(self) -> Self:
        try:
            super().__enter__()
            self._serving = self._submit(self._serve)
        except BaseException:
            self._socket.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return await asyncio.to_thread(self.__enter__)

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.close)

    def wait(self) -> None:
        """Serve until the run fails; raises what it failed of."""
        if self._serving is None:
            raise RuntimeError("the server has not been started; use it in a `with` statement")
        self._serving.result()

    def close(self) -> None:
        """End the server, and its engines. Harmless when repeated."""
        if self._serving is not None:
            self._serving.cancel()
            with contextlib.suppress(Exception, concurrent.futures.CancelledError):
                self._serving.result(END_TIMEOUT_S)
        self._receiver.close()
        self._stop()
        self._socket.close()

    # ------------------------------------------------------------ on the run's loop

    async def _serve(self, scheduler: "Scheduler") -> None:
        import uvicorn

        from tidegate.orchestrator.vllm_server.app import server_app

        config = uvicorn.Config(
            server_app(self._desks(scheduler), api_key=self._api_key),
            lifespan="off",
            ws="none",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        server = uvicorn.Server(config)
        listening = self._socket.dup()
        try:
            await server.serve(sockets=[listening])
        finally:
            for each in getattr(server, "servers", []):
                each.close()
            listening.close()

    def _desks(self, scheduler: "Scheduler") -> "Desks":
        from tidegate.orchestrator.vllm_server.completing import Completer
        from tidegate.orchestrator.vllm_server.control import ServerControl
        from tidegate.orchestrator.vllm_server.desk import RequestDesk
        from tidegate.orchestrator.vllm_server.desks import Desks
        from tidegate.orchestrator.vllm_server.model_info import read_model_info
        from tidegate.orchestrator.vllm_server.weight_desk import WeightDesk

        run, settings = self._running, self.settings
        info = read_model_info(settings.model, name=self._model_name, dtype=settings.dtype)
        requests = RequestDesk(scheduler)
        weights = WeightDesk(run, scheduler, info, self._receiver, self._published)
        return Desks(
            settings=settings,
            scheduler=scheduler,
            info=info,
            requests=requests,
            completer=Completer(scheduler, run.model, info, requests, weights.labels),
            control=ServerControl(
                scheduler, requests, rejects_while_paused=self._rejects_while_paused
            ),
            weights=weights,
            weight_backend=self._backend,
            created_s=int(time.time()),
            instance_id=secrets.token_hex(4),
        )


def _settings(settings: dict[str, Any]) -> RunSettings:
    return run_settings(**{"episode_timeout_s": REQUEST_TIMEOUT_S, **settings})
