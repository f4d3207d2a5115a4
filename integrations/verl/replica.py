"""Rollout replica of verl: a Ray actor with a Tidegate run, whose engines are its processes.

verl's ``LLMServerManager`` makes a :class:`TidegateReplica` for each trainer worker, or for each
worker of a pool of its own. Clients of verl call the actor, a :class:`TidegateServer`.
"""

import itertools
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_resource_name, get_visible_devices_keyword
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, TokenOutput

import tidegate
from tidegate.errors import ConfigError
from tidegate.integrations.verl.turns import GlobalSteps, token_output, turn_options
from tidegate.orchestrator.episodes.generated_turn import GeneratedTurn
from tidegate.orchestrator.telemetry.statistics import RunStatistics
from tidegate.serving.http.run_server import REQUEST_TIMEOUT_S
from tidegate.serving.openai.active_requests import ActiveRequests
from tidegate.serving.openai.model_info import read_model_info
from tidegate.serving.openai.requests import Prompt
from tidegate.transport.sleep_messages import MemoryTag, SleepLevel

if TYPE_CHECKING:
    import numpy as np
    from tensordict import TensorDict

    from tidegate.integrations.verl.manager import Advantages, AgentEpisodes
    from tidegate.orchestrator.scheduler.scheduler import Scheduler

SentTensor = tuple[str, tuple[int, ...], "np.ndarray[Any, Any]"]
"""Tensor as it travels through Ray's object store, which shares numpy's memory but not torch's:
torch's name of its dtype, its shape, and its bytes as uint8."""


def server_name(replica_rank: int) -> str:
    """Return the name of a replica's Ray actor."""
    return f"tidegate_server_{replica_rank}_0"


def run_options(config: RolloutConfig, model: str, replica_rank: int) -> dict[str, Any]:
    """Return the settings of a replica's run: verl's, then those of ``engine_kwargs.tidegate``."""
    return {
        "model": model,
        "dtype": config.dtype,
        "group_size": config.n,
        "temperature": config.temperature,
        "max_tokens": config.response_length,
        "seed": config.seed + replica_rank,
        "episode_timeout_s": REQUEST_TIMEOUT_S,
        **config.engine_kwargs.get("tidegate", {}),
    }


