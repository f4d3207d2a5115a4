"""What does an RLHF framework expect of a rollout worker? Its methods' names, over a fleet.

OpenRLHF's actors and verl's rollouts generate, score, sleep and take weights by such calls, one
after the other. It knows no staleness: whoever calls it decides when weights change.
"""

import datetime
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import tidegate
from tidegate.errors import ConfigError, EpisodeError, WeightsRefused
from tidegate.orchestrator.episodes.episode import Episode
from tidegate.orchestrator.episodes.generated_turn import GeneratedTurn
from tidegate.transport.sleep_messages import MEMORY_TAGS, MemoryTag, SleepLevel

if TYPE_CHECKING:
    import torch

GROUP_TIMEOUT_S = 300.0
"""For all processes to join a group that weights are broadcast in."""

VLLM_NAMES = {"stop": "stop_strings"}
"""Of vLLM's sampling parameters, those that are called otherwise here."""

IGNORED = ("n", "logprobs", "prompt_logprobs", "skip_special_tokens", "include_stop_str_in_output")
"""Of vLLM's: answered apart, or of no meaning for token ids."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    """As sampled, one per token."""
    versions: list[int]
    """The weights that sampled each token."""
    finish_reason: str
    text: str


@dataclass(frozen=True, slots=True)
class _Wanted:
    """One sample that is asked for."""

    prompt: list[int]
    sampling: Mapping[str, Any]
    seed: int


class RolloutWorker:
    """Engines that generate and score when told to; ``ray.remote(RolloutWorker)`` makes an actor.

    Calls block, and are one thread's. Names are OpenRLHF's (``add_requests``, ``update_weight``,
    ``wake_up`` …) and verl's (``update_weights``, ``resume``, ``release`` …).
    """

    def __init__(self, model: str, *, engines: int = 1, **settings: Any) -> None:
        """Start the engines; ``settings`` are those of :class:`~tidegate.RunSettings`.

        Raises:
            ConfigError: a setting is unknown, out of range or impossible.
            EngineStartFailed: an engine did not start.
        """
        self._run = tidegate.serve_sync(model=model, engines=engines, **settings)
        self._seed = self._run.settings.sampling.seed
        self._run.__enter__()
        self._asked = itertools.count()
        self._responses: list[list[Sample]] = []
        self._arriving: dict[str, torch.Tensor] = {}
        """Tensors of the next version, until the last has come."""
        self._group: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """End the engines. Harmless if repeated."""
        self._run.__exit__(None, None, None)

    # ------------------------------------------------------------ generating and scoring

    def generate(
        self,
        prompt_token_ids: Sequence[Sequence[int]],
        sampling_params: Any = None,
        *,
        n: int | None = None,
    ) -> list[list[Sample]]:
        """``n`` completions of each prompt. Nothing of it is trained on by Tidegate.

        ``sampling_params`` are the keywords of ``Episode.generate``, as a mapping or as an object
        with such attributes; vLLM's names are understood. Each call draws anew, unless a ``seed``
        is given: then a prompt's completions are those of ``seed``, ``seed + 1`` and so on.

        Raises:
            TurnRefused: no engine can ever serve one of them.
        """
        sampling, n_asked = _sampling(sampling_params)
        count = n_asked if n is None else n
        if count < 1:
            raise ConfigError(f"n counts completions of each prompt, at least 1; got n={count}")
        seed = sampling.pop("seed", None)
        wanted = [
            _Wanted(
                [int(token) for token in prompt],
                sampling,
                self._next_seed() if seed is None else int(seed) + index,
            )
            for prompt in prompt_token_ids
            for index in range(count)
        ]
        samples = self._sampled(wanted)
        return [samples[at : at + count] for at in range(0, len(samples), count)]

    generate_sequences = generate

    def add_requests(self, sampling_params: Any, prompt_token_ids: Sequence[Sequence[int]]) -> None:
        """Generate, and keep it for :meth:`get_responses`."""
        self._responses.append(
            [sample for of in self.generate(prompt_token_ids, sampling_params) for sample in of]
        )

    def get_responses(self) -> list[Sample]:
        """What the oldest :meth:`add_requests` made.

        Raises:
            ConfigError: nothing was asked for.
        """
        if not self._responses:
            raise ConfigError("get_responses() without add_requests() before it")
        return self._responses.pop(0)

    def compute_log_probs(
        self,
        sequences: Sequence[Sequence[int]],
        start: int | Sequence[int] = 1,
        *,
        temperature: float = 1.0,
    ) -> list[list[float]]:
        """Log-probs of each sequence's tokens from ``start`` on, under the weights served now."""
        scores = self._run.score(sequences, start=start, temperature=temperature)
        return [score.logprobs.tolist() for score in scores]

    compute_log_prob = compute_log_probs

    # ------------------------------------------------------------ weights

    def init_weights_update_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str = "tidegate",
        backend: str = "gloo",
        use_ray: bool = False,
    ) -> None:
        """Join the group in which the trainer, its rank 0, broadcasts weights; this is
        ``rank_offset``. It becomes this process' own ``torch.distributed`` group.

        Raises:
            ConfigError: the backend is none that this worker receives by.
        """
        import torch.distributed as dist

        if backend != "gloo":
            raise ConfigError(
                f"a rollout worker receives weights on the host, and {backend!r} needs them on an "
                f"accelerator; use backend='gloo', or update_weights(state_dict)"
            )
        dist.init_process_group(
            backend,
            init_method=f"tcp://{master_address}:{master_port}",
            rank=rank_offset,
            world_size=world_size,
            group_name=group_name,
            timeout=datetime.timedelta(seconds=GROUP_TIMEOUT_S),
        )
        self._group = dist.group.WORLD

    init_process_group = init_weights_update_group

    def update_weight(
        self, name: str, dtype: Any, shape: Sequence[int], empty_cache: bool = False
    ) -> int | None:
        """Receive a tensor that the trainer broadcasts. With ``empty_cache``, as the frameworks
        say with the last one, publish all of them; their version."""
        import torch
        import torch.distributed as dist

        if self._group is None:
            raise ConfigError("update_weight() needs init_weights_update_group() before it")
        kind = dtype if isinstance(dtype, torch.dtype) else getattr(torch, _dtype_name(dtype), None)
        if not isinstance(kind, torch.dtype):
            raise WeightsRefused(f"tensor {name!r} has dtype {dtype!r}, which torch does not know")
        tensor = torch.empty(tuple(shape), dtype=kind)
        dist.broadcast(tensor, 0, group=self._group)
        self._arriving[name] = tensor
        if not empty_cache:
            return None
        state_dict, self._arriving = self._arriving, {}
        return self._run.publish(state_dict)

    def update_weights(
        self, weights: "Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]"
    ) -> int:
        """Serve these from now on; their version. A mapping, or verl's pairs of name and tensor.

        Raises:
            WeightsRefused: they don't fit the model; the old ones serve on.
        """
        return self._run.publish(dict(weights))

    def reset_prefix_cache(self) -> None:
        """Forget contexts kept for later turns; weights that change need no such call."""
        self._run.pause("keep", clear_cache=True)
        self._run.resume()

    # ------------------------------------------------------------ memory

    def sleep(self, level: SleepLevel = 1) -> int:
        """Give the memory of weights and KV to the system; how many bytes. As ``Rollouts.sleep``:
        after level 2, weights must be published before anything is generated."""
        return self._run.sleep(level)

    def wake_up(self, tags: Sequence[MemoryTag] | None = None) -> None:
        """Take it again."""
        self._run.wake(tags)

    def release(self) -> int:
        """verl's name for sleep."""
        return self.sleep()

    def resume(self, tags: Sequence[MemoryTag] = MEMORY_TAGS) -> None:
        """verl's name for wake_up."""
        self.wake_up(tags)

    # ------------------------------------------------------------ who it is

    def get_world_size(self) -> int:
        """Processes of it in a group that weights are broadcast in: one, however many engines."""
        return 1

    def health(self) -> bool:
        """Whether an engine serves."""
        return any(engine.is_alive for engine in self._run.statistics().engines)

    @property
    def version(self) -> int:
        """Of the weights published last."""
        return self._run.version

    # ------------------------------------------------------------ how it generates

    def _next_seed(self) -> int:
        return (self._seed << 40) + next(self._asked)

    def _sampled(self, wanted: Sequence[_Wanted]) -> list[Sample]:
        """One episode of one turn for each, all at once."""
        turns: dict[int, GeneratedTurn] = {}

        async def one_turn(episode: Episode, number: int) -> float:
            one = wanted[number]
            episode.append(one.prompt)
            turns[number] = await episode.generate(seed=one.seed, **one.sampling)
            return 0.0

        self._run.evaluate(range(len(wanted)), episode=one_turn)
        missing = [number for number in range(len(wanted)) if number not in turns]
        if missing:
            raise EpisodeError(
                f"{len(missing)} of {len(wanted)} samples could not be generated, the first of the "
                f"prompt {wanted[missing[0]].prompt[:20]}; the log says why"
            )
        return [_sample(one.prompt, turns[number]) for number, one in enumerate(wanted)]


