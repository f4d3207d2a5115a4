"""Composition root: creates runs and scorers from settings, with recorder, dashboard and cluster.

Users call these functions as ``tidegate.serve``, ``tidegate.score_server`` and so on. This is the
only module that imports both the orchestrator and the packages that observe it or place its
engines.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Unpack

from tidegate.observability.records.run_directories import RUN_FILE, next_part
from tidegate.orchestrator.episodes.tracebacks import shorten_tracebacks
from tidegate.orchestrator.fleet.launcher import EngineLauncher, LocalEngineLauncher
from tidegate.orchestrator.journal.resuming import Resume
from tidegate.orchestrator.settings.config import RunSettings, run_settings
from tidegate.orchestrator.settings.options import RunOptions
from tidegate.orchestrator.trainer.batch_metrics import OnBatch
from tidegate.orchestrator.trainer.rollouts import Rollouts, Scorer, SyncRollouts, SyncScorer
from tidegate.orchestrator.trainer.run import RunParts

if TYPE_CHECKING:
    from tidegate.serving.tinker.server import TinkerServer
    from tidegate.serving.tinker.tenants import TenantLimits
    from tidegate.serving.tinker.training import TrainingBackend
    from tidegate.serving.vllm_server import Backend, VLLMServer


SHARED_SETTINGS = (
    "device",
    "dtype",
    "deterministic",
    "max_running_turns",
    "step_time_min_s",
    "threads_per_engine",
)
"""Settings of a Tinker server's run that the runs of its other base models have, too."""


def serve(
    *, resume: Resume = None, on_batch: OnBatch | None = None, **settings: Unpack[RunOptions]
) -> Rollouts:
    """Start a run for an async trainer; :class:`~tidegate.RunSettings` lists the settings.

    A setting is given by its flat name, ``pause_mode="abort"``, or in the record of its component,
    ``weights=WeightSettings(pause_mode="abort")``.

    ``resume`` continues the run whose journal is in ``run_directory``: from a ``state_dict()`` of
    the trainer's checkpoint; or, if True, from what was acknowledged last, and from the start where
    there is no journal yet. Give the same tasks in the same order as before, and publish the
    checkpoint's weights first.

    ``on_batch`` is called with the metrics of each batch just before the trainer gets it, on the
    trainer's thread, e.g. ``lambda metrics: wandb.log(metrics)``; see docs/logging.md.

    Raises:
        ConfigError: a setting is unknown, out of range or impossible.
    """
    shorten_tracebacks()
    return Rollouts(run_settings(**settings), run_parts, resume, on_batch=on_batch)


def serve_sync(
    *, resume: Resume = None, on_batch: OnBatch | None = None, **settings: Unpack[RunOptions]
) -> SyncRollouts:
    """Start a run for a trainer that is not async; otherwise the same as :func:`serve`."""
    return SyncRollouts(serve(resume=resume, on_batch=on_batch, **settings))


def score_server(**settings: Unpack[RunOptions]) -> Scorer:
    """Serve a model for scoring: a frozen reference policy, or a classifier such as a reward model.

        async with tidegate.score_server(model=path, engines=1) as reference:
            scores = await reference.score(sequences)

    A score server is a run without episodes that stands beside the policy's run. ``settings`` are
    those of :class:`~tidegate.RunSettings`; ``model``, ``engines``, ``dtype`` and
    ``threads_per_engine`` matter most.

    Raises:
        ConfigError: a setting is unknown, out of range or impossible.
    """
    shorten_tracebacks()
    return Scorer(run_settings(**settings), run_parts)


def score_server_sync(**settings: Unpack[RunOptions]) -> SyncScorer:
    """Start a score server for code that is not async; otherwise as :func:`score_server`."""
    return SyncScorer(score_server(**settings))


