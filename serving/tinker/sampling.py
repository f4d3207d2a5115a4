"""``asample``: checks a request, samples it as rollouts of the run, and scores its prompt.

Samples are evaluation rollouts (:class:`ActiveRequests`); the log-probs of prompts are scores of
the run.
"""

import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tidegate.errors import TurnRefused
from tidegate.orchestrator.fleet.scores import ScoreQuery, TokenScores
from tidegate.serving.http.errors import ApiError
from tidegate.serving.openai.active_requests import ActiveRequest, ActiveRequests, choice_seeds
from tidegate.serving.openai.model_info import Limits, limits_of
from tidegate.serving.openai.requests import CHOICES_MAX, Prompt
from tidegate.serving.tinker.messages import SampleRequest, SamplingFields
from tidegate.serving.tinker.protobuf import (
    MASKED_LOGPROB,
    SampledSequence,
    SampleResult,
    TopTokens,
)
from tidegate.serving.tinker.samplers import AdapterVersion, EngineAdapters, Sampler
from tidegate.serving.tinker.training import UserError
from tidegate.transport.scoring import TOP_LOGPROBS_MAX

if TYPE_CHECKING:
    from tidegate.orchestrator.episodes.generated_turn import GeneratedTurn
    from tidegate.orchestrator.fleet.fleet import Fleet
    from tidegate.orchestrator.fleet.score_dispatcher import ScoreDispatcher
    from tidegate.orchestrator.trainer.run import Run

REFUSED: Mapping[str, tuple[Any, str]] = {
    "base_model": (None, "create a sampling session of it first, as the SDK does"),
    "model_path": (None, "create a sampling session of it first, as the SDK does"),
    "target_prompt_logprobs": (None, "use topk_prompt_logprobs, or prompt_logprobs of each token"),
    "prompt_alt_tokens_k": (0, "sample each position's continuation with max_tokens=1"),
    "record_stability_info": (
        False,
        "it is for stable_reinforce, whose formula is not published; use loss_fn='ppo', or start "
        "the server with --stable-reinforce ppo, which computes that loss instead",
    ),
}
"""Fields that must have this value or be omitted, and what to do instead."""


