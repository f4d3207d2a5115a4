"""Log-probabilities of sampled tokens under archived weights, for `tidegate audit`.

Computed with `transformers`, its repetition penalty included. Other penalties, biases and
processors are reimplemented from their formulas, without the engine's sampling code, so that an
engine's fault can't hide in its own proof. User-defined processors and grammars can't be replayed:
see :func:`replay_plan.is_replayable`.

Letters in shapes: B contexts, P past positions, T new ones, N tokens, V vocabulary, H heads, D
width.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from tidegate.engine.execution.block_cache import (
    cache_argument,
    empty_cache,
    has_recurrent_layers,
)
from tidegate.observability.audit.archived_model import load_version
from tidegate.observability.audit.replay_plan import (
    NO_ADAPTER,
    Replay,
    ReplayedAdapter,
    Segment,
)
from tidegate.policies.routing_replay import is_mixture, mixture_layers, replay_routed_experts
from tidegate.transport.images import MODEL_TYPES
from tidegate.transport.messages import SamplingParams
from tidegate.transport.sampling import LogitsProcessor

Tokens = npt.NDArray[np.int32]


def edit_logits(
    logits: torch.Tensor, segment: Segment, context: Tokens, first: int
) -> torch.Tensor:
    """Return logits [N, V] after penalties, biases and processors, from token ``first`` on.

    Returns ``logits`` unchanged if the turn has no such options. Temperature and filters come
    later.
    """
    options = segment.sampling.options
    if options is None:
        return logits
    start = segment.sampling.start
    rows = []
    for n, row in enumerate(logits):
        position = segment.position + first + n
        rows.append(_edit_row(row, options, context[:start], context[start:position]))
    return torch.stack(rows)


def _edit_row(
    x: torch.Tensor, options: SamplingParams, prompt: Tokens, output: Tokens
) -> torch.Tensor:
    x = x.clone()
    for item in options.logit_bias:
        x[item.token_id] += item.bias
    if len(output) < options.min_tokens:
        x[[t for t in options.stop_token_ids if 0 <= t < len(x)]] = -torch.inf
    if options.repetition_penalty != 1:
        penalty: Any = transformers.RepetitionPenaltyLogitsProcessor(options.repetition_penalty)
        token_ids = torch.from_numpy(np.concatenate([prompt, output]).astype(np.int64))
        x = torch.as_tensor(penalty(token_ids[None], x[None])[0])
    counts = torch.from_numpy(np.bincount(output, minlength=len(x)).astype(np.float32))
    x = x - options.frequency_penalty * counts - options.presence_penalty * (counts > 0)
    for text in options.logits_processors:
        x = _apply_processor(x, LogitsProcessor.from_str(text), len(output))
    return x


def _apply_processor(x: torch.Tensor, processor: LogitsProcessor, index: int) -> torch.Tensor:
    arguments = processor.arguments
    if processor.name == "temperature_schedule":
        first, last = arguments["initial"], arguments["final"]
        share = min(1.0, index / arguments["warmup_tokens"])
        return x / float(first + (last - first) * share)
    mask = torch.zeros(len(x), dtype=torch.bool)
    mask[arguments["token_ids"]] = True
    if processor.name == "allowed_tokens":
        mask = ~mask
    return x.masked_fill(mask, -torch.inf)


BATCH_TOKENS_MAX = 2048
"""Padded positions of one forward pass. More gives a small model no speed on a CPU, and logits
of a 150,000-token vocabulary would take more than 1 GB."""

FLOAT32_NOISE_FACTOR = 3.0
"""Factor for the noise of float32 replays of float32 engines. Two replays with equal weights differ
slightly, so one of two histories seems closer by chance: over 40 tokens, by a standard deviation of
some six nats. This factor reduces it to two, far from the odds at which a tag counts as wrong."""

EDGE = 1e-5
"""Rounding error of a cumulative sum of probabilities. A token this close to the top-p threshold
may fall on either side in two correct implementations."""

Layers = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values per layer, [H, P, D] each."""


