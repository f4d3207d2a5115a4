"""Settings of a run: frozen records by component, and the flat names that users pass.

``serve()``, ``tidegate run`` and the simulation call :func:`run_settings`, which checks every value
before any process starts. A component takes the record that it reads, not all settings.
``options.py``, the keywords of ``serve()`` for type checkers, is generated from the records.

Each field belongs to one record and keeps its name in the flat form: ``pause_mode="abort"`` is
``weights=WeightSettings(pause_mode="abort")``, and in TOML ``[run.weights] pause_mode = "abort"``.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    InstanceOf,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from tidegate.errors import ConfigError
from tidegate.orchestrator.core.placement import PlacementRules
from tidegate.orchestrator.core.rules import Rules
from tidegate.orchestrator.settings.hub import find_model
from tidegate.orchestrator.settings.suggestions import did_you_mean, worded
from tidegate.policies.asynchrony import BoundedStaleness, DeadlinePolicy
from tidegate.policies.consumption import Window
from tidegate.policies.elasticity import Elastic
from tidegate.policies.failures import FailurePolicy
from tidegate.policies.filters import DynamicSampling, GroupFilter
from tidegate.policies.migration import MigrationPolicy
from tidegate.policies.routing import LeastLoaded, RoutingPolicy
from tidegate.policies.speeds import EngineSpeeds
from tidegate.policies.staleness import StalenessPolicy
from tidegate.transport.addresses import check_listener, is_on_this_host
from tidegate.transport.attachments import SWITCHES
from tidegate.transport.messages import KvPolicy, PauseMode
from tidegate.transport.security import (
    ENGINE_DEFAULT,
    read_engine_keys,
    read_orchestrator_keys,
)
from tidegate.transport.server_keys import refuse_secrets
from tidegate.transport.weight_channels import (
    CHANNELS,
    DEFAULT,
    DEFAULT_ACROSS_HOSTS,
    WeightChannel,
    WeightChannelName,
    weight_channel,
)

_ENGINE_URL = re.compile(r"[a-z][a-z0-9_-]*\+\S+")

Seconds = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1)]

Cluster = Literal["ray"]
Dtype = Literal["auto", "float32", "bfloat16"]
Order = Literal["admission", "completion"]
Quantization = Literal["int8", "fp8"]
WeightDeltas = bool | Literal["elements"]

ENGINE_THREADS_MAX = 16
"""torch threads of one engine process unless set: a decode step reads the weights, so memory
bandwidth limits it before more threads help."""


CPU = "cpu"

SET_BY_POLICY = frozenset(
    {
        "max_staleness",
        "groups_per_batch",
        "outstanding_groups_limit",
        "consumption_order",
        "deadline_policy",
        "just_in_time_after_versions",
        "max_uses",
    }
)
"""Settings that ``staleness_policy`` replaces: fields of the default, :class:`BoundedStaleness`."""


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0))


class SettingsRecord(BaseModel):
    """Base of a component's settings. Immutable; refuses unknown names."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class StalenessSettings(SettingsRecord):
    """Groups and batches, and how old their tokens may get before training."""

    max_staleness: Annotated[int, Field(ge=0)] = 2
    """Staleness bound η, in weight versions: a token that the trainer trains on was sampled by
    weights at most this many versions older than the trainer's. 0 is synchronous on-policy
    training. The default is the largest bound tried at which learning did not need corrections
    (docs/learning.md). Raise or lower it as ``forecast.changes`` says; lower it if the trainer's
    ``mismatch_kl`` grows."""
    group_size: Count = 8
    """Number of rollouts per task, whose rewards are compared for the advantages (GRPO). Raise it
    if most groups' rewards are all equal, which gives no gradient; each rollout costs one
    generation."""
    groups_per_batch: Count = 8
    """Number of groups in a training batch, which then has ``group_size * groups_per_batch``
    rollouts. Raise it for steadier gradients, or if a publish takes long beside a train step."""
    outstanding_groups_limit: Count | None = None
    """Largest number of groups that are started and not yet trained on, >= ``groups_per_batch``.
    None: ``(max_staleness + 1) * groups_per_batch``, the most that the bound allows. Lower it if
    environments or memory can't hold that many episodes; engines may idle
    (``engine_idle_share``)."""
    consumption_order: Order | InstanceOf[Window] = "admission"
    """Order in which ended groups form batches: ``admission`` in the order of their tasks, so that
    a slow group delays its batch; ``completion`` in the order of their ends; or a ``Window``
    between the two. The default keeps the bound without masks or drops. Choose ``completion`` if
    ``trainer_idle_share`` and ``mean_straggler_wait_s`` are high."""
    deadline_policy: DeadlinePolicy = "wait"
    """What happens to an unfinished group whose oldest tokens reach the staleness bound: ``wait``
    holds the batch until the group ends, ``mask`` masks the old tokens, ``split`` trains on the
    finished rollouts first, and ``drop`` discards the group. The default loses no token. With
    ``consumption_order="completion"``, ``split`` costs the least time, and ``drop`` biases towards
    short answers (``length_bias``)."""
    just_in_time_after_versions: Count | None = 8
    """Number of versions without a wait of the trainer after which groups start as late as they can
    without the trainer waiting for them, so that tokens are no older than they must be; after a
    wait, groups start as early as the bound allows again. Raise it if rare long groups make the
    trainer wait. None: always as early as the bound allows."""
    max_uses: Count = 1
    """Number of times that a group may be trained on, each time within ``max_staleness``. With more
    than 1, a trainer that would wait for rollouts trains on used groups again, and fewer groups are
    outstanding: raise it, and ``max_staleness``, if generation limits the run
    (``trainer_idle_share``) and the loss corrects for off-policy tokens. Needs ``max_staleness >=
    max_uses - 1`` and ``deadline_policy="wait"``."""
    staleness_policy: InstanceOf[StalenessPolicy] | None = None
    """A ``StalenessPolicy`` object, for rules that the settings ``max_staleness``,
    ``groups_per_batch``, ``outstanding_groups_limit``, ``consumption_order``, ``deadline_policy``,
    ``just_in_time_after_versions`` and ``max_uses`` can't express. Those settings must then be
    omitted. None: these settings are the rules."""
    group_filter: InstanceOf[GroupFilter] = GroupFilter()
    """Decides by their rewards which groups are worth training on; others are discarded. The
    default keeps all. Use ``DynamicSampling()``, which drops groups whose rewards are all equal, if
    those are a large share of batches: they train nothing, but new groups must be generated in
    their place."""

    def make_policy(self) -> StalenessPolicy:
        """Return ``staleness_policy``, or the bounded staleness that the other settings describe.

        Raises:
            ConfigError: the policy could never fill a batch.
        """
        if self.staleness_policy is not None:
            return self.staleness_policy
        return BoundedStaleness(**{name: getattr(self, name) for name in SET_BY_POLICY})

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.make_policy()
        replaced = SET_BY_POLICY & self.model_fields_set
        if self.staleness_policy is not None and replaced:
            raise ConfigError(
                f"staleness_policy={self.staleness_policy!r} already sets the staleness rules; "
                f"omit {', '.join(sorted(replaced))}, or set them in the policy"
            )
        if self.group_size == 1 and isinstance(self.group_filter, DynamicSampling):
            raise ConfigError(
                "DynamicSampling drops groups of equal rewards, which with group_size=1 are all; "
                "raise group_size, or omit group_filter"
            )
        return self