class SampleRunner:
    """Carries out ``asample`` requests on the run's engines."""

    def __init__(
        self,
        fleet: "Fleet",
        scores: "ScoreDispatcher",
        requests: ActiveRequests,
        adapters: EngineAdapters,
        stop_token_ids: Sequence[int],
        *,
        takes_stability: bool,
    ) -> None:
        """``stop_token_ids``: the model's own. ``takes_stability``: whether samples may be asked
        for with ``record_stability_info``, because another loss than ``stable_reinforce`` is
        computed, which needs none."""
        self._fleet, self._dispatcher = fleet, scores
        self._requests = requests
        self._adapters = adapters
        self._stop_token_ids = list(stop_token_ids)
        self._accepted = {"record_stability_info"} if takes_stability else set()

    async def sample(
        self, request_id: str, sampler: Sampler, request: SampleRequest
    ) -> SampleResult:
        """Sample a request's sequences, and score its prompt if requested.

        Cancelling this ends them.

        Raises:
            UserError: the request can never be carried out.
        """
        token_ids = _prompt_of(request)
        options = self._checked(request, token_ids)
        async with self._adapters.use(sampler) as weights:
            if weights.adapter:
                options["adapter"] = weights.adapter
                options["adapter_version"] = weights.version
            if weights.cache_salt:
                options["cache_salt"] = weights.cache_salt
            seeds = choice_seeds(request.sampling_params.seed, request.num_samples)
            prompt = Prompt(token_ids)
            active = self._requests.begin(
                request_id, [(prompt, {**options, "seed": seed}) for seed in seeds]
            )
            try:
                scores = await self._scores(request, token_ids, weights)
                await active.wait()
            except TurnRefused as error:
                raise UserError(str(error)) from error
            finally:
                active.abort()
        logprobs, top = scores
        samples = self._samples_of(active, weights.adapter, request.topk_sample_logprobs)
        return SampleResult(samples, logprobs, top)

    def _checked(self, request: SampleRequest, token_ids: Sequence[int]) -> dict[str, Any]:
        """Return the options of ``Episode.generate`` that a request means."""
        for name, (default, instead) in REFUSED.items():
            if getattr(request, name) not in (None, default) and name not in self._accepted:
                raise UserError(f"{name} is not served here: {instead}")
        if not 1 <= request.num_samples <= CHOICES_MAX:
            raise UserError(f"num_samples must be in [1, {CHOICES_MAX}], got {request.num_samples}")
        for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
            if not 0 <= getattr(request, name) <= TOP_LOGPROBS_MAX:
                got = getattr(request, name)
                raise UserError(f"{name} must be in [0, {TOP_LOGPROBS_MAX}], got {got}")
        last_n = request.prompt_logprobs_last_n
        if last_n is not None and not 1 <= last_n < len(token_ids):
            raise UserError(
                f"prompt_logprobs_last_n must be in [1, {len(token_ids)}) for this prompt, got "
                f"{last_n}"
            )
        limits = limits_of(self._fleet)
        _refuse_prompt(token_ids, limits)
        options = self._options(request.sampling_params, limits)
        left = limits.context_tokens_max - len(token_ids)
        tokens_max = request.sampling_params.max_tokens
        if tokens_max is not None and tokens_max < 1:
            raise UserError(f"max_tokens must be at least 1, got {tokens_max}")
        options["max_tokens"] = left if tokens_max is None else min(left, tokens_max)
        if request.topk_sample_logprobs:
            options["top_logprobs"] = request.topk_sample_logprobs
        return options | request.attachment_options

    def _options(self, sampling: SamplingFields, limits: Limits) -> dict[str, Any]:
        if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
            raise UserError(f"temperature must be 0 or more, got {sampling.temperature}")
        if not 0 < sampling.top_p <= 1:
            raise UserError(f"top_p must be in (0, 1], got {sampling.top_p}")
        strings, ids = _stops(sampling.stop)
        _refuse_unknown(ids, limits)
        # An empty list means no stop at all; anything else adds to the model's own end token.
        own = [] if sampling.stop == [] else self._stop_token_ids
        options: dict[str, Any] = {
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": min(max(0, sampling.top_k), limits.vocab_size),
            "stop_token_ids": [*own, *ids],
        }
        return options | ({"stop_strings": strings} if strings else {})

    # ------------------------------------------------------------ prompts' log-probs

    async def _scores(
        self, request: SampleRequest, token_ids: Sequence[int], weights: AdapterVersion
    ) -> tuple[npt.NDArray[np.float32] | None, TopTokens | None]:
        k, length = request.topk_prompt_logprobs, len(token_ids)
        if not request.prompt_logprobs and not k:
            return None, None
        start = max(1, length - (request.prompt_logprobs_last_n or length))
        logprobs = np.full(length, np.nan, np.float32)
        ids = np.zeros((length, k), np.int32)
        tops = np.full((length, k), MASKED_LOGPROB, np.float32)
        if length > start:
            query = ScoreQuery(
                np.asarray(token_ids, "<i4").tobytes(),
                "logprobs",
                start,
                k,
                adapter=weights.adapter,
                adapter_version=(weights.version or 0) if weights.adapter else None,
            )
            future = self._dispatcher.submit(query)
            try:
                scores = await future
            finally:
                future.cancel()
            assert isinstance(scores, TokenScores)
            logprobs[start:] = scores.logprobs
            ids[start:], tops[start:] = scores.top_ids, scores.top_logprobs
        return (
            logprobs if request.prompt_logprobs else None,
            TopTokens(ids, tops) if k else None,
        )

    # ------------------------------------------------------------ samples

    def _samples_of(self, active: ActiveRequest, adapter: str, top: int) -> list[SampledSequence]:
        samples = []
        for choice in active.choices:
            turn = choice.current_turn()
            if turn is None or turn.finish_reason == "cancelled":
                raise ApiError(503, "the sample was aborted; send the request again")
            samples.append(
                SampledSequence(
                    turn.token_ids,
                    turn.logprobs,
                    turn.finish_reason == "stop",
                    _top_of(turn, top) if top else None,
                    self._spans(turn, adapter),
                    turn.json_fields("position"),
                )
            )
        return samples

    def _spans(self, turn: "GeneratedTurn", adapter: str) -> list[dict[str, Any]]:
        """Return spans of tokens, each with the version that sampled it and the versions of its
        KV."""
        return [
            {
                "start": span.start,
                "end": span.end,
                "adapter": adapter,
                "version": span.version,
                "optimizer_steps": self._adapters.steps.get((adapter, span.version), 0),
                "kv": span.kv_label,
            }
            for span in turn.spans
        ]