def _sample(prompt: list[int], turn: GeneratedTurn) -> Sample:
    versions = [span.version for span in turn.spans for _ in range(span.start, span.end)]
    return Sample(
        prompt_token_ids=prompt,
        token_ids=turn.token_ids,
        logprobs=turn.logprobs,
        versions=versions,
        finish_reason=turn.finish_reason,
        text=turn.text,
    )


def _sampling(params: Any) -> tuple[dict[str, Any], int]:
    """Our keywords, and ``n``; what a vLLM object leaves at None says nothing."""
    if params is None:
        return {}, 1
    given = dict(params) if isinstance(params, Mapping) else _attributes(params)
    count = int(given.get("n") or 1)
    sampling = {
        VLLM_NAMES.get(name, name): value
        for name, value in given.items()
        if name not in IGNORED and value is not None
    }
    if isinstance(sampling.get("stop_strings"), str):  # vLLM takes a single one so
        sampling["stop_strings"] = [sampling["stop_strings"]]
    if sampling.get("top_k") == -1:  # vLLM's word for all
        sampling["top_k"] = 0
    return sampling, count


def _attributes(params: Any) -> dict[str, Any]:
    names = (
        "n", "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "stop",
        "stop_token_ids", "seed", "repetition_penalty", "presence_penalty", "frequency_penalty",
    )  # fmt: skip
    given = {name: getattr(params, name, None) for name in names}
    if not given["stop"]:
        given["stop"] = None
    if not given["stop_token_ids"]:
        given["stop_token_ids"] = None
    return given


def _dtype_name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