class TidegateServer:
    """Ray actor with the run of one replica. Its methods are those of verl's own server actors.

    Each ``generate`` is an evaluation rollout of the run, so the run's ledger counts its tokens
    apart from those of :class:`Manager`'s rollouts.
    """

    def __init__(
        self,
        config: RolloutConfig,
        model_config: Any,
        rollout_mode: RolloutMode,
        replica_rank: int,
        devices: str,
    ) -> None:
        """``devices`` are the accelerators of the replica's worker, for the environment variable
        that makes them visible; empty: engines run on the CPU."""
        if devices:
            os.environ[get_visible_devices_keyword()] = devices
        self._config = config
        self._mode = rollout_mode
        model = omega_conf_to_dataclass(model_config, dataclass_type=HFModelConfig).local_path
        options = {
            "device": "cuda" if devices else "cpu",
            **run_options(config, model, replica_rank),
        }
        self.run = tidegate.serve(**options)
        settings = self.run.settings
        info = read_model_info(settings.model, name=None, dtype=settings.engine.dtype)
        self._model_tensors = frozenset(info.tensors)
        self.steps = GlobalSteps()
        self._seeds = itertools.count(settings.sampling.seed << 40)
        self._received: dict[str, torch.Tensor] = {}
        """Tensors of the next version that have arrived."""
        self._is_paused = False
        self._is_rejecting = False
        """Whether requests are answered as aborted, because the replica has left verl's load
        balancer."""
        self._requests: ActiveRequests
        self._agents: AgentEpisodes | None = None

    async def launch(self) -> None:
        """Start the run and its engines.

        Raises:
            EngineStartFailed: an engine did not start.
        """
        await self.run.__aenter__()

        async def make_requests(scheduler: "Scheduler") -> ActiveRequests:
            return ActiveRequests(scheduler.handle)

        self._requests = await self.run._requests.do(make_requests)

    async def shutdown(self) -> None:
        """End the run and its engines."""
        if self._agents is not None:
            await self._agents.close()
        await self.run.__aexit__(None, None, None)

    # ------------------------------------------------------------ generating

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        audio_data: list[Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
        priority: int = 0,
    ) -> TokenOutput:
        """Continue a prompt, as verl's ``LLMServerClient`` asks for it.

        Raises:
            ConfigError: there are media, or prompt log-probs are asked for.
            TurnRefused: no engine could ever serve the request.
        """
        if image_data or video_data or audio_data:
            raise ConfigError("rollout.name=tidegate serves texts only; use vllm or sglang")
        if sampling_params.get("prompt_logprobs"):
            raise ConfigError(
                "rollout.name=tidegate returns no log-probs of prompts, which distillation needs "
                "of its teachers; give distillation.teacher_models another inference.name"
            )
        options = turn_options(self._config, len(prompt_ids), sampling_params)
        options.setdefault("seed", next(self._seeds))

        async def one_turn(scheduler: "Scheduler") -> tuple[GeneratedTurn | None, bool]:
            request = self._requests.begin(request_id, [(Prompt(list(prompt_ids)), options)])
            try:
                await request.wait()
            finally:
                request.abort()  # if the caller was cancelled
            choice = request.choices[0]
            return choice.current_turn(), choice.is_aborted

        turn, aborted = (None, True) if self._is_rejecting else await self._do(one_turn)
        return token_output(turn, sampling_params, self.steps, aborted=aborted)

    async def abort_all_requests(self, reject_request: bool = False) -> None:
        """Stop generating until :meth:`resume_generation`.

        verl calls this before it sends weights. Nothing is aborted for that: in standalone mode
        engines even continue, because weights are staged beside the live ones, and in other modes
        running turns freeze, and continue with the new weights. With ``reject_request`` the replica
        leaves verl's load balancer: running requests end as ``aborted``, with the tokens that they
        have, and so do all that arrive.
        """
        if reject_request:
            self._is_rejecting = True

            async def abort(scheduler: "Scheduler") -> None:
                self._requests.abort(None)
                await self._requests.wait_until_aborted()

            await self._do(abort)
        elif self._mode is RolloutMode.STANDALONE:
            return
        self._is_paused = True
        await self.run.pause("keep")

    async def resume_generation(self) -> None:
        """End :meth:`abort_all_requests`."""
        self._is_paused = self._is_rejecting = False
        await self.run.resume()

    async def clear_kv_cache(self) -> None:
        """Drop the prefix caches. Not needed for new weights."""
        await self.run.pause("keep", clear_cache=True)
        if not self._is_paused:
            await self.run.resume()

    # ------------------------------------------------------------ memory

    async def sleep(self) -> None:
        """Release the memory of weights and KV cache; in standalone mode, nothing."""
        if self._mode is not RolloutMode.STANDALONE:
            # A hybrid replica gets new weights before it serves again; others keep theirs.
            await self._sleep(2 if self._mode is RolloutMode.HYBRID else 1, None)

    async def release_kv_cache(self) -> None:
        """Release the memory of the KV cache; in standalone mode, nothing: turns are running."""
        if self._mode is not RolloutMode.STANDALONE:
            await self._sleep(1, ["kv_cache"])

    async def _sleep(self, level: SleepLevel, tags: list[MemoryTag] | None) -> None:
        if self._config.free_cache_engine:
            named = {} if tags is None else {"tags": tags}
            await self.run.sleep(level, mode="keep", **named)

    async def wake_up(self, tags: list[MemoryTag] | None = None) -> None:
        """Allocate the memory again that :meth:`sleep` released."""
        if self._config.free_cache_engine:
            await self.run.wake(tags)

    async def resume_kv_cache(self) -> None:
        """Allocate the memory again that :meth:`release_kv_cache` released."""
        await self.wake_up(["kv_cache"])

    # ------------------------------------------------------------ weights

    async def receive_weights(self, tensors: Mapping[str, SentTensor]) -> None:
        """Keep some tensors of the next version until :meth:`publish_weights`."""
        for name, (dtype, shape, content) in tensors.items():
            # Copied, because Ray's memory is read-only.
            raw = torch.from_numpy(content.copy())
            self._received[name] = raw.view(getattr(torch, dtype)).reshape(shape)

    async def publish_weights(self, global_steps: int | None) -> None:
        """Publish the received tensors as the weights of a global step; None: of the same step.

        Raises:
            WeightsRefused: they do not fit the model; the old ones stay live.
        """
        tensors, self._received = self._received, {}
        before = self.steps.newest
        # Set before, because the new weights sample tokens before the publish returns.
        self.steps.newest = before if global_steps is None else global_steps
        is_partial = not self._model_tensors <= tensors.keys()
        # verl trains on the batch that it has before it publishes a later step.
        is_later = global_steps not in (None, before)
        batches = self._agents.untrained if self._agents is not None and is_later else []
        try:
            version = await self.run.publish(tensors, batches=batches, partial=is_partial)
        except BaseException:
            self.steps.newest = before
            raise
        self.steps.published(version)
        if self._agents is not None:
            self._agents.published(batches)

    # ------------------------------------------------------------ agent loops, for Manager

    async def start_agents(self, config: Any, teachers: Any, reward_workers: Any) -> None:
        """Get ready for prompts of :class:`Manager`.

        Raises:
            ConfigError: verl's settings or the run's do not fit.
        """
        from tidegate.integrations.verl.manager import AgentEpisodes

        self._agents = AgentEpisodes(config, self.run, self.steps, teachers, reward_workers)

    async def submit(self, prompts: "TensorDict") -> None:
        """Take prompts of verl's data loader, and return at once."""
        assert self._agents is not None, "Manager.create() has called start_agents()"
        await self._agents.generate_sequences(prompts)

    async def failed_prompts(self) -> int:
        """Return the number of training prompts with too few rollouts for a group."""
        return 0 if self._agents is None else self._agents.failed_prompts

    async def advantages(self) -> "Advantages":
        """Return the advantages of the batch handed over last."""
        return {} if self._agents is None else self._agents.advantages

    async def statistics(self) -> RunStatistics:
        """Return a snapshot of the run."""

        async def read(scheduler: "Scheduler") -> RunStatistics:
            return self.run._statistics_of(scheduler)

        statistics: RunStatistics = await self._do(read)
        return statistics

    # ------------------------------------------------------------ profiles

    async def start_profile(self, **_: Any) -> None:
        """Do nothing: verl's profilers have no part of an engine to profile."""

    async def stop_profile(self) -> None:
        """Do nothing, as :meth:`start_profile`."""

    async def _do(self, work: "Callable[[Scheduler], Any]") -> Any:
        return await self.run._requests.do(work)