def replay_all(
    replays: Iterable[Replay],
    weights: Callable[[int], Path],
    progress: Callable[[int], None] = lambda version: None,
    *,
    own_weights: Callable[[str, int], Path],
    quantization: str = "",
    in_double: bool = False,
) -> None:
    """Fill in ``replayed`` of every segment, loading each version as rarely as possible.

    Args:
        replays: are processed together, version by version.
        weights: returns the directory of a version.
        own_weights: returns the directory of a version that the named adapter counts itself.
        progress: called with each version before it is loaded.
        quantization: format to which the engines quantized the weights; empty for none.
        in_double: compute in float64 if the model's code can, so that replays by equal weights are
            equal, whatever their batches. Needed where engines computed in float32, whose noise is
            as small as the replay's would be.

    Raises:
        AuditError: weights can't be loaded.
    """
    due: defaultdict[tuple[int, ReplayedAdapter], list[Replay]] = defaultdict(list)
    pasts: dict[int, Any] = {}
    for replay in replays:
        due[_weights_due(replay)].append(replay)
    key = (-1, NO_ADAPTER)
    while due:
        # Versions mostly increase along a context, so one ascending sweep finishes nearly all.
        key = min((v for v in due if v > key), default=min(due))
        version, adapter = key
        progress(version)
        own = own_weights(adapter.name, version) if adapter.has_own_versions else None
        model = load_version(
            version, weights, adapter.name, own_version=own, quantization=quantization
        )
        noise_factor = 1.0
        has_routers = is_mixture(model)
        is_recurrent = has_recurrent_layers(
            model.config
        )  # computes its states in float32 in any dtype
        if in_double:
            is_double = not is_recurrent and _computes_in_double(model)
            noise_factor = 1.0 if is_double else FLOAT32_NOISE_FACTOR
            model = model.double() if noise_factor == 1.0 else model.float()
        due_now = due.pop(key)
        batches = (
            [[r] for r in due_now]
            if is_recurrent
            else _batches(due_now, model.config.get_text_config().vocab_size)
        )
        for batch in batches:
            if is_recurrent:
                _read_recurrent(model, batch[0], pasts)
            else:
                _read(model, batch, pasts)
            for replay in batch:
                routes = replay.routes
                for segment in replay.segments:
                    segment.noise_factor = noise_factor
                    is_routed = routes is not None and routes.are_known_to(segment)
                    segment.is_unrouted = has_routers and segment.is_rounded and not is_routed
                replay.stages_done += 1
                if replay.stages_done < len(replay.stages):
                    due[_weights_due(replay)].append(replay)


@torch.inference_mode()
def _computes_in_double(model: Any) -> bool:
    """Return whether a model's code gives the same log-probs in float64 as in float32.

    Grouped products of experts take no float64, and some masks overflow in it. The model is in
    float64 afterwards.
    """
    token_ids = torch.zeros(2, 3, dtype=torch.long)
    mask = torch.tensor([[1, 1, 1], [0, 1, 1]])  # padded on the left, as batches are
    expected = model(input_ids=token_ids, attention_mask=mask).logits[:, -1]
    try:
        result = model.double()(input_ids=token_ids, attention_mask=mask).logits[:, -1]
    except RuntimeError:
        return False
    return torch.allclose(result.float(), expected, rtol=1e-3, atol=1e-3)