def vllm_server(
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    served_model_name: str | None = None,
    api_key: str | None = None,
    weight_transfer: "Backend" = "disk",
    rejects_while_paused: bool = True,
    needs_control_token: bool = True,
    control_token: str | None = None,
    weight_directories: Sequence[Path | str] = (),
    lora_directory: Path | str | None = None,
    allowed_hosts: Sequence[str] = (),
    max_logprobs: int = 20,
    generation_config: Literal["auto", "vllm"] = "auto",
    **settings: Unpack[RunOptions],
) -> "VLLMServer":
    """Start engines behind vLLM's HTTP API, as a context manager (``with`` or ``async with``).

    The named arguments are those of :class:`~tidegate.VLLMServer`; ``settings`` are those of
    :class:`~tidegate.RunSettings`.

    Raises:
        ConfigError: a setting is out of range, a package is missing, or the address is taken.
    """
    from tidegate.serving.vllm_server import VLLMServer

    shorten_tracebacks()
    checked = run_settings(**settings)
    return VLLMServer(
        _serve_requests(checked, settings),
        host=host,
        port=port,
        served_model_name=served_model_name or _hub_id(settings["model"], checked),
        api_key=api_key,
        weight_transfer=weight_transfer,
        rejects_while_paused=rejects_while_paused,
        needs_control_token=needs_control_token,
        control_token=control_token,
        weight_directories=weight_directories,
        lora_directory=lora_directory,
        allowed_hosts=allowed_hosts,
        max_logprobs=max_logprobs,
        generation_config=generation_config,
    )


def tinker_server(
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    served_model_name: str | None = None,
    api_keys: Mapping[str, str] | None = None,
    state_directory: Path | str | None = None,
    allowed_hosts: Sequence[str] = (),
    make_backend: "Callable[[Path], TrainingBackend] | None" = None,
    limits: "TenantLimits | None" = None,
    sampling_models: Mapping[str, Path | str] | None = None,
    stable_reinforce: str | None = None,
    **settings: Unpack[RunOptions],
) -> "TinkerServer":
    """Start engines and a trainer behind the Tinker API, as a context manager.

    The named arguments are those of :class:`~tidegate.TinkerServer`; ``settings`` are those of
    :class:`~tidegate.RunSettings`. ``sampling_models`` are directories of further base models by
    their names, each with one engine, which are sampled from and not trained. With a
    ``state_directory``, a ``run_directory`` may hold the
    records of earlier servers: this one's go into its next ``part-N``.

    Raises:
        ConfigError: a setting is out of range, a package is missing, or the address is taken.
    """
    from tidegate.serving.tinker.server import TinkerServer

    shorten_tracebacks()
    checked = run_settings(**settings)
    if "kv_policy" not in checked.weights.model_fields_set:
        settings["kv_policy"] = "keep"  # what the API promises of in-flight samplers
    records = checked.records.run_directory
    if state_directory is not None and records is not None and (records / RUN_FILE).exists():
        settings["run_directory"] = next_part(records)  # a restart continues the records, too
    return TinkerServer(
        _serve_requests(checked, settings),
        host=host,
        port=port,
        served_model_name=served_model_name or _hub_id(settings["model"], checked),
        api_keys=api_keys,
        state_directory=state_directory,
        allowed_hosts=allowed_hosts,
        make_backend=make_backend,
        limits=limits,
        sampling_rollouts={
            name: _sampling_run(directory, settings)
            for name, directory in (sampling_models or {}).items()
        },
        stable_reinforce=stable_reinforce,
    )


def _sampling_run(model: Path | str, settings: RunOptions) -> Rollouts:
    """Start the run of another base model, on an engine set up as those of ``settings``."""
    own: RunOptions = {"model": model, "engines": 1}
    for name in SHARED_SETTINGS:
        if name in settings:
            own[name] = settings[name]  # type: ignore[literal-required]
    return _serve_requests(run_settings(**own), own)


def _serve_requests(checked: RunSettings, settings: RunOptions) -> Rollouts:
    """Start the run behind an HTTP server, whose requests have no time limit unless one is set."""
    from tidegate.serving.http.run_server import REQUEST_TIMEOUT_S

    if "episode_timeout_s" not in checked.episodes.model_fields_set:
        settings["episode_timeout_s"] = REQUEST_TIMEOUT_S
    return serve(**settings)


def _hub_id(model: Path | str, checked: RunSettings) -> str | None:
    """Return the hub id that ``model`` is, because its directory is named by a hash; else None."""
    return str(model) if checked.model != Path(model) else None


def run_parts(settings: RunSettings) -> RunParts:
    """Return the run's observers, and where its engines are started: on this machine or on Ray.

    Raises:
        ConfigError: the dashboard's address is taken, keys cannot be read, or Ray is missing.
    """
    from tidegate.observability.observers import Observers

    observers = Observers(settings)
    try:
        return RunParts(_launcher_of(settings), observers)
    except BaseException:
        observers.close()
        raise


def _launcher_of(settings: RunSettings) -> EngineLauncher:
    if settings.fleet.cluster == "ray":
        from tidegate.integrations.ray.on_ray import RayCluster

        return RayCluster(settings)
    return LocalEngineLauncher(settings)
