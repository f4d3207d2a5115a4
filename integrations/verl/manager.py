"""Agent-loop manager for verl that runs verl's agent loops as episodes of a Tidegate run.

verl's ``TaskRunnerV1`` makes a :class:`Manager`, which
``rollout.agent.agent_loop_manager_class=tidegate.integrations.verl.Manager`` names. The manager
divides verl's prompts among the rollout replicas. Each replica is a Ray actor with a run of its own
and an :class:`AgentEpisodes`: one agent loop is one episode, and the run generates its turns.

Finished batches go to verl's replay buffer through TransferQueue, verl's key-value store: a row of
data for each output of an agent loop, and for each group an entry whose tag has the group's status
("running", "finished", "failure"). verl trains on the rows of finished groups.
"""

import asyncio
import contextvars
import itertools
import logging
import queue
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Self

import ray
import torch
import transfer_queue as tq
from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.trainer.ppo.core_algos import register_adv_est
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ, apply_greedy_sampling_params
from verl.workers.rollout.replica import TokenOutput

from tidegate.errors import ConfigError, EpisodeError
from tidegate.integrations.verl.turns import GlobalSteps, token_output, turn_options
from tidegate.orchestrator.batches.batches import Batch
from tidegate.orchestrator.core.groups import KEPT_ROLLOUTS_MIN
from tidegate.orchestrator.episodes.episode import Episode
from tidegate.orchestrator.telemetry.statistics import RunStatistics
from tidegate.orchestrator.trainer.rollouts import Rollouts

if TYPE_CHECKING:
    import numpy as np

log = logging.getLogger("tidegate")

_EPISODE: contextvars.ContextVar[Episode] = contextvars.ContextVar("episode")
"""Episode in which the current agent loop runs."""

Advantages = dict[tuple[str, float], float]
"""Advantage by ``(uid of the group, reward)``. Rollouts of a group that have equal rewards have
equal advantages, so no rollout id is needed."""

ESTIMATOR = "tidegate"
"""Name under which :func:`tidegate_advantages` is registered in verl, for
``algorithm.adv_estimator``."""

FAILURE_KEY = "tidegate"
"""TransferQueue key under which a failed run writes an entry whose status is the error text. verl's
replay buffer raises an error for an undefined status, and the error quotes the text. Without the
entry, verl's trainer would wait for rows without end."""


class Manager:
    """Agent-loop manager of verl over the runs of all replicas.

    Each run gets an equal share of verl's prompts, and hands over an equal share of verl's batch
    after each weight update. verl therefore trains on each batch before the next update, and on no
    token older than the run's ``max_staleness``.
    """

    current: "ClassVar[Manager | None]" = None
    """Manager made last in this process, from which :func:`tidegate_advantages` reads."""

    def __init__(self, servers: list[Any]) -> None:
        self._servers = servers
        self._dealt = [0] * len(servers)
        """Number of training prompts that each replica has been given."""
        Manager.current = self

    @classmethod
    def create(
        cls,
        config: DictConfig,
        llm_client: Any,
        teacher_client: Any = None,
        reward_loop_worker_handles: list[Any] | None = None,
    ) -> Self:
        """Start agent loops in the replicas, which verl's trainer has launched before.

        Raises:
            ConfigError: settings of verl and of the runs contradict each other.
        """
        names = ray.get(llm_client._load_balancer.get_all_servers.remote())
        check_config(config, replicas=len(names), rewards=reward_loop_worker_handles)
        servers = [ray.get_actor(name) for name in sorted(names)]
        ray.get(
            [
                server.start_agents.remote(config, teacher_client, reward_loop_worker_handles)
                for server in servers
            ]
        )
        return cls(servers)

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Submit prompts of verl's data loader to the replicas. Does not wait for rows."""
        is_validation = "validate" in prompts and bool(prompts["validate"])
        if is_validation:
            counts = shares(len(prompts), [0] * len(self._servers))
        else:
            failed = ray.get([server.failed_prompts.remote() for server in self._servers])
            supplies = [dealt - failed for dealt, failed in zip(self._dealt, failed, strict=True)]
            counts = shares(len(prompts), supplies)
            self._dealt = [dealt + count for dealt, count in zip(self._dealt, counts, strict=True)]
        ends = list(itertools.accumulate(counts))
        ray.get(
            [
                server.submit.remote(prompts[end - count : end])
                for server, count, end in zip(self._servers, counts, ends, strict=True)
                if count
            ]
        )

    def statistics(self) -> list[RunStatistics]:
        """Return a snapshot of each replica's run, with its ledger and staleness."""
        statistics: list[RunStatistics] = ray.get(
            [server.statistics.remote() for server in self._servers]
        )
        return statistics

    def advantages(self) -> "Advantages":
        """Return the advantages of the batch that the replicas handed over last."""
        parts = ray.get([server.advantages.remote() for server in self._servers])
        return {key: advantage for part in parts for key, advantage in part.items()}


