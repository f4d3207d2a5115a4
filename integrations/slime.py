"""Rollout function for slime's trainer, whose rollouts come from a run.

    --rollout-function-path tidegate.integrations.slime.generate_rollout
    --custom-update-weight-post-write-path tidegate.integrations.slime.mark_weights
    --update-weight-transport disk --update-weight-disk-keep-files

slime calls :func:`generate_rollout` in its rollout manager, and :func:`mark_weights` in its trainer
once a version's files are written. The run generates ahead of the trainer, up to its
``max_staleness``; slime has the training loop, the advantages and the loss.
"""

import copy
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tidegate
from tidegate.errors import ConfigError, EpisodeError
from tidegate.orchestrator.episodes.episode import Episode
from tidegate.orchestrator.episodes.runner import call_episode
from tidegate.serving.control.receivers import read_tensors

if TYPE_CHECKING:
    from tidegate.orchestrator.trainer.rollouts import SyncRollouts

SlimeEpisode = Callable[[Episode, Any], Awaitable[float | Mapping[str, Any] | None]]
"""An episode for slime. Its task is slime's ``Sample``. It returns the reward, or None to have
slime's reward model compute one from the sample's response."""

READY = "TIDEGATE_READY"
"""File that marks a directory of weights whose files are all written."""


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """Return slime's ``RolloutFnTrainOutput``, or ``RolloutFnEvalOutput`` if ``evaluation``.

    The first call starts a run, unless :func:`use_run` has given one. Its model, group size, groups
    per batch and temperature are slime's ``hf_checkpoint``, ``n_samples_per_prompt``,
    ``rollout_batch_size`` and ``rollout_temperature``. ``args.tidegate``, a mapping in the file of
    ``--custom-config-path``, has further settings of ``serve_sync()``, and ``episode``, the import
    path of a :data:`SlimeEpisode`. Every call first publishes the newest weights that
    :func:`mark_weights` has marked below ``args.update_weight_disk_dir``.

    Raises:
        ConfigError: there is no run and no ``args`` to start one with.
        EpisodeError: an episode failed, so that slime would get too few samples.
    """
    global _rollouts
    if _rollouts is None:
        _rollouts = _started(args)
    _rollouts.publish_newest(args)
    if evaluation:
        return _rollouts.evaluate(args)
    return _rollouts.train(args, data_source)


def use_run(
    run: "SyncRollouts",
    *,
    episode: SlimeEpisode | None = None,
    evaluation: Mapping[str, Sequence[Any]] | None = None,
) -> None:
    """Have :func:`generate_rollout` take its rollouts from ``run``, which the caller closes.

    ``evaluation``: samples to evaluate by data set, in place of slime's ``eval_datasets``.
    """
    global _rollouts
    _rollouts = _SlimeRollouts(run, episode, evaluation)


def mark_weights(args: Any, version_dir: str, rollout_engines: Sequence[Any]) -> None:
    """Mark a version's directory as complete; slime calls it on every rank of its trainer."""
    (Path(version_dir) / READY).touch()


_rollouts: "_SlimeRollouts | None" = None