def _batches(replays: list[Replay], vocab_size: int) -> Iterator[list[Replay]]:
    """Batch contexts of similar length, to limit padding."""
    # Logits dominate memory with a large vocabulary: limit them to 2^27 floats, 0.5 GB.
    tokens_max = min(BATCH_TOKENS_MAX, max(1, 2**27 // vocab_size))
    replays = sorted(replays, key=lambda r: (r.stage.start, r.stage.end))
    batch: list[Replay] = []
    past = new = 0
    for replay in replays:
        start, end = replay.stage.start, replay.stage.end
        past, new = max(past, start), max(new, end - start)
        if batch and (len(batch) + 1) * (past + new) > tokens_max:
            yield batch
            batch, past, new = [], start, end - start
        batch.append(replay)
    if batch:
        yield batch


def _weights_due(replay: Replay) -> tuple[int, ReplayedAdapter]:
    """Return the version that reads the context next, and the adapter."""
    return replay.stage.version, replay.adapter


@torch.inference_mode()
def _read_recurrent(model: Any, replay: Replay, pasts: dict[int, Any]) -> None:
    """Run one stage of one context of a model with recurrent states, and keep its cache.

    The state continues from the state that the versions of earlier stages left, as in the engine.
    Padding would enter the states, so contexts are not batched.
    """
    stage = replay.stage
    cache = pasts.pop(id(replay), None) or empty_cache(model)
    token_ids = torch.from_numpy(replay.context[stage.start : stage.end].astype(np.int64))
    with _recorded_routing(model, [replay], stage.end - stage.start):
        output = model(
            input_ids=token_ids[None],
            attention_mask=torch.ones(1, stage.end, dtype=torch.long),
            use_cache=True,
            **cache_argument(model, cache),
        )
    _store_logprobs(output.logits, [replay])
    if replay.stages_done + 1 < len(replay.stages):
        pasts[id(replay)] = cache


@torch.inference_mode()
def _read(model: Any, batch: list[Replay], pasts: dict[int, Any]) -> None:
    """Run one stage of each context, and keep the KV of contexts with further stages.

    The past is padded on the left and new tokens on the right, so that they meet in one column.
    """
    stages = [replay.stage for replay in batch]
    past = max(stage.start for stage in stages)
    new = max(stage.end - stage.start for stage in stages)
    token_ids = torch.zeros(len(batch), new, dtype=torch.long)
    mask = torch.zeros(len(batch), past + new, dtype=torch.long)
    for row, (replay, stage) in enumerate(zip(batch, stages, strict=True)):
        count = stage.end - stage.start
        token_ids[row, :count] = torch.from_numpy(
            replay.context[stage.start : stage.end].astype(np.int64)
        )
        mask[row, past - stage.start : past + count] = 1
    starts = torch.tensor([stage.start for stage in stages])
    inputs = {"input_ids": token_ids, "position_ids": starts[:, None] + torch.arange(new)}
    if any(replay.images for replay in batch):
        inputs = _image_inputs(model, batch, token_ids, inputs["position_ids"])
    cache = _joined_pasts([pasts.pop(id(r), []) for r in batch], past)
    with _recorded_routing(model, batch, new):
        output = model(
            **inputs,
            attention_mask=mask,
            use_cache=True,
            **cache_argument(model, cache),
        )
    if model.config.model_type in MODEL_TYPES:
        output.logits[..., model.config.image_token_id] = -torch.inf  # engines never sample it
    _store_logprobs(output.logits, batch)
    for row, (replay, stage) in enumerate(zip(batch, stages, strict=True)):
        if replay.stages_done + 1 < len(replay.stages):
            positions = slice(past - stage.start, past + stage.end - stage.start)
            pasts[id(replay)] = [
                (layer.keys[row, :, positions].clone(), layer.values[row, :, positions].clone())
                for layer in cache.layers
            ]


def _image_inputs(
    model: Any, batch: list[Replay], token_ids: torch.Tensor, positions: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return embeddings [B, T, H] of a stage's tokens, with images in place of their placeholders,
    and rotary positions [3, B, T], by transformers' own function."""
    embeddings = model.get_input_embeddings()(token_ids)
    places = positions.repeat(3, 1, 1)
    for row, replay in enumerate(batch):
        stage = replay.stage
        types = torch.zeros(1, len(replay.context), dtype=torch.int32)
        grids = []
        for image in replay.images:
            media = image.media
            inputs = image.reader.process(media, image.reader.read(media))
            grids.append(torch.from_numpy(inputs.grid))
            first, end = media.token_offset, media.token_offset + media.tokens
            types[0, first:end] = 1
            start, stop = max(first, stage.start), min(end, stage.end)
            if start < stop:
                pixels = torch.from_numpy(inputs.pixel_values)
                vision = model.get_image_features(pixels, grids[-1][None])
                features = torch.cat(tuple(vision.pooler_output)).to(embeddings.dtype)
                embeddings[row, start - stage.start : stop - stage.start] = features[
                    start - first : stop - first
                ]
        if grids:
            context = torch.from_numpy(replay.context.astype(np.int64))[None]
            rotary, _ = model.model.get_rope_index(context, types, torch.stack(grids))
            places[:, row, : stage.end - stage.start] = rotary[:, 0, stage.start : stage.end]
    return {"inputs_embeds": embeddings, "position_ids": places}


@contextmanager
def _recorded_routing(model: Any, batch: list[Replay], new: int) -> Iterator[None]:
    """Replay the recorded routed experts in a forward pass of ``new`` tokens of each context, and
    note how far each is from the model's own choice."""
    routed = [(row, r, r.routes) for row, r in enumerate(batch) if r.routes is not None]
    if not routed:
        yield
        return
    layers = mixture_layers(model)
    experts_max = min(layer.num_experts for layer in layers)
    per_token = max(routes.experts.shape[2] for _, _, routes in routed)
    experts = torch.zeros(len(batch), new, len(layers), per_token, dtype=torch.long)
    known = torch.zeros(len(batch), new, dtype=torch.bool)
    for row, replay, routes in routed:
        stage = replay.stage
        chosen, part = slice(stage.start, stage.end), routes.experts[stage.start : stage.end]
        ids = np.sort(part.astype(np.int64), -1)
        is_possible = routes.known[chosen].copy()
        if part.shape[1:] == experts.shape[2:]:
            is_possible &= (ids < experts_max).all((1, 2)) & (ids[..., 1:] > ids[..., :-1]).all(
                (1, 2)
            )
            experts[row, : len(part)] = torch.from_numpy(part.astype(np.int64))
        else:
            is_possible[:] = False
        known[row, : len(part)] = torch.from_numpy(is_possible)
        routes.errors[chosen][routes.known[chosen] & ~is_possible] = np.inf

    def note(number: int, scores: torch.Tensor, ids: torch.Tensor) -> None:
        errors = route_errors(scores, ids).view(len(batch), new).numpy()
        for row, replay, routes in routed:
            stage = replay.stage
            noted = routes.errors[stage.start : stage.end]
            np.maximum(noted, errors[row, : len(noted)], out=noted)

    with replay_routed_experts(model, experts, known, on_choice=note):
        yield


def route_errors(scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Return by how much the best expert that was not chosen exceeds the worst of ``ids`` [N, k]; 0
    or more.

    In nats: scores [N, E] that are probabilities are compared by their logarithms, others, such as
    logits, as they are.
    """
    is_probability = bool((scores >= 0).all() and (scores <= 1).all())
    ranked = scores.log() if is_probability else scores
    worst = ranked.gather(-1, ids).amin(-1)
    best_left_out = ranked.scatter(-1, ids, -torch.inf).amax(-1)
    return (best_left_out - worst).clamp(min=0).nan_to_num(nan=0.0).float()


def _joined_pasts(pasts: list[Layers], past: int) -> Any:
    """Pad pasts on the left to ``past`` positions, and stack them into a transformers cache."""
    cache = transformers.DynamicCache()
    example = next((layers for layers in pasts if layers), None)
    if example is None:
        return cache
    for index, (sample, _) in enumerate(example):
        shape = (len(pasts), sample.shape[0], past, sample.shape[2])
        keys, values = sample.new_zeros(shape), sample.new_zeros(shape)
        for row, layers in enumerate(pasts):
            if layers:
                count = layers[index][0].shape[1]
                keys[row, :, past - count :], values[row, :, past - count :] = layers[index]
        cache.update(keys, values, index)
    return cache


def _store_logprobs(logits: torch.Tensor, batch: list[Replay]) -> None:
    """Store the log-probs of all tokens whose logits this stage computed. logits: [B, T, V]"""
    slices: list[tuple[Segment, int, int]] = []
    rows: list[torch.Tensor] = []
    for row, replay in enumerate(batch):
        stage = replay.stage
        for segment in replay.segments:
            # Token i of a segment is drawn from the logits of the position before it.
            first = max(stage.start, segment.position - 1)
            last = min(stage.end, segment.position - 1 + len(segment.token_ids))
            if first < last:
                offset = first - segment.position + 1
                slices.append((segment, offset, offset + last - first))
                drawn_from = logits[row, first - stage.start : last - stage.start]
                rows.append(edit_logits(drawn_from, segment, replay.context, offset))
    if not slices:
        return
    for (segment, start, _), edited in zip(slices, rows, strict=True):
        _store_kept_errors(segment, start, edited)
    chosen = torch.cat(rows)
    token_ids = np.concatenate([s.token_ids[a:b] for s, a, b in slices]).astype(np.int64)
    recorded = np.concatenate([s.recorded[a:b] for s, a, b in slices])
    lengths = torch.tensor([b - a for _, a, b in slices])
    settings = torch.tensor(
        [
            [s.sampling.temperature, s.sampling.top_k, s.sampling.top_p, _min_p(s)]
            for s, _, _ in slices
        ]
    ).repeat_interleave(lengths, dim=0)
    logprobs = sampled_logprobs(
        chosen, torch.from_numpy(token_ids), settings, torch.from_numpy(recorded)
    ).numpy()
    cuts = itertools.accumulate(b - a for _, a, b in slices)
    for (segment, a, b), end in zip(slices, cuts, strict=True):
        segment.replayed[a:b] = logprobs[end - (b - a) : end]


def logprob_of(logits: torch.Tensor, segment: Segment, token: int, context: Tokens) -> float:
    """Return the log-prob of a segment's token, drawn from logits [V]."""
    sampling = segment.sampling
    edited = edit_logits(logits[None], segment, context, token)
    settings = [sampling.temperature, sampling.top_k, sampling.top_p, _min_p(segment)]
    recorded = torch.from_numpy(segment.recorded[token : token + 1])
    token_ids = torch.tensor([int(segment.token_ids[token])])
    return float(sampled_logprobs(edited, token_ids, torch.tensor([settings]), recorded))


def _store_kept_errors(segment: Segment, start: int, logits: torch.Tensor) -> None:
    """Check the kept sets of the segment's tokens from ``start`` on, drawn from logits [N, V]."""
    kept_sets, temperature = segment.sampling.kept_ids, segment.sampling.temperature
    if kept_sets is None:
        return
    scaled = logits / (temperature or 1.0)
    for index, row in enumerate(scaled, start):
        kept = kept_sets[segment.first_token + index]
        segment.kept_errors[index] = kept_set_error(
            row, kept, int(segment.token_ids[index]), float(segment.recorded[index])
        )


def kept_set_error(scaled: torch.Tensor, kept: list[int], token_id: int, recorded: float) -> float:
    """Return how far logits are from those under which a kept set was right, in nats.

    Whatever the options, a kept set has the likeliest tokens, and the sampled token's log-prob is
    that among them. So the result is the larger of how much a token that was cut off exceeds one
    that was kept, and the difference of the log-prob.

    Args:
        scaled: [V], logits divided by the temperature; -inf for tokens that were excluded before.
        kept: recorded ids; empty for all.
        token_id: the sampled token.
        recorded: its recorded log-prob.
    """
    if not kept:
        return abs(float(scaled[token_id] - scaled.logsumexp(0)) - recorded)
    if token_id not in kept:
        return float("inf")
    inside = scaled[kept]
    rest = scaled.clone()
    rest[kept] = -torch.inf
    difference = abs(float(scaled[token_id] - inside.logsumexp(0)) - recorded)
    return max(difference, float(rest.max() - inside.min()))


def _min_p(segment: Segment) -> float:
    options = segment.sampling.options
    return 0.0 if options is None else options.min_p


def sampled_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, settings: torch.Tensor, recorded: torch.Tensor
) -> torch.Tensor:
    """Return the log-prob of each token under the distribution from which it was drawn.

    Args:
        logits: [N, V], float32 or float64.
        token_ids: [N], int64.
        settings: [N, 4]: temperature, top-k (0: off), top-p (1: off) and min-p (0: off). min-p is
            applied first. Temperature 0 means the unfiltered distribution at temperature 1.
        recorded: [N], the recorded log-probs; they decide for a token at the threshold of top-p or
            min-p.

    Returns:
        [N], of the dtype of ``logits``; -inf if a filter excludes the token.
    """
    temperature, top_k, top_p, min_p = settings.unbind(1)
    is_greedy = temperature == 0
    scaled = logits / torch.where(is_greedy, 1.0, temperature)[:, None]
    token = scaled.gather(1, token_ids[:, None]).squeeze(1)
    result = token - scaled.logsumexp(1)
    filtered = ~is_greedy & ((top_k > 0) | (top_p < 1) | (min_p > 0))
    if filtered.any():
        result[filtered] = _filtered_logprobs(
            scaled[filtered], token[filtered], settings[filtered], recorded[filtered]
        )
    return result


def _filtered_logprobs(
    scaled: torch.Tensor,  # [N, V]
    token: torch.Tensor,  # [N], its scaled logit
    settings: torch.Tensor,
    recorded: torch.Tensor,
) -> torch.Tensor:
    """Renormalise over the tokens that min-p, top-k and then top-p keep.

    Tokens that tie with the last one kept may be kept or not, and rounding decides what ties. Of
    the possible results, return the one closest to ``recorded``.
    """
    _, top_k, top_p, min_p = settings.unbind(1)
    ordered = scaled.sort(1, descending=True).values
    is_beyond = (top_k[:, None] > 0) & (torch.arange(scaled.shape[1]) >= top_k[:, None])
    best = torch.full_like(token, -torch.inf)
    for shift in (0.0, -EDGE, EDGE):
        is_cut = is_beyond | (ordered < ordered[:, :1] + (min_p.log() + shift)[:, None])
        scale = ordered.masked_fill(is_cut, -torch.inf).logsumexp(1, keepdim=True)
        probability = (ordered - scale).exp()
        mass = probability.cumsum(1)
        # The smallest set whose sum reaches top_p: tokens before which the sum was below it.
        limit = torch.where(top_p < 1, top_p + shift, torch.inf)[:, None]
        kept = ((mass - probability < limit) & ~is_cut).sum(1, keepdim=True).clamp(min=1)
        lowest = ordered.gather(1, kept - 1)
        tied = (ordered >= lowest - EDGE).sum(1, keepdim=True)
        for count in (kept, tied):
            logprob = token - scale.squeeze(1) - mass.gather(1, count - 1).squeeze(1).log()
            is_closer = (logprob - recorded).abs() < (best - recorded).abs()
            is_kept = token >= lowest.squeeze(1) - EDGE
            best = torch.where(is_kept & is_closer, logprob, best)
    return best