def shares(prompts: int, supplies: Sequence[int]) -> list[int]:
    """Divide prompts among replicas so that each has equally many that have not failed.

    Every replica hands over equally many groups after each update. If a failed prompt of one
    replica were replaced on another, the first would never fill its share of a batch, and verl
    would wait without end.

    Args:
        prompts: number of prompts to divide.
        supplies: by replica, the number of earlier prompts that have not failed.

    Returns:
        Number of prompts for each replica.
    """
    counts = [0] * len(supplies)
    for _ in range(prompts):
        least = min(range(len(supplies)), key=lambda replica: supplies[replica] + counts[replica])
        counts[least] += 1
    return counts


@register_adv_est(ESTIMATOR)
def tidegate_advantages(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: "np.ndarray[Any, Any]",
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the run's advantages to verl, as ``algorithm.adv_estimator=tidegate``.

    The run computes them relative to the group, as verl's ``grpo`` does. Padding rows get 0.

    Args:
        token_level_rewards: [R, T] float32, the reward at a response's last token.
        response_mask: [R, T], 1 on tokens to train on.
        index: [R], the uid of each row's group.

    Returns:
        Advantages and returns, [R, T] both: the row's advantage on the tokens to train on.
    """
    if Manager.current is None:
        raise ConfigError(
            f"algorithm.adv_estimator={ESTIMATOR} needs actor_rollout_ref.rollout.agent."
            "agent_loop_manager_class=tidegate.integrations.verl.Manager"
        )
    known = Manager.current.advantages()
    rewards = token_level_rewards.sum(-1).tolist()
    own = [known.get((str(uid), reward), 0.0) for uid, reward in zip(index, rewards, strict=True)]
    advantages = torch.tensor(own).unsqueeze(-1) * response_mask
    return advantages, advantages


def check_config(config: DictConfig, *, replicas: int, rewards: list[Any] | None) -> None:
    """Raise ConfigError if verl's settings do not fit :class:`Manager`."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.name != "tidegate":
        raise ConfigError(
            f"tidegate.integrations.verl.Manager needs actor_rollout_ref.rollout.name=tidegate, "
            f"got {rollout.name}"
        )
    if config.trainer.v1.sampler.max_off_policy_threshold is not None:
        raise ConfigError(
            f"trainer.v1.sampler.max_off_policy_threshold is "
            f"{config.trainer.v1.sampler.max_off_policy_threshold}, and verl would wait for, or "
            "drop, what Tidegate holds to its own bound: set it to null, and give "
            "+actor_rollout_ref.rollout.engine_kwargs.tidegate.max_staleness"
        )
    refills = OmegaConf.select(config, "trainer.v1.sampler.sync_refill_failed_groups")
    if config.trainer.v1.trainer_mode == "sync" and not refills:
        raise ConfigError(
            "trainer_mode=sync does not replace a group whose episodes all fail, and Tidegate "
            "waits for a whole batch: set trainer.v1.sampler.sync_refill_failed_groups=True, or "
            "trainer.v1.trainer_mode=colocate_async"
        )
    if OmegaConf.select(config, "algorithm.filter_groups.enable"):
        raise ConfigError(
            "algorithm.filter_groups.enable has verl drop groups and wait for others, which "
            "Tidegate hands over only after the next update of weights: set it to False"
        )
    if rewards is None:
        raise ConfigError(
            "a colocated reward model gives rewards only after sampling, and Tidegate needs each "
            "rollout's at its end: use a reward function, or set "
            "reward.reward_model.enable_resource_pool=True"
        )
    is_separate = config.trainer.v1.trainer_mode == "separate_async"
    if is_separate and config.actor_rollout_ref.get("hybrid_engine", True):
        raise ConfigError(
            "the trainer's own replicas come and go in trainer_mode=separate_async, and rollouts "
            "stay on one replica: set actor_rollout_ref.hybrid_engine=False"
        )
    options = OmegaConf.select(config, "actor_rollout_ref.rollout.engine_kwargs.tidegate") or {}
    if options.get("groups_per_batch", 0) * replicas != config.data.train_batch_size:
        raise ConfigError(
            f"each of the {replicas} replicas hands over groups_per_batch groups after an update, "
            f"together data.train_batch_size={config.data.train_batch_size}, and "
            f"groups_per_batch is {options.get('groups_per_batch', 'not given')}: set "
            f"+actor_rollout_ref.rollout.engine_kwargs.tidegate.groups_per_batch to "
            f"{config.data.train_batch_size / replicas:g}"
        )
    if "episode_timeout_s" in options:
        raise ConfigError(
            "a group whose episodes all time out would be missing in verl's batch: omit "
            "engine_kwargs.tidegate.episode_timeout_s, and have agent loops limit their time"
        )
    if options.get("max_uses", 1) != 1:
        raise ConfigError(
            f"max_uses={options['max_uses']} hands over groups again, and verl takes each row of "
            "its queue once: omit engine_kwargs.tidegate.max_uses, and set "
            "actor_rollout_ref.actor.ppo_epochs"
        )
    if options.get("deadline_policy") == "split":
        raise ConfigError(
            "deadline_policy=split hands over the rest of a group beside a whole batch, and verl "
            "would train on it, or on another group, an update later than the bound allows: choose "
            "wait, mask or drop"
        )
    if config.algorithm.adv_estimator == ESTIMATOR and config.algorithm.use_kl_in_reward:
        raise ConfigError(
            f"algorithm.adv_estimator={ESTIMATOR} knows rewards as they were handed over, and "
            "algorithm.use_kl_in_reward changes them: set it to False, or use_kl_loss instead"
        )


class EpisodeClient:
    """LLM client for verl's agent loops: generates turns in the current episode."""

    def __init__(self, rollout_config: Any, steps: GlobalSteps) -> None:
        self._config = rollout_config
        self._steps = steps

    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        image_data: list[Any] | None = None,
        video_data: list[Any] | None = None,
        audio_data: list[Any] | None = None,
        **_: Any,
    ) -> TokenOutput:
        """Generate one turn after ``prompt_ids``.

        The turn continues the episode's row whose tokens the prompt begins with, or a new branch if
        the agent loop has changed earlier tokens.
        """
        if image_data or video_data or audio_data:
            raise ConfigError("rollout.name=tidegate serves texts only; use vllm or sglang")
        row = _EPISODE.get().row_from(prompt_ids)
        turn = await row.generate(**turn_options(self._config, len(prompt_ids), sampling_params))
        return token_output(turn, sampling_params, self._steps, aborted=False)


