"""What can be set about a run? Checked at the door, before any process starts."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Required, TypedDict

from pydantic import BaseModel, ConfigDict, Field, InstanceOf, ValidationError

from tidegate.errors import ConfigError
from tidegate.orchestrator.core.placement import PlacementRules
from tidegate.orchestrator.core.rules import Rules
from tidegate.orchestrator.settings.nearest import did_you_mean
from tidegate.policies.asynchrony import BoundedStaleness, OnDeadline
from tidegate.policies.consumption import Window
from tidegate.policies.filters import DynamicSampling, GroupFilter
from tidegate.policies.routing import LeastLoaded, Routing
from tidegate.policies.speeds import EngineSpeeds
from tidegate.policies.staleness import StalenessPolicy
from tidegate.policies.stragglers import Stragglers
from tidegate.transport.addresses import check_listener, is_on_this_host
from tidegate.transport.messages import KvPolicy, PauseMode
from tidegate.transport.security import (
    ENGINE_DEFAULT,
    read_engine_keys,
    read_orchestrator_keys,
)
from tidegate.transport.server_keys import refuse_secrets

_ENGINE_URL = re.compile(r"[a-z][a-z0-9_-]*\+\S+")

Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]

ENGINE_THREADS_MAX = 16
"""Of one process, unless asked for: a decode step reads weights, so memory bounds it earlier."""


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


class RunSettings(BaseModel):
    """Settings of a run. Unknown names are refused."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: Path
    """A Hugging Face directory: config.json, safetensors, tokenizer.json. Its weights are v0."""
    engines: Annotated[int, Field(ge=0)] = 1
    """Engine processes to start on this machine; 0 waits for others to connect to ``address``."""
    cluster: Literal["ray"] | None = None
    """Who finds places for engines: Ray, on its nodes, where the model must be under the same path;
    None starts them on this machine. With Ray, keys are made for the run if none are given, and
    weights travel by ``relay`` unless told otherwise."""
    gpus_per_engine: Annotated[float, Field(ge=0)] = 0
    """Of Ray's, for each engine that it places."""
    placement_group: str | None = None
    """The name of one of Ray's that engines go into, bundle by bundle, where trainer ranks or
    environments are to be beside them; None gives each engine one of its own."""
    engine_urls: tuple[str, ...] = ()
    """Inference servers that already run, such as ``vllm+http://127.0.0.1:8000``: each serves the
    run as an engine, by an adapter process that the run starts. Only they do, unless ``engines``
    says how many others; see docs/engines.md."""
    max_staleness: Annotated[int, Field(ge=0)] = 2
    """η: no token older than so many versions is trained on. 0 is synchronous."""
    group_size: Count = 8
    """Rollouts per prompt."""
    groups_per_batch: Count = 8
    outstanding_groups_limit: Count | None = None
    """Fewer groups at once than ``(max_staleness + 1) * groups_per_batch``."""
    order: Literal["admission", "completion"] | InstanceOf[Window] = "admission"
    """In which groups are handed over; see :mod:`tidegate.policies.asynchrony`."""
    on_deadline: OnDeadline = "wait"
    """What becomes of a group whose tokens get too old: the batch waits for it, they are masked,
    or it is dropped."""
    policy: InstanceOf[StalenessPolicy] | None = None
    """A policy of its own, in place of the five settings above."""
    group_filter: InstanceOf[GroupFilter] = GroupFilter()
    """Which groups are worth training on, such as ``DynamicSampling()``."""
    routing: InstanceOf[Routing] = LeastLoaded()
    """Which engine gets a turn."""
    engine_speeds: InstanceOf[EngineSpeeds] | None = None
    """What engines' loads are weighed by; None takes all for equally fast."""
    stragglers: InstanceOf[Stragglers] | None = None
    """Which running turns go on elsewhere; None leaves each where it is."""

    pause_mode: PauseMode = "keep"
    """What a weight update does to running turns: ``abort``, ``keep`` or ``wait``."""
    kv_policy: KvPolicy = "recompute"
    """What it does to the KV of kept turns: ``recompute`` it under the new weights, or ``keep``."""
    update_wave: Count | None = None
    """So many engines at a time swap to new weights, while the others go on; None: all at once."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    max_tokens: Count = 256
    """Per turn, unless ``generate`` says otherwise."""
    adapter: str = ""
    """The LoRA adapter that turns are sampled with, unless ``generate`` says otherwise; publish it
    before the first batch. Empty: none."""
    seed: int = 0
    """Of the run: which random numbers the turns draw."""

    max_running_turns: Count = 64
    """Decode slots per engine."""
    num_blocks: Count | None = None
    """KV blocks per engine; None sizes the cache by the engine's memory budget."""
    processors: tuple[str, ...] = ()
    """Modules of logit processors, each with a dict ``PROCESSORS``, that engines import; from the
    directory that the run is started in, or PYTHONPATH."""
    quantize: Literal["int8", "fp8"] | None = None
    """What engines round the layers' weights to, of each version as it comes; trainer and publishes
    stay as they are. Log-probs are those sampled from, so of the rounded weights: have the loss
    correct for the difference. An audit rounds alike."""
    tensor_parallel: Annotated[int, Field(ge=1, le=64)] = 1
    """Processes per engine, among which each layer of the model is shared out: for models that are
    too large for one, or too slow. They swap to new weights together or not at all."""
    deterministic: bool = False
    """Have engines give each turn the same tokens and log-probs to the last bit, whatever else is
    in the batch, and however the turn is chunked, preempted or moved; costs some speed. The bits
    depend on the kind of processor, the compiler and the engines' ``--block-tokens``, which
    ``statistics().engines[…].block_tokens`` has, and a run's directory."""
    speculate: str | None = None
    """Have engines guess tokens and verify several in a step, which changes their speed only:
    ``lookup`` guesses from what a turn has read and written before; ``rollouts`` from earlier
    samples of its prompt, too; ``draft:DIRECTORY`` by a smaller model with the same vocabulary."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What engines compute in; ``auto``: as the model directory is stored, a float16 one in
    float32, which is exact. ``statistics().engines[…].dtype`` says what it came to."""
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    """What the engines that the run starts compute on: ``cpu``, ``cuda`` or ``cuda:1`` (which takes
    a CUDA build of torch, and Triton). They share it if there are several."""
    threads_per_engine: Count | None = None
    """torch threads of each engine process. None: ``OMP_NUM_THREADS`` where it is set, else the
    host's cores shared out among the engines' processes and the trainer, at least 1."""
    step_time_min_s: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The shortest time that an engine takes for a step: it computes the step as ever, then sleeps
    for the rest. Makes a small model on a CPU as slow as a large one on an accelerator, to see how
    a run behaves when generation limits it. 0 leaves engines as fast as they are."""
    weight_channel: Literal["shm", "cuda_ipc", "zmq", "relay", "collective", "disk"] = "shm"
    """How weights travel: shared memory; ``cuda_ipc``, on the GPU that trainer and engines share,
    ``device``, which they never leave; ZeroMQ, to engines on any host; ``relay``, the same but
    once to each host, which hands them on to its engines and the next host; ``collective``, by
    torch.distributed, for trusted networks: it does not encrypt; or safetensors files
    in the run's directory."""
    weight_deltas: bool = False
    """Of a whole set that is published, send only those tensors that have changed since one was
    sent whole, found by their hashes: for trainers that freeze some, and weights that travel far.
    It takes a thread about a second per gigabyte."""
    weight_checksums: bool = False
    """Have engines check each tensor that is published, at a second per gigabyte on either side."""
    address: str | None = None
    """Where engines connect; None is a private ipc socket."""
    keys: Path | None = None
    """What ``tidegate keys`` made: only engines with keys may connect then, from any host."""
    run_directory: Path | None = None
    """Leave trajectories, weights, metrics and a trace here; None records nothing."""
    dashboard: str | None = None
    """Show the run, and its metrics to Prometheus, under this HOST:PORT; port 0 takes a free one,
    and ``dashboard_url`` tells. Anywhere but on this host, visitors need a token."""
    journal: bool = False
    """Keep in the run's directory what it takes to go on after a crash; see ``serve(resume=)``."""
    keep_events: bool = False
    """Never let snapshots take the place of the journal's events, so that all can be replayed."""
    resume_partial_rollouts: bool = True
    """After a crash, rollouts go on from the tokens they had; False begins them again."""

    episode_timeout_s: Seconds = 600.0
    """An episode that takes longer is discarded and counted; time in which it is parked is not."""
    episode_budget_s: Seconds | None = None
    """An episode that has gone on for so long is parked before its next turn, leaves the engines to
    others and goes on under newer weights; and again after as long. None: it parks by itself only,
    see ``Episode.park``."""
    engine_start_timeout_s: Seconds = 120.0
    engine_timeout_s: Seconds = 30.0
    """An engine silent for so long is lost, and its turns go on elsewhere."""
    orchestrator_timeout_s: Seconds = 60.0
    """Engines that hear nothing for so long end: the time there is to resume a run for them."""
    heartbeat_interval_s: Seconds = 1.0
    stuck_after_s: Seconds = 60.0
    """What has not got on for so long is named in the log and in ``statistics().stuck``."""
    weights_timeout_s: Seconds = 120.0
    """How long every engine may take to serve a published version."""
    credit_steps: Count = 256
    """Step messages an engine may send ahead of the orchestrator's acknowledgement."""

    @property
    def engines_started(self) -> int:
        """Processes that the run starts, and waits for: engines, and adapters of others."""
        return self.engines + len(self.engine_urls)

    @property
    def engine_processes(self) -> int:
        """Processes that compute a model, of the engines that the run starts."""
        return self.engines * self.tensor_parallel

    @property
    def engine_threads(self) -> int:
        """torch threads of an engine process on this host."""
        if self.threads_per_engine is not None:
            return self.threads_per_engine
        if (asked := os.environ.get("OMP_NUM_THREADS", "")).isdecimal() and int(asked):
            return int(asked)
        if self.device != "cpu":
            return 1  # the GPU computes
        # The trainer counts as one process more.
        return min(ENGINE_THREADS_MAX, max(1, cores() // (self.engine_processes + 1)))

    def rules(self) -> Rules:
        """By what the run's core decides.

        Raises:
            ConfigError: as :meth:`staleness_policy`.
        """
        return Rules(
            policy=self.staleness_policy(),
            group_size=self.group_size,
            group_filter=self.group_filter,
            placement=PlacementRules(
                routing=self.routing, speeds=self.engine_speeds, stragglers=self.stragglers
            ),
        )

    def staleness_policy(self) -> StalenessPolicy:
        """The staleness policy these settings ask for.

        Raises:
            ConfigError: it could never fill a batch.
        """
        if self.policy is not None:
            return self.policy
        return BoundedStaleness(
            max_staleness=self.max_staleness,
            groups_per_batch=self.groups_per_batch,
            outstanding_groups_limit=self.outstanding_groups_limit,
            order=self.order,
            on_deadline=self.on_deadline,
        )


class RunOptions(TypedDict, total=False):
    """Keyword arguments of ``tidegate.serve``: fields of :class:`RunSettings`, for type checkers.

    A test holds the two together. ``RunSettings`` says what each means, its default and its range.
    """

    model: Required[Path | str]
    engines: int
    cluster: Literal["ray"] | None
    gpus_per_engine: float
    placement_group: str | None
    engine_urls: Sequence[str]
    max_staleness: int
    group_size: int
    groups_per_batch: int
    outstanding_groups_limit: int | None
    order: Literal["admission", "completion"] | Window
    on_deadline: OnDeadline
    policy: StalenessPolicy | None
    group_filter: GroupFilter
    routing: Routing
    engine_speeds: EngineSpeeds | None
    stragglers: Stragglers | None
    pause_mode: PauseMode
    kv_policy: KvPolicy
    update_wave: int | None
    temperature: float
    max_tokens: int
    adapter: str
    seed: int
    max_running_turns: int
    num_blocks: int | None
    processors: Sequence[str]
    quantize: Literal["int8", "fp8"] | None
    tensor_parallel: int
    deterministic: bool
    speculate: str | None
    dtype: Literal["auto", "float32", "bfloat16"]
    device: str
    threads_per_engine: int | None
    step_time_min_s: float
    weight_channel: Literal["shm", "cuda_ipc", "zmq", "relay", "collective", "disk"]
    weight_deltas: bool
    weight_checksums: bool
    address: str | None
    keys: Path | str | None
    run_directory: Path | str | None
    dashboard: str | None
    journal: bool
    keep_events: bool
    resume_partial_rollouts: bool
    episode_timeout_s: float
    episode_budget_s: float | None
    engine_start_timeout_s: float
    engine_timeout_s: float
    orchestrator_timeout_s: float
    heartbeat_interval_s: float
    stuck_after_s: float
    weights_timeout_s: float
    credit_steps: int


def run_settings(**values: object) -> RunSettings:
    """Check settings.

    Raises:
        ConfigError: one is unknown, out of range, or contradicts another; the message names it.
    """
    if values.get("cluster") == "ray":
        values = {"weight_channel": "relay", **values}
    try:
        settings = RunSettings.model_validate(values)
    except ValidationError as error:
        problems = [
            f"{'.'.join(map(str, p['loc']))}={p['input']!r}: {_say(p['type'], p['loc'], p['msg'])}"
            for p in error.errors()
        ]
        raise ConfigError("; ".join(problems)) from None
    if settings.engine_urls and "engines" not in settings.model_fields_set:
        settings = settings.model_copy(update={"engines": 0})
    _check_policy(settings)
    _check_filter(settings)
    _check_urls(settings)
    if settings.engines_started == 0 and settings.address is None:
        raise ConfigError(
            "engines=0 starts none, and without an address no other can connect; give an address, "
            "such as 'ipc:///tmp/run' or 'tcp://127.0.0.1:5555'"
        )
    if settings.quantize == "fp8" and settings.deterministic:
        raise ConfigError(
            "quantize='fp8' and deterministic=True don't go together: products of fp8 weights are "
            "torch's, whose sums depend on the batch; take quantize='int8', or leave one out"
        )
    if settings.tensor_parallel > 1 and settings.weight_channel in ("relay", "collective"):
        raise ConfigError(
            f"weight_channel={settings.weight_channel!r} counts on one reader per engine, and of "
            f"tensor_parallel={settings.tensor_parallel} ranks each reads for itself; set "
            f"weight_channel to 'shm', 'zmq' or 'disk'"
        )
    if settings.cluster is None and (settings.placement_group or settings.gpus_per_engine):
        raise ConfigError(
            "placement_group and gpus_per_engine are for engines that Ray places; set "
            "cluster='ray' too"
        )
    _check_wire(settings)
    if settings.journal and settings.run_directory is None:
        raise ConfigError("journal=True keeps it in the run's directory; give a run_directory")
    budget_s, timeout_s = settings.episode_budget_s, settings.episode_timeout_s
    if budget_s is not None and budget_s >= timeout_s:
        raise ConfigError(
            f"episode_budget_s={budget_s} parks episodes that take so long, and episode_timeout_s="
            f"{timeout_s} ends them before; lower the one or raise the other"
        )
    if settings.heartbeat_interval_s * 2 > settings.engine_timeout_s:
        raise ConfigError(
            f"engine_timeout_s={settings.engine_timeout_s} must be at least twice "
            f"heartbeat_interval_s={settings.heartbeat_interval_s}, or healthy engines look lost"
        )
    return settings


def _check_policy(settings: RunSettings) -> None:
    settings.staleness_policy()
    others = {"max_staleness", "groups_per_batch", "outstanding_groups_limit", "order"}
    others = (others | {"on_deadline"}) & settings.model_fields_set
    if settings.policy is not None and others:
        raise ConfigError(
            f"policy={settings.policy!r} says all about staleness; leave out "
            f"{', '.join(sorted(others))}, or give the policy what they say"
        )


def _check_urls(settings: RunSettings) -> None:
    if settings.engine_urls and settings.step_time_min_s:
        raise ConfigError(
            f"step_time_min_s={settings.step_time_min_s} slows engines that the run starts, and "
            f"engine_urls names servers, which it can't slow; leave out one of them"
        )
    if settings.engine_urls and settings.cluster is not None:
        raise ConfigError(
            f"engine_urls are driven from this machine, and cluster={settings.cluster!r} places "
            f"engines elsewhere; leave out one of them"
        )
    for url in settings.engine_urls:
        refuse_secrets(url)
        if not _ENGINE_URL.fullmatch(url):
            raise ConfigError(
                f"engine_urls has {url!r}; write KIND+URL, such as 'vllm+http://127.0.0.1:8000'"
            )
    servers = {url.partition("#")[0] for url in settings.engine_urls}
    if len(servers) < len(settings.engine_urls):
        raise ConfigError(
            f"engine_urls names a server twice: {', '.join(settings.engine_urls)}; one adapter "
            f"drives one server, and two would pause it behind each other's backs"
        )


def _check_filter(settings: RunSettings) -> None:
    if settings.group_size == 1 and isinstance(settings.group_filter, DynamicSampling):
        raise ConfigError(
            "DynamicSampling drops groups of equal rewards, which with group_size=1 are all; "
            "raise group_size, or leave out group_filter"
        )


def _check_wire(settings: RunSettings) -> None:
    if settings.weight_channel == "cuda_ipc":
        _check_gpu_channel(settings)
    if settings.keys is not None:
        read_orchestrator_keys(settings.keys)
        if settings.engines_started:
            read_engine_keys(settings.keys / ENGINE_DEFAULT)
    if settings.cluster == "ray":
        _check_cluster(settings)
    if settings.address is None:
        return
    makes_keys = settings.cluster == "ray"
    check_listener(settings.address, has_keys=makes_keys or settings.keys is not None)
    if settings.weight_channel == "shm" and not is_on_this_host(settings.address):
        raise ConfigError(
            f"weight_channel='shm' reaches engines on this host only, and address="
            f"{settings.address!r} is for others too; set weight_channel='zmq', or 'disk' with a "
            f"run_directory that all hosts share"
        )


def _check_gpu_channel(settings: RunSettings) -> None:
    if settings.device == "cpu":
        raise ConfigError(
            "weight_channel='cuda_ipc' leaves weights on a GPU that trainer and engines share, and "
            "device='cpu'; set device to the trainer's, such as 'cuda:0', or weight_channel to "
            "'shm'"
        )
    if settings.cluster == "ray" or not is_on_this_host(settings.address or "ipc:"):
        raise ConfigError(
            "weight_channel='cuda_ipc' reaches engines on this host's GPU only, and cluster="
            f"{settings.cluster!r}, address={settings.address!r} are for others too; set "
            "weight_channel to 'relay', or leave these out"
        )
    if settings.weight_deltas:
        raise ConfigError(
            "weight_channel='cuda_ipc' and weight_deltas=True don't go together: what has changed "
            "is found on the host, which these weights don't come through; leave one out"
        )
    if settings.tensor_parallel > 1:
        raise ConfigError(
            f"weight_channel='cuda_ipc' is for engines of one process on one GPU, and "
            f"tensor_parallel={settings.tensor_parallel} has several; set weight_channel to 'shm'"
        )


def _check_cluster(settings: RunSettings) -> None:
    if settings.weight_channel == "shm":
        raise ConfigError(
            "weight_channel='shm' reaches engines on this host only, and Ray places them on any; "
            "leave it out, or set 'relay', 'zmq', 'collective', or 'disk' with a run_directory "
            "that all hosts share"
        )
    if settings.address is not None and is_on_this_host(settings.address):
        raise ConfigError(
            f"address={settings.address!r} can be reached from this host only, and Ray places "
            f"engines on any; leave it out, or give one of this node's, such as 'tcp://*:5555'"
        )


def _say(kind: str, where: tuple[int | str, ...], message: str) -> str:
    if kind == "extra_forbidden":
        return f"no such setting; {did_you_mean(str(where[-1]), RunSettings.model_fields)}"
    return message
