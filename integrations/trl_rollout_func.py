"""Adapter for TRL's ``GRPOTrainer``: a ``rollout_func`` that gets its rollouts from a run.

    with tidegate.serve_sync(model=path, max_staleness=0, group_size=8, groups_per_batch=4) as run:
        GRPOTrainer(
            model=path,
            rollout_func=tidegate.trl_rollout_func(run, episode=solve),
            reward_funcs=lambda reward, **_: reward, …
        ).train()

Users call it as ``tidegate.trl_rollout_func``. TRL calls the returned function once per generation
batch and waits for it, so rollouts are on-policy. The function publishes the trainer's weights
first, because TRL itself sends weights only to vLLM. TRL has the training loop, the
advantages and the loss.
"""

import importlib.metadata
import json
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tidegate.errors import ConfigError, EpisodeError
from tidegate.orchestrator.episodes.episode import Episode
from tidegate.orchestrator.episodes.generated_turn import checked_reward
from tidegate.orchestrator.episodes.model_files import read_model_files
from tidegate.orchestrator.episodes.runner import call_episode
from tidegate.orchestrator.trainer.rollouts import SyncRollouts
from tidegate.policies.filters import GroupFilter

if TYPE_CHECKING:
    import torch

TRLEpisode = Callable[[Episode, Any], Awaitable[float | Mapping[str, Any]]]
"""An episode for TRL. Its task is TRL's prompt, a text or a list of messages, or the prompt's row
of a dataset. It returns the reward, or a mapping of values for the reward functions."""

RolloutFunc = Callable[[list[Any], Any], dict[str, list[Any]]]
"""TRL's type of the function: takes the prompts and the trainer."""

TRL_SINCE = (0, 29, 1)
"""First TRL release that calls ``rollout_func(prompts, trainer)`` without vLLM, and passes returned
columns of other names than its own to the reward functions."""

RESERVED = ("prompt", "prompt_ids", "completion", "completion_ids", "logprobs", "env_mask")
"""Column names that TRL uses itself; an episode may return no value under them."""

SHARDED = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA", "TP")
"""accelerate's names of distributed modes in which no rank has all weights."""


def trl_rollout_func(
    run: SyncRollouts | None,
    *,
    episode: TRLEpisode,
    dataset: Iterable[Mapping[str, Any]] | None = None,
) -> RolloutFunc:
    """Return a ``rollout_func`` for TRL's ``GRPOTrainer`` whose rollouts come from ``run``.

    ``episode`` gets TRL's prompt as its task. TRL passes no other column of the dataset, such as a
    reference answer: with ``dataset``, rows that have a ``prompt`` each, the task is the prompt's
    whole row. The mapping that it returns goes to the reward
    functions, one keyword argument for each key; a plain reward goes there as ``reward``. TRL's
    training prompts become batches of the run, and its evaluation prompts the run's evaluations.

    With several TRL processes, the first one has the run and the others give ``run=None``.

    Raises:
        ConfigError: ``run`` was not made by ``serve_sync``, the installed TRL is too old, or two
            rows of ``dataset`` have one prompt and other columns that differ. The
            returned function raises it too: in its first call if the trainer's settings do not fit
            the run's, and in any call if its prompts or an episode's values do not fit.
    """
    if run is not None and not isinstance(run, SyncRollouts):
        raise ConfigError(
            f"trl_rollout_func() needs a run of tidegate.serve_sync(), got {type(run).__name__}: "
            "TRL's trainer is not async, and episodes run in the process that has the run"
        )
    refuse_old_trl()
    return _TRLRolloutFunc(run, episode, None if dataset is None else _rows_by_prompt(dataset))