@dataclass(slots=True, eq=False)
class _VerlTask:
    """One prompt of verl's data loader; the task of the groups made from it."""

    fields: dict[str, Any]
    """Fields of the data set's row; keyword arguments of agent loops."""
    sampling: dict[str, Any]
    """Sampling parameters by verl's names."""
    trajectory: dict[str, Any]
    """verl's trace data: step, index of the sample, and whether it is for validation."""
    outputs: dict[int, tuple[int, list[AgentLoopOutput]]] = field(default_factory=dict)
    """Session number (the rollout's place in its group) and outputs of each finished rollout, by
    rollout id."""
    ended: Counter[int] = field(default_factory=Counter)
    """Number of ended episodes, by group id. A prompt has several groups if the run retries it."""
    failures: Counter[int] = field(default_factory=Counter)
    """Number of failed episodes, by group id."""

    @property
    def uid(self) -> str:
        """verl's id of the group, and TransferQueue key of the entry with its status."""
        return str(self.fields["uid"])

    @property
    def partition(self) -> str:
        """TransferQueue partition for the group's rows: ``train`` or ``val``."""
        return "val" if self.trajectory["validate"] else "train"


class AgentEpisodes(AgentLoopWorkerTQ.__ray_actor_class__):
    """verl's agent-loop worker, in a replica's Ray actor; runs agent loops as episodes of the run.

    Inherits from verl's worker everything around generation: sampling parameters, agent loops,
    tools, rewards, and the format of rows in TransferQueue. Prompts arrive and rows leave on the
    actor's event loop; episodes run on the run's own loop, in another thread.
    """

    def __init__(
        self,
        config: DictConfig,
        run: Rollouts,
        steps: GlobalSteps,
        teachers: Any,
        reward_workers: list[Any],
    ) -> None:
        client = EpisodeClient(None, steps)
        super().__init__(config, client, teachers, reward_workers)
        client._config = self.rollout_config
        self._run = run
        self._steps = steps
        self._prompts: queue.SimpleQueue[_VerlTask | None] = queue.SimpleQueue()
        self._actor_loop = asyncio.get_running_loop()
        self._published = asyncio.Event()
        self.untrained: list[int] = []
        """Numbers of the batches that verl has, and that no published weights were made from."""
        self.advantages: Advantages = {}
        """Advantages of the batch handed over last."""
        self._handing_over: asyncio.Task[None] | None = None
        self.failed_prompts = 0
        """Number of training prompts whose group kept too few rollouts; verl replaces them."""

    def published(self, batches: Sequence[int]) -> None:
        """Allow the next batch to be handed over, because new weights are live; they were made from
        ``batches``."""
        self.untrained = [number for number in self.untrained if number not in batches]
        self._published.set()

    async def close(self) -> None:
        """Stop taking prompts and handing over batches."""
        self._prompts.put(None)
        if self._handing_over is not None:
            self._handing_over.cancel()

    # ------------------------------------------------------------ verl's hooks

    async def _run_prompt(
        self,
        prompt: dict[str, Any],
        sampling_params: dict[str, Any],
        trajectory: dict[str, Any],
        trace: bool = False,
    ) -> None:
        """Queue a training prompt for the run, or validate one. Overrides verl's method."""
        sessions = prompt.pop("__rollout_n__", None)
        group_size = self._run.settings.staleness.group_size
        if not trajectory["validate"] and sessions not in (None, group_size):
            await self._report_failure(
                f"a prompt asks for {sessions} rollouts (__rollout_n__), and each group of the run "
                f"has {group_size}: leave __rollout_n__ out, or set actor_rollout_ref.rollout.n"
            )
            return
        sampling = dict(sampling_params)
        if not prompt.pop("__do_sample__", True) and not trajectory["validate"]:
            apply_greedy_sampling_params(sampling)
        task = _VerlTask(prompt, sampling, trajectory)
        await self._mark(task, "running")
        if trajectory["validate"]:
            await self._validate(task, sessions or self.rollout_config.val_kwargs.n)
            return
        self._prompts.put(task)
        if self._handing_over is None:
            self._handing_over = asyncio.create_task(self._hand_over())

    async def _agent_loop_postprocess(
        self, output: AgentLoopOutput | list[AgentLoopOutput], validate: bool, **kwargs: Any
    ) -> list[AgentLoopOutput]:
        """Score an agent loop's outputs. verl's own worker would write them, too; here
        :meth:`_write` does, when the batch is handed over."""
        outputs = output if isinstance(output, list) else [output]
        if not outputs:
            raise EpisodeError(
                "the agent loop has returned no output, and a rollout needs one; have it return "
                "an AgentLoopOutput"
            )
        await self._compute_score(outputs, kwargs=kwargs)
        return outputs

    # ------------------------------------------------------------ episodes, on the run's loop

    async def _play(self, episode: Episode, task: _VerlTask, session: int) -> float:
        _EPISODE.set(episode)
        outputs: list[AgentLoopOutput] = await self._run_agent_loop(
            dict(task.sampling),
            trajectory=task.trajectory,
            trace=False,
            session_id=session,
            **task.fields,
        )
        contexts = [row.token_ids for row in episode.rows]
        for output in outputs:
            tokens = output.prompt_ids + output.response_ids
            if not any(context[: len(tokens)] == tokens for context in contexts):
                raise EpisodeError(
                    "the agent loop has returned tokens that are not the ones that it generated "
                    "from and got, so their log-probs and versions are unknown: have it return "
                    "prompt_ids and response_ids as they were sent and received"
                )
        task.outputs[episode.rollout_id] = session, outputs
        return float(outputs[-1].reward_score)

    def _count_end(self, task: _VerlTask, group_id: int, *, has_failed: bool) -> None:
        """Count an ended episode; report a group that kept too few rollouts, so verl replaces it.

        The run discards such a group and never hands it over.
        """
        task.ended[group_id] += 1
        task.failures[group_id] += has_failed
        size = self._run.settings.staleness.group_size
        kept = size - task.failures[group_id]
        if task.ended[group_id] == size and kept < min(size, KEPT_ROLLOUTS_MIN):
            self.failed_prompts += 1  # before the status, on which verl submits another prompt
            asyncio.run_coroutine_threadsafe(self._mark(task, "failure"), self._actor_loop)

    async def _offered(self) -> AsyncIterator[_VerlTask]:
        while (task := await asyncio.to_thread(self._prompts.get)) is not None:
            yield task

    # ------------------------------------------------------------ rows, on the actor's loop

    async def _validate(self, task: _VerlTask, sessions: int) -> None:
        async def play(episode: Episode, session: int) -> float:
            return await self._play(episode, task, session)

        try:
            evaluation = await self._run.evaluate(range(sessions), episode=play)
            await asyncio.gather(*(self._write(task, *output) for output in task.outputs.values()))
            status = "failure" if evaluation.failures else "finished"
        except Exception:
            # verl waits for a status, and would never see an error of this background task.
            log.exception("uid=%s validation failed", task.uid)
            status = "failure"
        await self._mark(task, status)

    async def _hand_over(self) -> None:
        """Write one batch after each weight update, for as long as the run lasts.

        verl trains on a batch before the next update, so the batch's staleness does not grow.
        """

        async def play(episode: Episode, task: _VerlTask) -> float:
            try:
                reward = await self._play(episode, task, episode.index)
            except Exception:
                self._count_end(task, episode.group_id, has_failed=True)
                raise
            self._count_end(task, episode.group_id, has_failed=False)
            return reward

        try:
            await self._run.offer(self._offered(), episode=play)
            while (batch := await self._run.next_batch()) is not None:
                self._published.clear()
                self.untrained.append(batch.number)
                await self._write_batch(batch)
                await self._published.wait()
        except Exception as error:
            log.exception("the replica's run has failed")
            await self._report_failure(f"the run failed: {error}")
            raise

    async def _report_failure(self, why: str) -> None:
        """Have verl's trainer raise an error that quotes ``why``."""
        tag = {"is_prompt": True, "global_steps": 0, "status": why}
        await tq.async_kv_put(key=FAILURE_KEY, partition_id="train", tag=tag)

    async def _write_batch(self, batch: Batch) -> None:
        rows: dict[int, list[int]] = {}
        for row, rollout_id in enumerate(batch.rollout_ids.tolist()):
            rows.setdefault(rollout_id, []).append(row)
        tasks: dict[str, _VerlTask] = {}
        writes = []
        self.advantages = {}
        for rollout_id, own in rows.items():
            task = batch.tasks[own[0]]
            assert isinstance(task, _VerlTask)
            tasks[task.uid] = task
            reward = batch.rewards[own[0]].item()
            self.advantages[task.uid, reward] = batch.group_advantages[own[0]].item()
            session, outputs = task.outputs.pop(rollout_id)
            for output in outputs:
                self._tag(output, batch, own)
            writes.append(self._write(task, session, outputs))
        await asyncio.gather(*writes)
        # Only now, because verl takes the rows of groups that have finished.
        await asyncio.gather(*(self._mark(task, "finished") for task in tasks.values()))

    def _tag(self, output: AgentLoopOutput, batch: Batch, rows: list[int]) -> None:
        """Copy the batch's loss mask to an output, and the global steps of its trained tokens."""
        tokens = output.prompt_ids + output.response_ids
        row = next(row for row in rows if batch.token_ids[row, : len(tokens)].tolist() == tokens)
        response = slice(len(output.prompt_ids), len(tokens))
        trained = batch.loss_mask[row, response]
        versions = batch.weight_versions[row, response]
        output.response_mask = [
            int(own and trains)
            for own, trains in zip(output.response_mask, trained.tolist(), strict=True)
        ]
        output.extra_fields.update(self._steps.of(versions[trained].tolist()))

    async def _write(self, task: _VerlTask, session: int, outputs: list[AgentLoopOutput]) -> None:
        """Write a rollout's rows to TransferQueue, in the format of verl's own worker."""
        fields = {name: value for name, value in task.fields.items() if name != "agent_name"}
        is_validation = task.trajectory["validate"]
        await super()._agent_loop_postprocess(outputs, is_validation, session_id=session, **fields)

    async def _mark(self, task: _VerlTask, status: str) -> None:
        """Write a group's whole tag with its status, because verl may have cleared the old tag."""
        steps = int(task.fields["global_steps"])
        tag: Mapping[str, Any] = {"is_prompt": True, "status": status, "global_steps": steps}
        await tq.async_kv_put(key=task.uid, partition_id=task.partition, tag=dict(tag))