@dataclass(slots=True)
class _SlimeRollouts:
    """A run, and the samples of its finished episodes."""

    run: "SyncRollouts"
    episode: SlimeEpisode | None
    evaluation: Mapping[str, Sequence[Any]] | None
    published: str = ""
    """Name of the directory whose weights were published last."""
    first_version: int | None = None
    """slime's number of the weights that it has begun with; None until they are published."""
    handed: list[int] = field(default_factory=list)
    """Numbers of the batches that slime has got, in order."""
    num_named: int = 0
    """Number of them that published weights were made from."""
    finished: dict[int, tuple[Sequence[Any], Any]] = field(default_factory=dict)
    """By rollout id: the group of samples that a finished rollout belongs to, and the rollout's own
    sample."""
    args: Any = None
    has_tasks: bool = False

    def __post_init__(self) -> None:
        if (uses := self.run.settings.staleness.make_policy().max_uses) > 1:
            raise ConfigError(
                f"max_uses={uses} hands over groups again, and slime takes each sample once; leave "
                "max_uses out"
            )

    def publish_newest(self, args: Any) -> None:
        """Publish the newest marked weights, if they were not yet."""
        directory = getattr(args, "update_weight_disk_dir", None)
        ready = sorted(Path(directory).glob(f"*/{READY}")) if directory else []
        if ready and ready[-1].parent.name != self.published:
            trained = self._num_trained(ready[-1].parent.name, args)
            batches = self.handed[self.num_named : trained]
            self.run.publish(read_tensors(ready[-1].parent), batches=batches)
            self.published, self.num_named = ready[-1].parent.name, max(self.num_named, trained)

    def _num_trained(self, directory: str, args: Any) -> int:
        """Return how many of the batches slime has trained on for these weights.

        slime numbers its weights and writes them after each rollout, or each
        ``update_weights_interval`` of them, the first before any. ``train_async.py`` gets one
        rollout more before it writes them.
        """
        version = int("".join(filter(str.isdigit, directory)) or 0)
        if self.first_version is None:
            self.first_version = version
        interval = getattr(args, "update_weights_interval", None) or 1
        before = (getattr(args, "start_rollout_id", None) or 0) % interval
        updates = version - self.first_version
        return min(len(self.handed), max(0, updates * interval - before))

    def train(self, args: Any, data_source: Any) -> Any:
        """Return the samples of the run's next batch, in groups in the order of their index."""
        from slime.rollout.base_types import RolloutFnTrainOutput

        self.args = args
        if not self.has_tasks:
            self.run.offer(_groups(data_source), episode=self._play)
            self.has_tasks = True
        batch = self.run.next_batch()
        if batch is None:
            raise EpisodeError(
                f"slime's data source ended before {self.run.settings.staleness.groups_per_batch} "
                "groups for a batch were taken from it; lower groups_per_batch, or end training "
                "earlier"
            )
        self.handed.append(batch.number)
        groups: dict[int, tuple[Sequence[Any], list[Any]]] = {}
        for number in batch.rollout_ids.tolist():
            given, sample = self.finished.pop(number)
            groups.setdefault(id(given), (given, []))[1].append(sample)
        size = self.run.settings.staleness.group_size
        samples = []
        for given, made in groups.values():
            if len(made) != size:
                raise EpisodeError(
                    f"{size - len(made)} of {size} episodes failed for the prompt "
                    f"{str(given[0].prompt)[:200]!r}: have the episode handle its errors, and "
                    f"return a reward"
                )
            for one, other in zip(given, made, strict=True):
                other.index, other.rollout_id = one.index, one.rollout_id
            samples.append(made)
        samples.sort(key=lambda group: group[0].index or 0)
        return RolloutFnTrainOutput(samples=samples)

    def evaluate(self, args: Any) -> Any:
        """Return the samples of slime's data sets for evaluation."""
        from slime.rollout.base_types import RolloutFnEvalOutput
        from slime.utils.types import Sample

        self.args = args
        given = self.evaluation if self.evaluation is not None else _eval_samples(args)
        data = {}
        for name, samples in given.items():
            found: dict[int, Any] = {}

            async def play(episode: Episode, index: int, samples: Any = samples) -> float:
                found[index], reward = await self._sample(episode, samples[index])  # noqa: B023
                return reward

            self.run.evaluate(list(range(len(samples))), episode=play, name=str(name))
            if len(found) < len(samples):
                raise EpisodeError(
                    f"{len(samples) - len(found)} of {len(samples)} episodes of the evaluation set "
                    f"{name!r} failed, and slime needs a reward for each; have the episode handle "
                    "its errors. The log has them"
                )
            made = [found[index] for index in range(len(samples))]
            data[name] = {
                "rewards": [_value(args, sample.reward) for sample in made],
                "truncated": [sample.status == Sample.Status.TRUNCATED for sample in made],
                "samples": made,
            }
        return RolloutFnEvalOutput(data=data)

    async def _play(self, episode: Episode, group: Sequence[Any]) -> float:
        sample, reward = await self._sample(episode, group[0])
        self.finished[episode.rollout_id] = group, sample
        return reward

    async def _sample(self, episode: Episode, given: Any) -> tuple[Any, float]:
        """Play an episode; return slime's sample of it, and its reward."""
        sample = _unplayed(given)
        play = self.episode or self._one_turn
        reward = await call_episode(play, episode, sample)
        _fill(sample, episode)
        if reward is None:
            from slime.rollout.rm_hub import async_rm

            reward = await async_rm(self.args, sample)
        sample.reward = reward
        return sample, _value(self.args, reward)

    async def _one_turn(self, episode: Episode, sample: Any) -> None:
        episode.append(sample.prompt)
        most = getattr(self.args, "rollout_max_response_len", None)
        await episode.generate(**({} if most is None else {"max_tokens": most}))


