"""Server of the Tinker API over a run's engines: starts, serves on the run's loop, closes.

For example::

    with tidegate.tinker_server(model=path, engines=2, port=8000) as server:
        ...  # tinker.ServiceClient(base_url=server.url, api_key="tml-...")
"""

import asyncio
import contextlib
import logging
import tempfile
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tidegate.errors import ConfigError
from tidegate.orchestrator.trainer.rollouts import Rollouts, SyncRollouts
from tidegate.serving.http.listening import KEEP_ALIVE_S, is_loopback
from tidegate.serving.http.run_server import RunServer
from tidegate.serving.tinker.journal import ServerState
from tidegate.serving.tinker.tenants import TenantLimits, Tenants

if TYPE_CHECKING:
    from tidegate.orchestrator.scheduler.scheduler import Scheduler
    from tidegate.orchestrator.telemetry.recorder import Recorder
    from tidegate.serving.tinker.futures import Spawn
    from tidegate.serving.tinker.models import ModelTrainer
    from tidegate.serving.tinker.parts import TinkerParts
    from tidegate.serving.tinker.training import TrainingBackend

log = logging.getLogger("tidegate")

STABLE = "stable_reinforce"
"""Loss of the API whose formula is not published, and the default of the cookbook's recipes."""

STABLE_REINFORCE_INSTEAD = ("importance_sampling", "ppo", "cispo")
"""Losses of the same inputs, which may be computed in its place."""

SWEEP_INTERVAL_S = 15.0
"""Time between two searches for sessions and results that are over, and the longest time for which
a run's records are only in memory."""