def _rows_by_prompt(dataset: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    rows: dict[str, Mapping[str, Any]] = {}
    for row in dataset:
        if rows.setdefault(_key_of(row["prompt"]), row) != row:
            raise ConfigError(
                f"two rows of the dataset have the prompt {str(row['prompt'])[:200]!r} and differ "
                "in other columns; TRL passes only the prompt, so make prompts unique"
            )
    return rows


def _key_of(prompt: Any) -> str:
    return json.dumps(prompt, sort_keys=True, default=str)


def refuse_old_trl() -> None:
    """Raise ConfigError if an older TRL than this adapter's is installed."""
    try:
        installed = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        return  # nothing can call the function
    release = tuple(int(number) for number in re.findall(r"[0-9]+", installed)[:3])
    if release < TRL_SINCE:
        raise ConfigError(
            f"TRL {installed} does not call rollout_func(prompts, trainer) without vLLM; releases "
            f"since {'.'.join(map(str, TRL_SINCE))} do: pip install -U trl"
        )


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A prompt of one call by TRL; the task of its episodes."""

    index: int
    """Index among the call's tasks, from 0."""
    prompt: Any
    """Prompt as TRL gave it: a text or a list of messages."""


@dataclass(frozen=True, slots=True)
class _Completion:
    """One rollout, in TRL's form."""

    prompt_ids: list[int]
    completion_ids: list[int]
    """All tokens from the first sampled one to the last sampled one."""
    logprobs: list[float]
    """Log-prob of each completion token as it was sampled; 0.0 for tokens that the episode
    added."""
    env_mask: list[int]
    """1 for each sampled completion token, 0 for each one that the episode added."""
    values: Mapping[str, Any]
    """Values that the episode returned, by name (``reward`` if it returned a number), for the
    reward functions."""


@dataclass(slots=True)
class _Generation:
    """Episodes of one call by TRL, and their completions."""

    episode: TRLEpisode
    rows_by_prompt: Mapping[str, Mapping[str, Any]] | None
    """Rows of the dataset, by :func:`_key_of` their prompts; None: episodes get the prompt."""
    completions: dict[int, dict[int, _Completion]] = field(default_factory=dict)
    """Completions by the task's index, then by rollout id."""
    failures: list[tuple[_Prompt, BaseException]] = field(default_factory=list)
    """Failed episodes, in the order in which they failed."""

    async def play(self, episode: Episode, task: _Prompt) -> float:
        """Run TRL's episode, and keep its completion."""
        try:
            returned = await call_episode(self.episode, episode, self._task_of(task.prompt))
            values = returned if isinstance(returned, Mapping) else {"reward": returned}
            completion = _completion(episode, values)
            reward = checked_reward(values.get("reward", 0.0))
        except BaseException as error:
            self.failures.append((task, error))
            raise
        self.completions.setdefault(task.index, {})[episode.rollout_id] = completion
        return reward

    def _task_of(self, prompt: Any) -> Any:
        if self.rows_by_prompt is None:
            return prompt
        try:
            return self.rows_by_prompt[_key_of(prompt)]
        except KeyError:
            raise ConfigError(
                f"no row of trl_rollout_func(dataset=…) has the prompt {str(prompt)[:200]!r}; give "
                "it the rows of TRL's evaluation dataset, too"
            ) from None

    def rows(self, tasks: Sequence[_Prompt], each: int) -> list[_Completion]:
        """Return the tasks' completions, ``each`` per task, in the order of the tasks.

        Raises:
            EpisodeError: an episode failed, so that TRL would get too few completions.
        """
        rows = [row for task in tasks for row in self.completions.get(task.index, {}).values()]
        missing = [task for task in tasks if len(self.completions.get(task.index, {})) < each]
        if not missing:
            return rows
        task, error = self.failures[0] if self.failures else (missing[0], None)
        cause = "the run discarded it" if error is None else f"{type(error).__name__}: {error}"
        raise EpisodeError(
            f"{len(tasks) * each - len(rows)} of {len(tasks) * each} episodes have no completion, "
            f"the first for the prompt {str(task.prompt)[:200]!r}: {cause}. TRL needs one "
            "for each prompt: have the episode handle its errors, and return a reward"
        ) from error


class _TRLRolloutFunc:
    """The function that TRL calls."""

    def __init__(
        self,
        run: SyncRollouts | None,
        episode: TRLEpisode,
        rows_by_prompt: Mapping[str, Mapping[str, Any]] | None,
    ) -> None:
        self._run = run
        self._episode = episode
        self._rows_by_prompt = rows_by_prompt
        self._published_step: int | None = None
        """TRL's ``global_step`` of the weights that were published last; None before the first."""
        self._has_trained = False
        """Whether TRL has got a training batch since the last publish."""

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """Return one completion for each prompt. TRL repeats a prompt ``num_generations`` times."""
        accelerator = trainer.accelerator
        is_first = accelerator.process_index == 0
        if (self._run is not None) != is_first:
            raise ConfigError(
                f"TRL's process {accelerator.process_index} of {accelerator.num_processes} called "
                f"trl_rollout_func({'run' if self._run is not None else 'None'}, …): the first "
                "process has the run, and the others give None and start none"
            )
        if accelerator.num_processes == 1:
            return self._columns(self._generate(prompts, trainer))
        return self._columns(self._generate_for_all(prompts, trainer))

    def _generate_for_all(self, prompts: list[Any], trainer: Any) -> list[_Completion]:
        """Generate for all processes' prompts in the first process; return this process's part."""
        import torch.distributed as dist

        rank, ranks = trainer.accelerator.process_index, trainer.accelerator.num_processes
        gathered: list[Any] | None = [None] * ranks if rank == 0 else None
        dist.gather_object(prompts, gathered)
        parts: list[Any] | None = None
        if gathered is not None:
            try:
                rows = iter(self._generate([p for part in gathered for p in part], trainer))
                parts = [[next(rows) for _ in part] for part in gathered]
            except Exception as error:
                # The other processes wait for their parts, and must raise as well.
                dist.scatter_object_list([None], [f"{type(error).__name__}: {error}"] * ranks)
                raise
        received: list[Any] = [None]
        dist.scatter_object_list(received, parts)
        if isinstance(received[0], str):
            raise EpisodeError(f"TRL's first process could not generate: {received[0]}")
        mine: list[_Completion] = received[0]
        return mine

    def _generate(self, prompts: list[Any], trainer: Any) -> list[_Completion]:
        run = self._run
        assert run is not None
        if self._published_step is None:
            _check_trainer(trainer, run)
        if self._published_step != trainer.state.global_step or self._has_trained:
            run.publish(_weights(trainer))
            self._published_step, self._has_trained = trainer.state.global_step, False
        generation = _Generation(self._episode, self._rows_by_prompt)
        if not trainer.model.training:
            tasks = [_Prompt(index, prompt) for index, prompt in enumerate(prompts)]
            run.evaluate(tasks, episode=generation.play)
            return generation.rows(tasks, 1)
        tasks = _groups(prompts, run)
        run.offer(tasks, episode=generation.play)
        batch = run.next_batch()
        self._has_trained = True
        handed_over = set() if batch is None else set(batch.rollout_ids.tolist())
        for index, rows in generation.completions.items():
            kept = {number: row for number, row in rows.items() if number in handed_over}
            generation.completions[index] = kept
        return generation.rows(tasks, run.settings.staleness.group_size)

    @staticmethod
    def _columns(rows: Sequence[_Completion]) -> dict[str, list[Any]]:
        """Return completions as TRL's columns."""
        names = list(dict.fromkeys(name for row in rows for name in row.values))
        columns = {name: [row.values.get(name) for row in rows] for name in names}
        return {
            "prompt_ids": [row.prompt_ids for row in rows],
            "completion_ids": [row.completion_ids for row in rows],
            "logprobs": [row.logprobs for row in rows],
            "env_mask": [row.env_mask for row in rows],
            **columns,
        }


def _completion(episode: Episode, values: Mapping[str, Any]) -> _Completion:
    """Return an ended episode's rollout in TRL's form.

    Raises:
        EpisodeError: the episode has generated nothing, or has forked.
        ConfigError: the episode has returned a value under one of the names in ``RESERVED``.
    """
    if reserved := [name for name in values if name in RESERVED]:
        raise ConfigError(f"an episode returned {reserved}, which TRL uses: give other names")
    if episode.branches:
        raise EpisodeError(
            "the episode forked into several contexts, and TRL trains on one for each completion: "
            "do not call fork(), and keep earlier messages as they were rendered"
        )
    turns, token_ids = episode.turns, episode.token_ids
    if not turns or not any(turn.token_ids for turn in turns):
        raise EpisodeError(
            "the episode returned without a generated token, and TRL needs one; generate at least "
            "once"
        )
    start = turns[0].start
    end = turns[-1].start + len(turns[-1].token_ids)
    logprobs, env_mask = [0.0] * (end - start), [0] * (end - start)
    for turn in turns:
        tokens = slice(turn.start - start, turn.start - start + len(turn.token_ids))
        logprobs[tokens] = turn.logprobs
        env_mask[tokens] = [1] * len(turn.token_ids)
    return _Completion(token_ids[:start], token_ids[start:end], logprobs, env_mask, values)


def _groups(prompts: Sequence[Any], run: SyncRollouts) -> list[_Prompt]:
    """Return one task for each group of TRL's prompts.

    Raises:
        ConfigError: the prompts are not whole groups of the run's group size, or are more than
            one batch of the run.
    """
    size, most = run.settings.staleness.group_size, run.settings.staleness.groups_per_batch
    groups = [prompts[start : start + size] for start in range(0, len(prompts), size)]
    if len(groups) > most or any(group != [group[0]] * size for group in groups):
        raise ConfigError(
            f"TRL asks for {len(prompts)} completions at once, and the run's batches are of "
            f"{most} groups of {size}: give serve_sync() group_size=num_generations and "
            "groups_per_batch=generation_batch_size // num_generations"
        )
    return [_Prompt(index, group[0]) for index, group in enumerate(groups)]


def _weights(trainer: Any) -> "dict[str, torch.Tensor]":
    """Return the trainer's weights by their names in the model; LoRA adapters are merged."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    if not hasattr(model, "merge_adapter"):
        return dict(model.state_dict())
    model.merge_adapter()
    try:
        return {
            name.removeprefix("base_model.model.")
            .replace(".base_layer", "")
            .replace("modules_to_save.default.", ""): tensor.detach().clone()
            for name, tensor in model.state_dict().items()
            if model.prefix not in name and "original_module" not in name
        }
    finally:
        model.unmerge_adapter()


def _check_trainer(trainer: Any, run: SyncRollouts) -> None:
    """Raise ConfigError if the settings of TRL's trainer do not fit the run's."""
    settings = run.settings
    if trainer.use_vllm:
        raise ConfigError("TRL would start vLLM beside the run: give GRPOConfig use_vllm=False")
    if trainer.tools:
        raise ConfigError(
            "TRL would call the tools again after the rollouts: give GRPOTrainer neither tools nor "
            "environment_factory, and call them in the episode"
        )
    mode = str(trainer.accelerator.distributed_type).rpartition(".")[2]
    if mode in SHARDED:
        raise ConfigError(
            f"TRL runs under {mode}, where no process has all weights to publish: use one process, "
            "or data parallelism (DDP)"
        )
    size = settings.staleness.group_size
    if trainer.num_generations != size:
        raise ConfigError(
            f"TRL's num_generations is {trainer.num_generations} and the run's group_size {size}: "
            "a group is TRL's completions of one prompt, so give both the same number"
        )
    staleness = settings.staleness
    if staleness.staleness_policy is not None or type(staleness.group_filter) is not GroupFilter:
        raise ConfigError(
            "TRL needs every completion that it asks for, and a staleness policy or group filter "
            "of the run may drop some: leave both out"
        )
    if staleness.max_uses > 1:
        raise ConfigError(
            f"max_uses={staleness.max_uses} would hand over groups of earlier prompts, and TRL "
            "needs those that it asks for: leave max_uses out, and repeat updates with GRPOConfig "
            "num_iterations"
        )
    temperature = settings.sampling.temperature
    if trainer.temperature != temperature:
        raise ConfigError(
            f"TRL's temperature is {trainer.temperature} and the run's {temperature}: TRL divides "
            "logits by its own, so give both the same number"
        )
    _check_tokenizer(trainer.processing_class, run)


def _check_tokenizer(processing_class: Any, run: SyncRollouts) -> None:
    """Raise ConfigError if a token of the run has another id in TRL's tokenizer, or none."""
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    trl_ids: dict[str, int] = tokenizer.get_vocab()
    model = run.settings.model
    run_ids = read_model_files(model).tokenizer.get_vocab(with_added_tokens=True)
    for token, token_id in run_ids.items():
        if trl_ids.get(token) != token_id:
            raise ConfigError(
                f"the token {token!r} has id {token_id} in the run's tokenizer ({model}) and "
                f"{trl_ids.get(token)} in TRL's: give GRPOTrainer the run's model directory, or "
                "the tokenizer in it as processing_class"
            )