def _started(args: Any) -> _SlimeRollouts:
    """Start a run with slime's settings; it ends with the process."""
    import atexit

    from slime.utils.misc import load_function

    if args is None:
        raise ConfigError("there is no run: call tidegate.integrations.slime.use_run(run) first")
    settings = dict(getattr(args, "tidegate", None) or {})
    episode = settings.pop("episode", None)
    run = tidegate.serve_sync(
        **{
            "model": args.hf_checkpoint,
            "group_size": args.n_samples_per_prompt,
            "groups_per_batch": args.rollout_batch_size,
            "temperature": args.rollout_temperature,
            **settings,
        }
    )
    run.__enter__()
    atexit.register(run.__exit__, None, None, None)
    return _SlimeRollouts(run, None if episode is None else load_function(episode), None)


def _groups(data_source: Any) -> Iterator[Sequence[Any]]:
    """Yield slime's groups of samples, one by one as the run admits them."""
    while groups := data_source.get_samples(1):
        yield from groups


def _unplayed(given: Any) -> Any:
    """Copy a sample without the results of earlier rollouts."""
    sample = copy.deepcopy(given)
    sample.tokens, sample.response, sample.response_length = [], "", 0
    sample.loss_mask = sample.rollout_log_probs = sample.reward = None
    sample.weight_versions = []
    sample.status = type(sample).Status.PENDING
    return sample


def _fill(sample: Any, episode: Episode) -> None:
    """Write an ended episode's tokens into slime's sample; tokens that it added are masked.

    Raises:
        EpisodeError: the episode has generated nothing, or has forked.
    """
    turns = episode.turns
    if episode.branches or not turns:
        raise EpisodeError(
            "slime trains on one context for each sample, and this episode has "
            f"{len(episode.branches)} forks and {len(turns)} turns; generate at least once, and do "
            "not fork"
        )
    token_ids = episode.token_ids
    sample.tokens = token_ids[: turns[0].start]
    for turn in turns:
        if between := token_ids[len(sample.tokens) : turn.start]:
            sample.append_response_tokens(tokens=between, trainable=False)
        reason = {"type": "length" if turn.finish_reason == "length" else "stop"}
        version = str(turn.spans[-1].version) if turn.spans else ""
        sample.append_response_tokens(
            tokens=turn.token_ids,
            log_probs=turn.logprobs,
            text=turn.text,
            meta_info={"finish_reason": reason, "weight_version": version},
        )


def _value(args: Any, reward: Any) -> float:
    """Return a reward as a number, of slime's ``reward_key`` if there are several."""
    return float(reward[args.reward_key] if isinstance(reward, Mapping) else reward)


def _eval_samples(args: Any) -> dict[str, list[Any]]:
    """Return the samples of slime's ``eval_datasets`` by their names, repeated as configured."""
    from slime.utils.data import Dataset
    from slime.utils.processing_utils import load_tokenizer

    found = {}
    for config in getattr(args, "eval_datasets", None) or []:
        dataset = Dataset(
            path=config.path,
            tokenizer=load_tokenizer(args.hf_checkpoint, trust_remote_code=False),
            processor=None,
            max_length=args.eval_max_prompt_len,
            prompt_key=config.input_key,
            label_key=config.label_key,
            metadata_key=config.metadata_key,
            tool_key=config.tool_key,
            apply_chat_template=args.apply_chat_template,
            apply_chat_template_kwargs=args.apply_chat_template_kwargs,
        )
        repeats = config.n_samples_per_eval_prompt
        found[config.name] = [sample for sample in dataset.samples for _ in range(repeats)]
    return found