class TinkerServer(RunServer):
    """HTTP server of the Tinker API, its trainer, and the run's engines; use it in ``with``.

    Serves on the run's own thread, from entering until :meth:`close`; ``async with`` works, too.
    """

    def __init__(
        self,
        rollouts: Rollouts,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        served_model_name: str | None = None,
        api_keys: Mapping[str, str] | None = None,
        state_directory: Path | str | None = None,
        allowed_hosts: Sequence[str] = (),
        make_backend: "Callable[[Path], TrainingBackend] | None" = None,
        limits: TenantLimits | None = None,
        sampling_rollouts: Mapping[str, Rollouts] | None = None,
        stable_reinforce: str | None = None,
    ) -> None:
        """``rollouts`` is a run that was not entered yet; ``port`` 0 takes a free one.

        ``served_model_name``: the base model's name in requests; default: its directory.
        ``api_keys``: names of tenants by their keys; without them everybody on this host is one
        tenant. ``state_directory``: where checkpoints are, and what a restarted server continues
        with; default: a temporary directory, which goes with the server. ``allowed_hosts``: names
        beside its address that requests without a key may call the server by. ``make_backend``
        makes the trainer from the model's directory; default:
        :class:`~tidegate.serving.tinker.peft_training.PeftTraining`. ``limits``: what one tenant
        may have at the same time. ``sampling_rollouts``: runs of other base models by their names,
        which are sampled from and not trained. ``stable_reinforce``: the loss that is computed for
        ``loss_fn="stable_reinforce"``, whose formula is not published; default: none.

        Raises:
            ConfigError: a setting is impossible, a package is missing, or the address is taken.
        """
        super().__init__(rollouts, host, allowed_hosts)
        self._base_model = served_model_name or reported_name(Path(self.settings.model).resolve())
        self._sampling = dict(sampling_rollouts or {})
        self._sampling_runs = contextlib.ExitStack()
        if self._base_model in self._sampling:
            raise ConfigError(
                f"{self._base_model!r} is the trained base model; name the others otherwise"
            )
        if stable_reinforce not in (None, *STABLE_REINFORCE_INSTEAD):
            raise ConfigError(
                f"stable_reinforce names the loss computed instead, one of "
                f"{', '.join(STABLE_REINFORCE_INSTEAD)}, got {stable_reinforce!r}"
            )
        self._stable_reinforce = stable_reinforce
        self._tenants = Tenants(dict(api_keys or {}))
        if not self._tenants.names and not is_loopback(host):
            raise ConfigError(
                f"host {host!r} is reachable by others, so the server needs API keys: give "
                f"api_keys, or listen on 127.0.0.1"
            )
        self._make_backend = make_backend
        self._limits = limits or TenantLimits()
        try:
            import peft  # noqa: F401
            import starlette  # noqa: F401
            import tinker  # noqa: F401
            import uvicorn  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"{error.name} is missing: pip install 'tidegate[tinker]'") from None
        self._own_state = (
            tempfile.TemporaryDirectory(prefix="tidegate-tinker-", ignore_cleanup_errors=True)
            if state_directory is None
            else None
        )
        self._directory = Path(self._own_state.name if self._own_state else state_directory or "")
        self._state = None if self._own_state else ServerState(self._directory)
        try:
            self._listen(port)
        except ConfigError:
            self._close_after_run()
            raise
        self._model_trainer: ModelTrainer | None = None

    def __enter__(self) -> Self:
        try:
            for rollouts in self._sampling.values():
                self._sampling_runs.enter_context(SyncRollouts(rollouts))
        except BaseException:
            self._socket.close()
            self._close_after_run()
            raise
        return super().__enter__()

    def _close_before_run(self) -> None:
        if self._model_trainer is not None:
            self._model_trainer.close()

    def _close_after_run(self) -> None:
        self._sampling_runs.close()
        if self._own_state is not None:
            self._own_state.cleanup()
        if self._state is not None:
            self._state.close()
            self._state = None

    # ------------------------------------------------------------ on the run's loop

    async def _serve(self, scheduler: "Scheduler") -> None:
        import tidegate.serving.tinker.listings  # noqa: F401  (registers its paths)
        from tidegate.serving.http.server import serve_app
        from tidegate.serving.tinker.app import BODY_BYTES_MAX, tinker_app
        from tidegate.serving.tinker.recovery import recover

        async with asyncio.TaskGroup() as tasks:

            def spawn(work: Coroutine[Any, Any, None], name: str) -> "asyncio.Task[None]":
                return tasks.create_task(work, name=name)

            parts = self._parts(scheduler, spawn)
            await recover(parts)
            sweeping = spawn(_sweep(parts, self._rollouts._running.recorder), "tinker-sweep")
            app = tinker_app(parts, bound_host=self._host, allowed_hosts=self._allowed_hosts)
            try:
                await serve_app(
                    app,
                    self._socket,
                    body_bytes_max=BODY_BYTES_MAX,
                    timeout_keep_alive=KEEP_ALIVE_S,
                )
            finally:
                sweeping.cancel()

    def _parts(
        self,
        scheduler: "Scheduler",
        spawn: "Spawn",
    ) -> "TinkerParts":
        from tidegate.serving.openai.active_requests import ActiveRequests
        from tidegate.serving.tinker.checkpoints import CheckpointStore
        from tidegate.serving.tinker.futures import FutureTable
        from tidegate.serving.tinker.models import ModelTrainer
        from tidegate.serving.tinker.parts import TinkerParts
        from tidegate.serving.tinker.peft_training import PeftTraining
        from tidegate.serving.tinker.samplers import EngineAdapters
        from tidegate.serving.tinker.sampling import OtherModel, SampleRunner
        from tidegate.serving.tinker.sessions import SessionTable

        run, futures = self._rollouts._running, FutureTable(spawn)
        directory = Path(self.settings.model).resolve()
        make = partial(self._make_backend or PeftTraining, directory)
        losses = {} if self._stable_reinforce is None else {STABLE: self._stable_reinforce}
        self._model_trainer = ModelTrainer(make, futures, spawn, losses)
        adapters = EngineAdapters(run, scheduler.engines.adapters)
        requests = ActiveRequests(scheduler.handle)
        return TinkerParts(
            base_model=self._base_model,
            model_directory=directory,
            fleet=scheduler.fleet,
            tenants=self._tenants,
            sessions=SessionTable(),
            futures=futures,
            trainer=self._model_trainer,
            adapters=adapters,
            checkpoints=CheckpointStore(self._directory),
            runner=SampleRunner(
                scheduler.fleet,
                scheduler.scores,
                requests,
                adapters,
                run.model.stop_token_ids,
                takes_stability=bool(losses),
            ),
            other_runners={
                name: OtherModel(each._running, takes_stability=bool(losses))
                for name, each in self._sampling.items()
            },
            limits=self._limits,
            state=self._state,
        )


def reported_name(directory: Path) -> str:
    """Return the base model's name where none was given: its directory.

    The SDK's samplers load the tokenizer by this name, after removing the last part of a name with
    exactly two slashes. A final slash keeps the path whole.
    """
    name = str(directory)
    return f"{name}/" if name.count("/") == 2 else name


async def _sweep(parts: "TinkerParts", recorder: "Recorder | None") -> None:
    """End silent sessions, forget results that were kept for long enough, and write the run's
    records to the disk, from time to time."""
    from tidegate.serving.tinker.app import end_session

    while True:
        await asyncio.sleep(SWEEP_INTERVAL_S)
        parts.futures.forget_expired()
        for session in parts.sessions.silent(asyncio.get_running_loop().time()):
            try:
                await end_session(parts, session)
            except Exception:  # of one tenant; the others' server goes on
                log.exception("session=%s is not ended whole", session.session_id)
        if recorder is not None:
            await asyncio.to_thread(recorder.sync)
