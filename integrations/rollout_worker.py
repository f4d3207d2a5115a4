"""Rollout worker for OpenRLHF and verl: their method names, over a fleet of Tidegate engines.

Those frameworks call :class:`RolloutWorker` to generate, score, sleep and update weights, one call
after the other. There is no staleness control: the caller decides when weights change. Generation
runs evaluation episodes of a run of :func:`tidegate.serve_sync`.
"""

import datetime
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from tidegate.errors import ConfigError, EpisodeError, WeightsRefused
from tidegate.orchestrator.episodes.episode import Episode
from tidegate.orchestrator.episodes.generated_turn import GeneratedTurn
from tidegate.runs import serve_sync
from tidegate.transport.sleep_messages import MEMORY_TAGS, MemoryTag, SleepLevel

if TYPE_CHECKING:
    import torch

GROUP_TIMEOUT_S = 300.0
"""Longest wait for all processes to join the group in which weights are broadcast."""

VLLM_NAMES = {"stop": "stop_strings"}
"""vLLM's sampling parameters that have another name here."""

IGNORED = ("n", "logprobs", "prompt_logprobs", "skip_special_tokens", "include_stop_str_in_output")
"""vLLM's parameters that are handled separately, or have no meaning for token ids."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion of a prompt, with its tokens and log-probs."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    """Log-probs under the sampling distribution, one per token."""
    versions: list[int]
    """Weight version that sampled each token."""
    finish_reason: str
    text: str


@dataclass(frozen=True, slots=True)
class _CompletionRequest:
    """One requested completion of a prompt."""

    prompt: list[int]
    sampling: Mapping[str, Any]
    seed: int


class RolloutWorker:
    """Engines that generate and score on request; ``ray.remote(RolloutWorker)`` makes a Ray actor.

    Calls block, and must come from one thread. Names are OpenRLHF's (``add_requests``,
    ``update_weight``, ``wake_up`` …) and verl's (``update_weights``, ``resume``, ``release`` …).
    """

    def __init__(self, model: str, *, engines: int = 1, **settings: Any) -> None:
        """Start the engines; ``settings`` are those of :class:`~tidegate.RunSettings`.

        Raises:
            ConfigError: a setting is unknown, out of range or impossible.
            EngineStartFailed: an engine did not start.
        """
        self._run = serve_sync(model=model, engines=engines, **settings)
        self._seed = self._run.settings.sampling.seed
        self._run.__enter__()
        self._requested = itertools.count()
        self._responses: list[list[Sample]] = []
        self._received: dict[str, torch.Tensor] = {}
        """Received tensors of the next version, until the last one."""
        self._group: Any = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def shutdown(self) -> None:
        """Stop the engines. May be called again."""
        self._run.__exit__(None, None, None)

    # ------------------------------------------------------------ generating and scoring

    def generate(
        self,
        prompt_token_ids: Sequence[Sequence[int]],
        sampling_params: Any = None,
        *,
        n: int | None = None,
    ) -> list[list[Sample]]:
        """Return ``n`` completions of each prompt. They count as evaluation, not as training data.

        ``sampling_params`` are keywords of ``Episode.generate``, as a mapping or an object with
        such attributes; vLLM's names are accepted. Each call draws new seeds unless ``seed`` is
        given: then a prompt's completions use ``seed``, ``seed + 1`` and so on.

        Raises:
            TurnRefused: no engine can ever serve one of the prompts.
        """
        sampling, n_requested = vllm_sampling(sampling_params)
        count = n_requested if n is None else n
        if count < 1:
            raise ConfigError(f"n counts completions of each prompt, at least 1; got n={count}")
        seed = sampling.pop("seed", None)
        requests = [
            _CompletionRequest(
                [int(token) for token in prompt],
                sampling,
                self._next_seed() if seed is None else int(seed) + index,
            )
            for prompt in prompt_token_ids
            for index in range(count)
        ]
        samples = self._generate(requests)
        return [samples[at : at + count] for at in range(0, len(samples), count)]

    generate_sequences = generate

    def add_requests(self, sampling_params: Any, prompt_token_ids: Sequence[Sequence[int]]) -> None:
        """Generate, and keep the completions for :meth:`get_responses`."""
        self._responses.append(
            [sample for of in self.generate(prompt_token_ids, sampling_params) for sample in of]
        )

    def get_responses(self) -> list[Sample]:
        """Return the completions of the oldest :meth:`add_requests`.

        Raises:
            ConfigError: there are none.
        """
        if not self._responses:
            raise ConfigError(
                "get_responses() has no requests to wait for; call add_requests() first"
            )
        return self._responses.pop(0)

    def compute_log_probs(
        self,
        sequences: Sequence[Sequence[int]],
        start: int | Sequence[int] = 1,
        *,
        temperature: float = 1.0,
    ) -> list[list[float]]:
        """Return the log-probs of each sequence's tokens from ``start`` on, under live weights."""
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
        """Join the ``torch.distributed`` group in which the trainer (rank 0) broadcasts weights, as
        rank ``rank_offset``. It becomes this process's default group.

        Raises:
            ConfigError: the backend is not gloo.
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
        """Receive one tensor by broadcast. With ``empty_cache``, which the frameworks set for
        the last tensor, publish all received tensors and return their version."""
        import torch
        import torch.distributed as dist

        if self._group is None:
            raise ConfigError(
                "update_weight() has no group to receive weights from; call "
                "init_weights_update_group() first"
            )
        tensor_dtype = (
            dtype if isinstance(dtype, torch.dtype) else getattr(torch, _dtype_name(dtype), None)
        )
        if not isinstance(tensor_dtype, torch.dtype):
            raise WeightsRefused(
                f"tensor {name!r} has dtype {dtype!r}, which this torch does not have; send "
                "float32, bfloat16 or float16"
            )
        tensor = torch.empty(tuple(shape), dtype=tensor_dtype)
        dist.broadcast(tensor, 0, group=self._group)
        self._received[name] = tensor
        if not empty_cache:
            return None
        state_dict, self._received = self._received, {}
        return self._run.publish(state_dict)

    def update_weights(
        self, weights: "Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]]"
    ) -> int:
        """Publish weights, as a mapping or verl's pairs of name and tensor; return their version.

        Raises:
            WeightsRefused: they do not fit the model; the old ones stay live.
        """
        return self._run.publish(dict(weights))

    def reset_prefix_cache(self) -> None:
        """Clear the prefix cache. Not needed for weight updates."""
        self._run.pause("keep", clear_cache=True)
        self._run.resume()

    # ------------------------------------------------------------ memory

    def sleep(self, level: SleepLevel = 1) -> int:
        """Release the memory of weights and KV; return the number of bytes. After level 2,
        weights must be published before generating; see ``Rollouts.sleep``."""
        return self._run.sleep(level)

    def wake_up(self, tags: Sequence[MemoryTag] | None = None) -> None:
        """Allocate the released memory again."""
        self._run.wake(tags)

    def release(self) -> int:
        """Alias of :meth:`sleep`, under verl's name."""
        return self.sleep()

    def resume(self, tags: Sequence[MemoryTag] = MEMORY_TAGS) -> None:
        """Alias of :meth:`wake_up`, under verl's name."""
        self.wake_up(tags)

    # ------------------------------------------------------------ identity

    def get_world_size(self) -> int:
        """Return the number of processes that join a weight broadcast: 1 for all engines."""
        return 1

    def health(self) -> bool:
        """Return whether an engine is alive."""
        return any(engine.is_alive for engine in self._run.statistics().engines)

    @property
    def version(self) -> int:
        """Version of the last published weights."""
        return self._run.version

    # ------------------------------------------------------------ generation

    def _next_seed(self) -> int:
        return (self._seed << 40) + next(self._requested)

    def _generate(self, requests: Sequence[_CompletionRequest]) -> list[Sample]:
        """Run one episode of one turn for each request, concurrently."""
        turns: dict[int, GeneratedTurn] = {}

        async def one_turn(episode: Episode, number: int) -> float:
            request = requests[number]
            episode.append(request.prompt)
            turns[number] = await episode.generate(seed=request.seed, **request.sampling)
            return 0.0

        self._run.evaluate(range(len(requests)), episode=one_turn, name=None)
        missing = [number for number in range(len(requests)) if number not in turns]
        if missing:
            raise EpisodeError(
                f"{len(missing)} of {len(requests)} samples could not be generated, the first for "
                f"the prompt {requests[missing[0]].prompt[:20]}; the log says why"
            )
        return [_sample(request.prompt, turns[number]) for number, request in enumerate(requests)]


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


def vllm_sampling(params: Any) -> tuple[dict[str, Any], int]:
    """Return keywords of ``generate`` and ``n``; attributes of a vLLM object may be None."""
    if params is None:
        return {}, 1
    given = dict(params) if isinstance(params, Mapping) else _attributes(params)
    count = int(given.get("n") or 1)
    sampling = {
        VLLM_NAMES.get(name, name): value
        for name, value in given.items()
        if name not in IGNORED and value is not None
    }
    if isinstance(sampling.get("stop_strings"), str):  # vLLM accepts a single string
        sampling["stop_strings"] = [sampling["stop_strings"]]
    if sampling.get("top_k") == -1:  # vLLM's value for no limit
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