class PlacementSettings(SettingsRecord):
    """Policies that choose an engine for each turn."""

    routing_policy: InstanceOf[RoutingPolicy] = LeastLoaded()
    """Chooses the engine that a new turn is sent to. The default is the engine with the least load.
    If ``cached_context_share`` is low, choose ``SessionAffinity`` for episodes of several turns, or
    ``PrefixAffinity`` for long prompts of single-turn groups."""
    engine_speeds: InstanceOf[EngineSpeeds] | None = None
    """Relative speeds of the engines, declared or measured, by which routing weighs their loads: an
    engine twice as fast gets twice the turns. None treats all engines as equally fast. Set it if
    engines of one run have different hardware."""
    migration_policy: InstanceOf[MigrationPolicy] | None = None
    """Chooses running turns to move to a less loaded engine, at the cost of computing their context
    again. None never moves a turn. Set it if the last turns of a batch keep one engine busy while
    others idle (``engine_idle_share``, ``forecast.tail_factor``)."""

    def rules(self) -> PlacementRules:
        """Return these policies as the core takes them."""
        return PlacementRules(
            routing_policy=self.routing_policy,
            speeds=self.engine_speeds,
            migration_policy=self.migration_policy,
        )


class SamplingSettings(SettingsRecord):
    """Default sampling parameters of turns; arguments of ``Episode.generate`` override them."""

    temperature: Annotated[float, Field(ge=0)] = 1.0
    """Sampling temperature, >= 0, by which logits are divided; 1 samples the model's distribution,
    0 takes the likeliest token (greedy). Keep 1 for training: recorded log-probs are those at this
    temperature, and the loss must use the same."""
    max_tokens: Count = 256
    """Largest number of output tokens per turn; a turn that reaches it ends with the finish reason
    ``length``. Raise it if many turns end so: their answers are cut off."""
    adapter: str = ""
    """Name of the LoRA adapter that turns are sampled with; publish the adapter before the first
    batch. Empty: the base model."""
    seed: int = 0
    """Seed of the run, from which each turn's random numbers derive. Two runs with one seed may
    still differ, even with ``deterministic``, because timing decides which weight version samples a
    token."""
    attachments: tuple[str, ...] = ()
    """Options of ``Episode.generate`` that every turn is sampled with, each of which requests a
    token attachment for the columns of batches. Set those that the loss needs: docs/losses.md says
    which it needs for a mixture of experts, and for turns sampled with top-p, top-k or min-p."""

    @field_validator("attachments")
    @classmethod
    def _check_attachments(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if unknown := [name for name in names if name not in SWITCHES]:
            raise ConfigError(
                f"attachments may name {', '.join(sorted(SWITCHES))}, got {', '.join(unknown)}"
            )
        return names


class EpisodeSettings(SettingsRecord):
    """Time limits of an episode, and what becomes of one that fails."""

    episode_timeout_s: Seconds = 600.0
    """Longest duration of an episode in seconds; a longer one is cancelled and has failed, see
    ``failure_policy``. Time while the episode is parked (waits for newer weights, see
    ``episode_park_after_s``) does not count. Raise it if ``episode_failures`` has many of the
    reason ``episode_timeout``; it should exceed the duration of the longest whole episode, all
    turns and tool calls."""
    episode_park_after_s: Seconds | None = None
    """Running time in seconds after which an episode is parked: before its next turn it waits for
    newer weights, while other episodes use the engines. The time then starts again. None parks an
    episode only when it calls ``Episode.park``. Set it for long agent episodes that would otherwise
    grow older than the bound (``staleness_from_generation``); less than ``episode_timeout_s``."""
    special_tokens_in_messages: bool = False
    """Whether the text of a special token in a message, such as ``<|im_end|>``, becomes that token.
    By default it stays text, because a user or a tool could forge turns with it. Set it if your
    messages write special tokens on purpose, such as placeholders of images."""
    failure_policy: InstanceOf[FailurePolicy] = FailurePolicy()
    """Decides what becomes of failed episodes, by cause. ``FailurePolicy(reward=0.0)`` trains on
    those that the model failed, with that reward; the default discards them. Those that
    infrastructure failed (tools, graders, engines) are retried twice, and then discarded."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        budget_s, timeout_s = self.episode_park_after_s, self.episode_timeout_s
        if budget_s is not None and budget_s >= timeout_s:
            raise ConfigError(
                f"episode_park_after_s={budget_s} parks episodes after "
                f"episode_timeout_s={timeout_s} has ended them; lower the former or raise the "
                "latter"
            )
        return self


class FleetSettings(SettingsRecord):
    """Engines that serve the run: how many, where they run, and how they connect."""

    engines: Annotated[int, Field(ge=0)] = 1
    """Number of engine processes to start on this machine; with 0, engines started elsewhere
    connect to ``listen_address``. ``forecast.changes`` says how many would gain anything, or how
    many fewer would do."""
    evaluation_engines: Annotated[int, Field(ge=0)] = 0
    """Number of engines, among all that join, that are kept for evaluations and get no turns of
    training. Evaluations then run beside training, each by one version."""
    elasticity: InstanceOf[Elastic] | None = None
    """Adds and retires engines during the run, within its limits, where that makes batches cheaper,
    and replaces lost ones; the run begins with ``engines``. None leaves the number to
    ``rollouts.scale()``. Set it if engines cost money while they idle, or may be taken away."""
    engine_urls: tuple[str, ...] = ()
    """Running inference servers to use as engines, such as ``vllm+http://127.0.0.1:8000``. The run
    starts an adapter process for each of them, and engines of its own only if ``engines`` is set
    too; see docs/vllm-engine.md."""
    stream_interval_tokens: Count = 16
    """Number of tokens that a server of ``engine_urls`` may collect of a turn before it sends them.
    A server that crashes loses up to one token fewer of each running turn, as does a turn that is
    cancelled or times out; pauses and weight updates lose none. Higher values save CPU time of the
    server. With ``kv_policy="keep"`` every token is sent at once."""
    cluster: Cluster | None = None
    """``ray`` starts the engines on the nodes of a Ray cluster, on which the model must have the
    same path; None starts them on this machine. With Ray, the run makes CURVE keys if none are
    given, and ``weight_channel`` defaults to ``relay``."""
    gpus_per_engine: Annotated[float, Field(ge=0)] = 0
    """Number of GPUs that Ray reserves for each engine, >= 0; fractions share a GPU. 0 leaves
    engines on CPUs. Only with ``cluster="ray"``."""
    placement_group: str | None = None
    """Name of a Ray placement group for the engines, one bundle each, so that they can share nodes
    with trainer ranks or environments; None makes a group for each engine."""
    listen_address: str | None = None
    """ZeroMQ address that engines connect to, such as ``tcp://*:5555``; None makes a private ipc
    socket. Set it if engines are started by hand or on other hosts, which also needs
    ``curve_key_directory``."""
    curve_key_directory: Path | None = None
    """Directory of CURVE keys, made by ``tidegate keys``. With keys, engines may connect from any
    host, and engines without a key are refused. Needed for a ``listen_address`` that other hosts
    can reach."""
    engine_start_timeout_s: Seconds = 120.0
    """Longest wait in seconds for all engines to join when the run starts (then
    ``EngineStartFailed``), and for a new engine when all are lost (then ``EngineLost``). Raise it
    for models that load slowly."""
    engine_timeout_s: Seconds = 30.0
    """Silence in seconds after which an engine counts as lost; its turns continue on other engines.
    At least twice ``heartbeat_interval_s``. Raise it if engines are reported lost that were only
    slow (loaded host, long prefill); lower it to replace hung engines sooner."""
    orchestrator_timeout_s: Seconds = 60.0
    """Silence of the run in seconds after which its engines exit. A crashed run that is resumed
    sooner finds its engines still running, so raise it above the time that a restart takes."""
    heartbeat_interval_s: Seconds = 1.0
    """Silence in seconds after which an engine, or the run, sends a heartbeat. At most half of
    ``engine_timeout_s``. Steps count as messages, so busy engines send none; there is rarely a
    reason to change it."""
    credit_steps: Count = 256
    """Largest number of step messages that an engine sends beyond the last one that the
    orchestrator acknowledged; then it stops decoding. Flow control: 256 steps of 20 ms bridge 5 s.
    Raise it if engines idle while the run's event loop is blocked (``event_loop_longest_block_s``);
    each step takes memory on the engine until it is acknowledged."""

    @property
    def engines_started(self) -> int:
        """Number of processes that the run starts and waits for: engines, and adapters of
        servers."""
        return self.engines + len(self.engine_urls)

    @model_validator(mode="before")
    @classmethod
    def _start_no_engine_beside_servers(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and values.get("engine_urls") and "engines" not in values:
            return {**values, "engines": 0}
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._check_urls()
        self._check_elasticity()
        if self.engines_started == 0 and self.listen_address is None:
            raise ConfigError(
                "engines=0 starts no engine, and without a listen_address none can connect; set "
                "one, such as 'ipc:///tmp/run' or 'tcp://127.0.0.1:5555'"
            )
        started = self.engines_started
        if self.listen_address is None and self.evaluation_engines >= max(1, started):
            raise ConfigError(
                f"evaluation_engines={self.evaluation_engines} of {started} engines leaves none "
                f"for training; start more engines, or keep fewer for evaluations"
            )
        if self.cluster is None and (self.placement_group or self.gpus_per_engine):
            raise ConfigError(
                "placement_group and gpus_per_engine are for engines that Ray places; set "
                "cluster='ray' too"
            )
        self._check_listener()
        if self.heartbeat_interval_s * 2 > self.engine_timeout_s:
            raise ConfigError(
                f"engine_timeout_s={self.engine_timeout_s} must be at least twice "
                f"heartbeat_interval_s={self.heartbeat_interval_s}, or healthy engines look lost"
            )
        return self

    def _check_urls(self) -> None:
        if self.engine_urls and self.cluster is not None:
            raise ConfigError(
                f"engine_urls are driven from this machine, and cluster={self.cluster!r} places "
                f"engines elsewhere; omit one of them"
            )
        for url in self.engine_urls:
            refuse_secrets(url)
            if not _ENGINE_URL.fullmatch(url):
                raise ConfigError(
                    f"engine_urls has {url!r}; write KIND+URL, such as 'vllm+http://127.0.0.1:8000'"
                )
        servers = {url.partition("#")[0] for url in self.engine_urls}
        if len(servers) < len(self.engine_urls):
            raise ConfigError(
                f"engine_urls names a server twice: {', '.join(self.engine_urls)}; one adapter "
                f"drives one server, and two would pause it behind each other's backs"
            )

    def _check_elasticity(self) -> None:
        if (elastic := self.elasticity) is None:
            return
        if self.engine_urls:
            raise ConfigError(
                "elasticity starts and retires engines of the run's model, and engine_urls names "
                "servers, which the run does not start; omit one of them"
            )
        if elastic.start is not None and self.cluster is not None:
            raise ConfigError(
                f"elasticity has functions that start engines, and cluster={self.cluster!r} starts "
                f"them too; omit one of them"
            )
        training = self.engines - self.evaluation_engines
        if training != elastic.clipped(training):
            raise ConfigError(
                f"engines={self.engines} begins with {training} for training, beside "
                f"evaluation_engines={self.evaluation_engines}, but elasticity allows "
                f"{elastic.engines_min} to {elastic.engines_max}; set engines within that"
            )

    def _check_listener(self) -> None:
        if self.curve_key_directory is not None:
            read_orchestrator_keys(self.curve_key_directory)
            if self.engines_started:
                read_engine_keys(self.curve_key_directory / ENGINE_DEFAULT)
        if self.listen_address is None:
            return
        makes_keys = self.cluster == "ray"
        if makes_keys and is_on_this_host(self.listen_address):
            raise ConfigError(
                f"listen_address={self.listen_address!r} can be reached from this host only, but "
                "Ray places engines on any host; omit it, or set one of this node's addresses, "
                "such as 'tcp://*:5555'"
            )
        check_listener(
            self.listen_address, has_keys=makes_keys or self.curve_key_directory is not None
        )


class EngineSettings(SettingsRecord):
    """Settings of the engines that the run starts: the options of their worker processes."""

    max_running_turns: Count = 64
    """Number of decode slots per engine: turns that it decodes in one step; further turns wait.
    Raise it if ``engines[…].waiting_turns`` stays above 0 and memory allows: throughput rises, each
    step takes longer, and the KV cache must hold more contexts."""
    adapters_max: Count = 64
    """Number of versions of LoRA adapters that an engine holds in memory, for adapters that are
    published by ``rollouts.adapter()``; beside them those being published. The least recently used
    one leaves memory first, and comes back when a turn needs it. Raise it if a run samples with
    more adapters, or more pinned versions, than this at once."""
    num_kv_blocks: Count | None = None
    """Number of KV cache blocks per engine, each of ``--block-tokens`` context tokens. None sizes
    the KV cache by the memory that is free when the engine starts. Lower it if an engine runs out
    of memory; raise it if contexts are recomputed because they were evicted
    (``cached_context_share`` low)."""
    kv_memory_share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Share of the memory free at an engine's start that weights and KV cache may take, above 0, at
    most 1; as vLLM's ``gpu_memory_utilization``, but of what is free. Engines on one device, and a
    trainer there with ``cuda_ipc``, divide it. None is 0.9 of a GPU's memory and 0.25 of a host's,
    at most 4 GiB there. Lower it if a trainer shares the GPU and runs out of memory."""
    logits_processors: tuple[str, ...] = ()
    """Names of Python modules that engines import logits processors from; each has a dict
    ``PROCESSORS``. Found in the run's working directory or in PYTHONPATH."""
    image_directories: tuple[Path, ...] = ()
    """Directories from which images of messages may be read by path, by the run and its engines.
    Anyone who writes messages, such as a client of the gateway, can show the model any image in
    them. Empty: images come as ``data:`` URLs only."""
    quantization: Quantization | None = None
    """Type that engines round the layers' matrices to; the trainer's and the published weights stay
    exact. None rounds nothing. Set it if reading weights limits decoding. Recorded log-probs are
    those of the rounded weights, so the loss must correct for the difference. The audit rounds in
    the same way."""
    tensor_parallel_size: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of processes per engine, 1 to 64, between which each layer is split, for models that
    are too large or too slow for one process. All of them swap to new weights together, or none
    does. If the model fits one process, add ``engines`` instead, which exchange nothing while they
    decode."""
    deterministic: bool | None = None
    """Makes engines batch-invariant: a turn's tokens and log-probs are the same to the last bit,
    whatever else is in the batch, and however the turn is chunked, preempted or moved, so that an
    audit repeats every bit. None does so where it costs next to nothing: in bfloat16 on CPUs
    without AMX, with one rank and no quantization. True refuses engines that can't, and costs
    some speed in float32.
    Engines give the same bits if they have the same kind of processor, C++ compiler and KV block
    size (``--block-tokens``; ``statistics().engines[…].block_tokens`` shows it)."""
    speculative_method: str | None = None
    """Source of draft tokens for speculative decoding, which changes speed only. ``lookup`` drafts
    from the turn's own context; ``rollouts`` also from earlier samples of its prompt;
    ``draft:DIRECTORY`` by a smaller model with the same vocabulary. None: no drafts. Worth its cost
    while few turns run per step; see that ``accepted_draft_tokens`` is a good part of
    ``draft_tokens``."""
    dtype: Dtype = "auto"
    """Type that engines compute in. ``auto`` is the type that the model directory is stored in, or
    float32 for a float16 directory. Set the trainer's type if log-probs of trainer and engine
    differ more than you expect. ``statistics().engines[…].dtype`` reports the type in use."""
    device: Annotated[str, Field(pattern=r"^(cpu|cuda(:\d+)?)$")] = "cpu"
    """Device that the run's engines compute on, and share if there are several: ``cpu``, ``cuda``
    or ``cuda:N``. CUDA needs a CUDA build of torch, and Triton."""
    devices: tuple[Annotated[str, Field(pattern=r"^cuda:\d+$")], ...] = ()
    """GPUs of this machine for the run's engines, such as ``["cuda:1", "cuda:2"]``, in turn; in
    place of ``device``. Unless ``engines`` is set, one engine is started on each. Leave out the
    trainer's own GPU. Numbers count what ``CUDA_VISIBLE_DEVICES`` leaves visible to the run."""
    threads_per_engine: Count | None = None
    """Number of torch threads of each engine process. None takes ``OMP_NUM_THREADS`` if it is set,
    else divides the host's cores among the engine processes and the trainer, from 1 to 16 each.
    Lower it if processes compete for cores: more threads than cores make a run many times slower.
    """
    step_time_min_s: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Shortest duration of a decode step; an engine that is faster sleeps for the rest. A small
    model on a CPU then has the step time of a large one on an accelerator, which shows how a run
    behaves when generation limits it. 0 does not slow engines."""

    @property
    def uses_gpu(self) -> bool:
        """Whether engines compute on GPUs."""
        return bool(self.devices) or self.device != CPU

    def device_of(self, index: int) -> str:
        """Return the device of the run's engine number ``index``, from 0."""
        return self.devices[index % len(self.devices)] if self.devices else self.device

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_kv_blocks is not None and self.kv_memory_share is not None:
            raise ConfigError(
                f"num_kv_blocks={self.num_kv_blocks} and kv_memory_share={self.kv_memory_share:g} "
                "both size the KV cache; omit one of them"
            )
        if self.devices and self.device != CPU:
            raise ConfigError(
                f"device={self.device!r} and devices={list(self.devices)} both choose where "
                f"engines compute; omit one of them"
            )
        if self.quantization == "fp8" and self.deterministic:
            raise ConfigError(
                "quantization='fp8' and deterministic=True can't be combined, because torch's "
                "fp8 products depend on the batch; use quantization='int8', or omit one of them"
            )
        return self


class WeightSettings(SettingsRecord):
    """How published weights reach the engines, and what an update does to running turns."""

    pause_mode: PauseMode = "keep"
    """What a weight update does to running turns: ``keep`` freezes them and continues with the new
    weights; ``abort`` ends them, and the rest is requested again; ``wait`` lets them finish first,
    which delays the update by the longest turn. Choose ``wait`` if a turn must not mix versions,
    ``abort`` for servers that can't freeze turns."""
    kv_policy: KvPolicy = "recompute"
    """What a weight update does to the KV cache of kept turns: ``recompute`` it under the new
    weights, which costs a prefill per turn, or ``keep`` it, which costs nothing and mixes versions
    in one context. Choose ``keep`` if contexts are long and ``mean_weight_swap_stall_s`` or prefill
    time is high, and watch ``mismatch_kl``."""
    engines_per_update_wave: Count | None = None
    """Number of engines that take new weights at the same time, while the others decode; None
    updates all engines at once. Set it if a simultaneous swap loads the network, or stops all
    generation, for too long."""
    weight_channel: WeightChannelName = DEFAULT
    """How weights reach the engines. ``shm``: shared memory of this host. ``cuda_ipc``: within the
    GPU that trainer and engines share. ``zmq``: ZeroMQ to each engine, on any host. ``relay``:
    ZeroMQ along a chain of hosts, each of which serves its own engines and the next host.
    ``collective``: torch.distributed, unencrypted, for trusted networks. ``disk``: safetensors
    files in the run's directory, on a file system that all hosts share."""
    weight_deltas: WeightDeltas = False
    """Sends less than a full set. False sends all. ``elements``: patches of the elements that have
    changed, in bfloat16 and float16, found by a copy of the last set on the host (1 GB/s); usually
    1 % of the bytes, for slow networks. ``True``: only the tensors that have changed, found by
    their hashes (1 GB/s); for trainers that freeze part of the model."""
    weight_checksums: bool = False
    """Whether engines check each published tensor against the trainer's CRC-32 checksum. Takes
    trainer and engine about 1 s per gigabyte each. Set it to rule out damaged transfers when
    log-probs of trainer and engine differ."""
    weight_update_timeout_s: Seconds = 120.0
    """Longest time in seconds until all engines serve a published version. Then late engines are
    removed from the run, and the publish raises ``EngineLagging``. With
    ``engines_per_update_wave``, the time of each wave. Raise it for models whose transfer and load
    take longer, and for ``pause_mode="wait"`` with long turns."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.weight_deltas and not self.channel.carries_patches:
            raise ConfigError(
                f"weight_channel={self.weight_channel!r} and weight_deltas={self.weight_deltas!r} "
                "can't be combined, because deltas are computed on the host, and these weights "
                "stay on the GPU; omit one of them"
            )
        return self

    @property
    def channel(self) -> WeightChannel:
        """What ``weight_channel`` can do."""
        return weight_channel(self.weight_channel)


class RecordSettings(SettingsRecord):
    """What a run writes to disk, shows while it runs, and keeps for a restart."""

    run_directory: Path | None = None
    """Directory for trajectories, weights, metrics and a trace, for ``tidegate report`` and
    ``audit``; None records nothing."""
    archive_weights: Annotated[str, Field(pattern=r"^(all|none|(every|last):[1-9]\d*)$")] = "all"
    """Weight versions kept in ``run_directory``: ``all``, which an audit of all tokens needs;
    ``last:N``, the newest N and what they are patches of; ``every:N``, the versions that N divides;
    or ``none``. Adapters and partial sets are kept but for ``none``. A version is a patch of what
    changed since the one before, a whole set if more than half did (as in float32), and at least
    every 32nd time. The process keeps a copy of the last one in memory."""
    dashboard_address: str | None = None
    """HOST:PORT of the dashboard and of the metrics for Prometheus. Port 0 takes a free one, which
    ``dashboard_url`` reports. If other hosts can reach the address, visitors need a token."""
    journal: bool = False
    """Whether the run keeps a journal in ``run_directory``, from which ``serve(resume=)`` continues
    after a crash. Set it for runs whose rollouts are too costly to sample again."""
    progress: bool = False
    """Whether the run shows its progress on standard error: a live table in a terminal, else one
    line per batch; and a summary when it ends. ``tidegate run`` sets it."""
    opentelemetry: bool = False
    """Whether rollouts, turns, tools and batches are OpenTelemetry spans: of the global tracer
    provider, or, if the program sets none, exported to ``OTEL_EXPORTER_OTLP_ENDPOINT``."""
    stuck_after_s: Seconds = 60.0
    """Time without progress, in seconds, after which the watchdog names an episode, turn, engine,
    publish or task iterator in the log and in ``statistics().stuck``. Nothing is ended. Raise it if
    normal tool calls or turns take longer, so that only real faults are named."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.journal and self.run_directory is None:
            raise ConfigError("journal=True writes to the run's directory; set run_directory")
        return self


class RunSettings(SettingsRecord):
    """Settings of a run: its model, and a record for each component.

    Fields of the records are accepted by their flat names, too: ``serve(pause_mode="abort")`` is
    ``serve(weights=WeightSettings(pause_mode="abort"))``.
    """

    model: Path
    """A Hugging Face directory: config.json, safetensors, tokenizer.json; or the hub id of a model
    in Hugging Face's local cache, such as ``Qwen/Qwen3-0.6B``. Its weights are v0."""
    staleness: StalenessSettings = StalenessSettings()
    """Groups, batches and the staleness bound."""
    placement: PlacementSettings = PlacementSettings()
    """Choice of an engine for each turn."""
    sampling: SamplingSettings = SamplingSettings()
    """Default sampling parameters of turns."""
    episodes: EpisodeSettings = EpisodeSettings()
    """Time limits of users' episodes."""
    fleet: FleetSettings = FleetSettings()
    """Number, place and connection of engines."""
    engine: EngineSettings = EngineSettings()
    """Options of each engine that the run starts: model computation, memory and speed."""
    weights: WeightSettings = WeightSettings()
    """Transfer of published weights, and their effect on running turns."""
    records: RecordSettings = RecordSettings()
    """Run directory, dashboard and journal."""

    @property
    def engine_processes(self) -> int:
        """Number of processes that compute a model, of the most engines that the run starts."""
        elastic = self.fleet.elasticity
        most = 0 if elastic is None else elastic.engines_max + self.fleet.evaluation_engines
        return max(most, self.fleet.engines) * self.engine.tensor_parallel_size

    def memory_sharers(self, device: str) -> int:
        """Return how many processes of the run share a device's memory, or the host's.

        The trainer counts as one, on a GPU only if it publishes there.
        """
        if device == CPU:
            return self.engine_processes + 1
        engines = [self.engine.device_of(index) for index in range(self.fleet.engines)]
        # An engine that is added to a running run may be the first one on its device.
        return max(1, engines.count(device)) + self.weights.channel.needs_gpu

    @property
    def engine_threads(self) -> int:
        """Number of torch threads of an engine process on this host."""
        if self.engine.threads_per_engine is not None:
            return self.engine.threads_per_engine
        if (threads := os.environ.get("OMP_NUM_THREADS", "")).isdecimal() and int(threads):
            return int(threads)
        if self.engine.uses_gpu:
            return 1  # the GPU computes
        # The trainer counts as one process more.
        return min(ENGINE_THREADS_MAX, max(1, cores() // (self.engine_processes + 1)))

    def rules(self) -> Rules:
        """Return the policies that the run's core decides by."""
        return Rules(
            policy=self.staleness.make_policy(),
            group_size=self.staleness.group_size,
            group_filter=self.staleness.group_filter,
            placement=self.placement.rules(),
            failure_policy=self.episodes.failure_policy,
        )

    def by_flat_name(self) -> dict[str, Any]:
        """Return every setting's value by its flat name, as reports and ``run.json`` have them."""
        of = {name: getattr(getattr(self, record), name) for name, record in RECORD_OF.items()}
        return {"model": self.model, **of}

    @field_validator("model", mode="after")
    @classmethod
    def _find_model(cls, model: Path) -> Path:
        return find_model(model)

    @model_validator(mode="before")
    @classmethod
    def _nest(cls, values: Any) -> Any:
        """Move settings that are given by flat names into their records."""
        return _nested(values) if isinstance(values, Mapping) else values

    @model_validator(mode="after")
    def _check(self) -> Self:
        channel, tensor_parallel_size = self.weights.channel, self.engine.tensor_parallel_size
        if self.engine.devices:
            self._check_devices()
        if self.fleet.engine_urls and self.engine.step_time_min_s:
            raise ConfigError(
                f"step_time_min_s={self.engine.step_time_min_s} slows engines that the run starts, "
                f"and engine_urls names servers, which it can't slow; omit one of them"
            )
        if self.engine.quantization is not None and self.weights.weight_deltas == "elements":
            raise ConfigError(
                f"quantization={self.engine.quantization!r} and weight_deltas='elements' can't be "
                "combined, because engines that round weights do not keep the elements that a "
                "patch changes; omit one of them, or set weight_deltas=True"
            )
        if tensor_parallel_size > 1 and channel.one_reader:
            raise ConfigError(
                f"weight_channel={self.weights.weight_channel!r} counts on one reader per engine, "
                f"and of tensor_parallel_size={tensor_parallel_size} ranks each reads for itself; "
                f"set weight_channel to {_channels(lambda able: not able.one_reader)}"
            )
        if channel.needs_gpu:
            self._check_gpu_channel()
        if channel.one_host:
            self._check_one_host()
        return self

    def _check_devices(self) -> None:
        devices = list(self.engine.devices)
        if self.fleet.cluster is not None:
            raise ConfigError(
                f"devices={devices} are of this machine, and cluster={self.fleet.cluster!r} places "
                f"engines itself; set gpus_per_engine in their place"
            )
        if self.fleet.engines < len(set(devices)):
            raise ConfigError(
                f"devices={devices} are more than engines={self.fleet.engines}; raise engines, or "
                f"leave it out to start one on each"
            )

    def _check_gpu_channel(self) -> None:
        name = self.weights.weight_channel
        if len(set(self.engine.devices)) > 1:
            raise ConfigError(
                f"weight_channel={name!r} is for engines on the trainer's one GPU, and devices="
                f"{list(self.engine.devices)} names several; set weight_channel to {DEFAULT!r}"
            )
        if not self.engine.uses_gpu:
            raise ConfigError(
                f"weight_channel={name!r} needs a GPU that trainer and engines share, but "
                f"device='cpu'; set device to the trainer's, such as 'cuda:0', or weight_channel "
                f"to {DEFAULT!r}"
            )

    def _check_one_host(self) -> None:
        name, address = self.weights.weight_channel, self.fleet.listen_address
        others = _channels(lambda able: not able.one_host)
        if self.fleet.cluster == "ray":
            raise ConfigError(
                f"weight_channel={name!r} reaches engines on this host only, and Ray places them "
                f"on any; leave it out, or set {others} (files need a run_directory that all hosts "
                f"share)"
            )
        if address is not None and not is_on_this_host(address):
            raise ConfigError(
                f"weight_channel={name!r} reaches engines on this host only, and listen_address="
                f"{address!r} is for others too; set weight_channel to {others} (files need a "
                f"run_directory that all hosts share)"
            )


def _channels(is_able: Callable[[WeightChannel], bool]) -> str:
    """Return the names of the channels that can do something, as an error lists them."""
    names = [repr(name) for name in CHANNELS if is_able(weight_channel(name))]
    return f"{', '.join(names[:-1])} or {names[-1]}"


RECORDS: dict[str, type[SettingsRecord]] = {
    name: field.annotation
    for name, field in RunSettings.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, SettingsRecord)
}
"""Types of the records, by their names in :class:`RunSettings`."""

RECORD_OF: dict[str, str] = {
    name: record for record in RECORDS for name in RECORDS[record].model_fields
}
"""Name of the record that each flat name belongs to."""


def run_settings(**values: object) -> RunSettings:
    """Check settings that are given as records, as mappings of their fields, or by flat names.

    Raises:
        ConfigError: a setting is unknown, given twice, out of range, or contradicts another; the
            message has its flat name.
    """
    try:
        return RunSettings.model_validate(values)
    except ValidationError as error:
        raise ConfigError("; ".join(map(_described, error.errors()))) from None


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by record; unknown names stay where they are, to be refused.

    Raises:
        ConfigError: a setting is given by its flat name and in its record.
    """
    nested: dict[str, Any] = {}
    fields: dict[str, dict[str, Any]] = {record: {} for record in RECORDS}
    for name, value in values.items():
        if name in RECORDS and isinstance(value, RECORDS[name]):
            fields[name] |= {field: getattr(value, field) for field in value.model_fields_set}
        elif name in RECORDS and isinstance(value, Mapping):
            fields[name] |= value
        elif name not in RECORD_OF:
            nested[name] = value
    for name in filter(RECORD_OF.__contains__, values):
        record = RECORD_OF[name]
        if name in fields[record]:
            raise ConfigError(f"{name} is set twice, by itself and in {record}; omit one")
        fields[record][name] = values[name]
    devices = fields["engine"].get("devices")
    if devices and isinstance(devices, Sequence):
        fields["fleet"].setdefault("engines", len(devices))
    if fields["fleet"].get("cluster") == "ray":
        fields["weights"].setdefault("weight_channel", DEFAULT_ACROSS_HOSTS)
    return {**fields, **nested}


def _described(problem: ErrorDetails) -> str:
    """Return the error message for a setting, by its flat name."""
    if problem["type"] == "value_error":
        return str(problem["ctx"]["error"])
    where = problem["loc"]
    record = str(where[0]) if where[0] in RECORDS and len(where) > 1 else ""
    message = worded(problem["msg"])
    if problem["type"] == "extra_forbidden":
        message = _unknown(str(where[-1]), record)
    if problem["type"] == "string_pattern_mismatch" and where[-1] == "device":
        message = "must be 'cpu', 'cuda' (the first GPU) or 'cuda:N'"
    name = ".".join(map(str, where[1:] if record else where))
    if problem["type"] == "path_type":
        message = "must be a path"
        if name == "model":
            message = (
                "must be a model directory or the id of a cached model, also with engine_urls, "
                "because the run itself needs the model's tokenizer"
            )
    if problem["type"] == "missing":  # then the input is all settings
        return f"{name} is missing"
    return f"{name}={problem['input']!r}: {message}"


def _unknown(name: str, record: str) -> str:
    if record and name in RECORD_OF:
        return f"no setting of {record}, but of {RECORD_OF[name]}"
    return f"no such setting; {did_you_mean(name, ('model', *RECORDS, *RECORD_OF))}"