class TidegateReplica(RolloutReplica):
    """Replica of verl with one :class:`TidegateServer`, on the node and devices of its worker."""

    async def launch_servers(self) -> None:
        """Start the server actor and its engines; return once they are ready.

        Raises:
            ConfigError: the replica spans several workers, or is a reward or teacher model.
        """
        if self.world_size != 1:
            raise ConfigError(
                f"a replica of rollout.name=tidegate has one worker, and "
                f"tensor_model_parallel_size * data_parallel_size * pipeline_model_parallel_size "
                f"is {self.world_size}: set each to 1"
            )
        if self.is_reward_model or self.is_teacher_model:
            raise ConfigError(
                "rollout.name=tidegate serves the policy; give the reward model's or teacher's "
                "rollout another name, such as vllm"
            )
        (worker,) = self.workers
        node_id, devices = await worker.__ray_call__.remote(_node_and_devices)
        name = server_name(self.replica_rank)
        server = (
            ray.remote(TidegateServer)
            .options(
                name=name,
                max_concurrency=self.max_concurrency,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
                runtime_env={"env_vars": dict.fromkeys(get_platform().ray_noset_envvars(), "1")},
            )
            .remote(self.config, self.model_config, self.rollout_mode, self.replica_rank, devices)
        )
        await server.launch.remote()
        self.servers = [server]
        self._server_handle = server
        # verl expects host and port for HTTP, which is not served; it distinguishes replicas by
        # this value.
        self._server_address = name


def _node_and_devices(worker: object) -> tuple[str, str]:
    """Return the node of the calling worker, and the ids of its accelerators."""
    context = ray.get_runtime_context()
    devices = context.get_accelerator_ids().get(get_resource_name(), [])
    return context.get_node_id(), ",".join(devices)
