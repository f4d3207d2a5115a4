"""HTTP server over a run's engines with the APIs of vLLM, OpenAI, Anthropic and SGLang.

    with tidegate.vllm_server(model=path, engines=2, port=8000) as server:
        ...  # point clients of vLLM at server.url

Puts together the routes of ``vllm/`` and ``sglang/``, and the parts of the run that they call.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from tidegate.errors import ConfigError
from tidegate.orchestrator.trainer.rollouts import Rollouts
from tidegate.serving.control.ipc_receiver import IpcUpdateReceiver
from tidegate.serving.control.nccl_receiver import NcclUpdateReceiver
from tidegate.serving.control.receivers import (
    DiskUpdateReceiver,
    GlooUpdateReceiver,
    UpdateReceiver,
)
from tidegate.serving.control.sglang_tensors import UpdateGroups
from tidegate.serving.http.listening import KEEP_ALIVE_S
from tidegate.serving.http.run_server import RunServer
from tidegate.serving.openai.requests import TOP_LOGPROBS_MAX

if TYPE_CHECKING:
    from tidegate.orchestrator.scheduler.scheduler import Scheduler
    from tidegate.serving.control.routes import ServerParts

Backend = Literal["disk", "gloo", "nccl", "ipc"]
"""How trainers send new weights: as files, by broadcasts over TCP or NCCL, by CUDA IPC handles."""

TOKEN_CHARACTERS_MIN = 16
"""Smallest length of a control token; a shorter one could be found by trial."""


class VLLMServer(RunServer):
    """vLLM-compatible HTTP server of one run, and the run's engines; use it in ``with``.

    Serves on the run's own thread, from entering until :meth:`close`; ``async with`` works, too.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        served_model_name: str | None = None,
        api_key: str | None = None,
        weight_transfer: Backend = "disk",
        rejects_while_paused: bool = True,
        needs_control_token: bool = True,
        control_token: str | None = None,
        weight_directories: Sequence[Path | str] = (),
        lora_directory: Path | str | None = None,
        allowed_hosts: Sequence[str] = (),
        max_logprobs: int = TOP_LOGPROBS_MAX,
        generation_config: Literal["auto", "vllm"] = "auto",
    ) -> None:
        """``rollouts`` is a run that was not entered yet; ``port`` 0 takes a free one.

        ``weight_transfer``: how ``/update_weights`` receives tensors: from safetensors files
        (``disk``), or from the trainer's process over TCP (``gloo``) or by vLLM's own backends
        (``nccl``, or ``ipc`` on one GPU), whose ``init`` is refused where there is no CUDA.
        ``rejects_while_paused``: whether engines paused with ``abort`` or ``wait`` answer new
        requests with 503, as vLLM's from 0.33 on; else they queue.

        All paths but probes and metrics require the ``api_key``, if there is one. Paths that pause
        engines or change weights require ``control_token``, drawn at random by default
        (:attr:`control_token`); with ``needs_control_token=False`` the ``api_key`` opens them, too,
        or nothing is needed. Requests may name weights and adapters below the model's directory and
        ``weight_directories`` only.
        ``lora_directory``: an unknown model name that is a directory in it is loaded as an adapter;
        the 32 that were named last stay loaded. ``allowed_hosts``: names beside its address that
        requests without a key may call the server by. ``max_logprobs``: most log-probs beside each
        token. ``generation_config``: whether sampling fields that a request omits default to the
        model's generation_config.json (``auto``), or to vLLM's own values (``vllm``).

        Raises:
            ConfigError: a setting is out of range, a package is missing, or the address is taken.
        """
        super().__init__(rollouts, host, allowed_hosts)
        self._receiver = _receiver_of(weight_transfer)
        self._groups = UpdateGroups()
        self._backend = weight_transfer
        self._model_name = served_model_name
        if max_logprobs < 0:
            raise ConfigError(f"max_logprobs must be at least 0, got {max_logprobs}")
        if generation_config not in ("auto", "vllm"):
            raise ConfigError(
                f"generation_config must be 'auto' or 'vllm', got {generation_config!r}"
            )
        if control_token is not None and len(control_token) < TOKEN_CHARACTERS_MIN:
            raise ConfigError(
                f"the control token has {len(control_token)} characters and could be guessed; give "
                f"it {TOKEN_CHARACTERS_MIN} or more, or leave it out to have one drawn"
            )
        self._api_key = api_key
        self.control_token = (
            (control_token or secrets.token_urlsafe(24)) if needs_control_token else None
        )
        """Token that requests must show to pause engines or change weights; None: no token."""
        self._weight_directories = weight_directories
        self._lora_directory = None if lora_directory is None else Path(lora_directory)
        if self._lora_directory is not None and not self._lora_directory.is_dir():
            raise ConfigError(f"lora_directory must be a directory, got {self._lora_directory}")
        self._max_logprobs = max_logprobs
        self._generation_config = generation_config
        self._rejects_while_paused = rejects_while_paused
        try:
            import starlette  # noqa: F401
            import uvicorn  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"{error.name} is missing: pip install 'tidegate[gateway]'") from None
        self._listen(port)

    def _close_before_run(self) -> None:
        self._receiver.close()
        self._groups.close()

    # ------------------------------------------------------------ on the run's loop

    async def _serve(self, scheduler: "Scheduler") -> None:
        from tidegate.serving.control.routes import BODY_BYTES_MAX, Keys, server_app
        from tidegate.serving.http.server import serve_app

        app = server_app(
            self._parts(scheduler),
            Keys(self._api_key, self.control_token),
            bound_host=self._host,
            allowed_hosts=self._allowed_hosts,
        )
        await serve_app(
            app, self._socket, body_bytes_max=BODY_BYTES_MAX, timeout_keep_alive=KEEP_ALIVE_S
        )

    def _parts(self, scheduler: "Scheduler") -> "ServerParts":
        from tidegate.serving.control.pauses import EnginePauses
        from tidegate.serving.control.routes import ServerParts
        from tidegate.serving.control.weight_updates import WeightUpdates
        from tidegate.serving.openai.active_requests import ActiveRequests
        from tidegate.serving.openai.completions import Completer
        from tidegate.serving.openai.model_info import (
            read_model_info,
            read_sampling_defaults,
        )
        from tidegate.serving.sglang import app as sglang
        from tidegate.serving.vllm import app as vllm

        run, settings = self._rollouts._running, self.settings
        info = read_model_info(settings.model, name=self._model_name, dtype=settings.engine.dtype)
        requests = ActiveRequests(scheduler.handle)
        is_auto = self._generation_config == "auto"
        defaults = read_sampling_defaults(settings.model) if is_auto else {}
        directories = [settings.model, *map(Path, self._weight_directories)]
        weights = WeightUpdates(
            run,
            scheduler,
            info,
            self._receiver,
            self._rollouts._published,
            adapters_in_use=requests.adapters,
            directories=directories,
            lora_directory=self._lora_directory,
        )
        return ServerParts(
            settings=settings,
            core=scheduler.core,
            fleet=scheduler.fleet,
            info=info,
            requests=requests,
            completer=Completer(
                scheduler.fleet,
                scheduler.scores,
                run.model,
                info,
                requests,
                weights.labels,
                adapter_of=weights.adapter_of,
                max_logprobs=self._max_logprobs,
                defaults=defaults,
            ),
            pauses=EnginePauses(
                scheduler.control, requests, rejects_while_paused=self._rejects_while_paused
            ),
            weights=weights,
            groups=self._groups,
            paths=[*vllm.PATHS, *sglang.PATHS],
            weight_backend=self._backend,
            created_s=int(time.time()),
            instance_id=secrets.token_hex(4),
            longest_block_s=lambda: run.loop_watch.longest_block_s,
        )


def _receiver_of(backend: str) -> UpdateReceiver:
    """Make the receiver of a weight-transfer backend.

    Raises:
        ConfigError: there is no such backend.
    """
    kinds: dict[str, Callable[[], UpdateReceiver]] = {
        "disk": DiskUpdateReceiver,
        "gloo": GlooUpdateReceiver,
        "nccl": NcclUpdateReceiver,
        "ipc": IpcUpdateReceiver,
    }
    if backend not in kinds:
        raise ConfigError(
            f"weight_transfer must be {' or '.join(get_args(Backend))}, got {backend!r}"
        )
    return kinds[backend]()