class OtherModel:
    """Carries out ``asample`` requests of a base model that has a run of its own."""

    def __init__(self, run: "Run", *, takes_stability: bool) -> None:
        """``run`` has started. The methods are called on another loop than the run's."""
        scheduler = run.scheduler
        assert scheduler is not None
        self._run, self._fleet = run, scheduler.fleet
        self._runner = SampleRunner(
            scheduler.fleet,
            scheduler.scores,
            ActiveRequests(scheduler.handle),
            EngineAdapters(run, scheduler.engines.adapters),
            run.model.stop_token_ids,
            takes_stability=takes_stability,
        )

    @property
    def directory(self) -> Path:
        """Directory of the model."""
        return self._run.settings.model.resolve()

    async def limits(self) -> Limits:
        """Return the engine's limits."""

        async def read(_: object) -> Limits:
            return limits_of(self._fleet)

        return await asyncio.wrap_future(self._run.submit(read))

    async def sample(
        self, request_id: str, sampler: Sampler, request: SampleRequest
    ) -> SampleResult:
        """As :meth:`SampleRunner.sample`."""

        async def sample(_: object) -> SampleResult:
            return await self._runner.sample(request_id, sampler, request)

        return await asyncio.wrap_future(self._run.submit(sample))


def _prompt_of(request: SampleRequest) -> list[int]:
    token_ids: list[int] = []
    for chunk in request.prompt.chunks:
        if chunk.type != "encoded_text":
            raise UserError(f"the prompt has a chunk of {chunk.type}; only encoded_text is served")
        token_ids += chunk.tokens
    return token_ids


def _refuse_prompt(token_ids: Sequence[int], limits: Limits) -> None:
    if not token_ids:
        raise UserError("the prompt has no token; give at least 1")
    if len(token_ids) >= limits.context_tokens_max:
        raise UserError(
            f"the prompt has {len(token_ids)} tokens, which leaves none to sample in a context of "
            f"{limits.context_tokens_max}; shorten it"
        )
    _refuse_unknown(token_ids, limits)


def _refuse_unknown(token_ids: Sequence[int], limits: Limits) -> None:
    unknown = next((each for each in token_ids if not 0 <= each < limits.vocab_size), None)
    if unknown is not None:
        raise UserError(f"token ids must be in [0, {limits.vocab_size}), got {unknown}")


def _stops(stop: str | list[str | int] | None) -> tuple[list[str], list[int]]:
    if isinstance(stop, str):
        return [stop], []
    strings = [each for each in stop or () if isinstance(each, str)]
    return strings, [each for each in stop or () if isinstance(each, int)]


def _top_of(turn: "GeneratedTurn", k: int) -> TopTokens:
    positions = turn.top_logprobs or [{} for _ in turn.token_ids]
    ids = np.zeros((len(positions), k), np.int32)
    logprobs = np.full((len(positions), k), MASKED_LOGPROB, np.float32)
    for row, position in enumerate(positions):
        for column, (token_id, logprob) in enumerate(list(position.items())[:k]):
            ids[row, column], logprobs[row, column] = token_id, logprob
    return TopTokens(ids, logprobs)
