"""Replay of a run's tokens by the engine's own kernels, for `tidegate audit`.

Runs Tidegate's own engine code in this process: for each stage of a replay, the tagged version
computes the stage's context positions into the KV cache that earlier stages have filled, and
samples again, with the turn's seed, at every position that a token was sampled from. Deterministic
engines compute the same bits in any batch, so a sampled token or a log-prob that differs in one bit
proves a wrong tag, however near the two versions are. Those of others differ by rounding, because
their prompts were computed beside other ones. Unlike :mod:`replay`, it can't find faults that the
engine's own code has.

Letters in shapes: S sampled tokens of a step, V vocabulary.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from safetensors.torch import load_file

from tidegate.engine.execution.runner import ModelRunner, Row
from tidegate.engine.execution.served_model import OwnModel, ServedModel, open_model
from tidegate.engine.models.model_weights import Quantization, Weights, fill_from_directory
from tidegate.engine.sampling.options import OptionReader, RowOptions
from tidegate.engine.sampling.sampling import RowSampling
from tidegate.errors import AuditError, ConfigError, ModelError, TurnRefused, WeightsRefused
from tidegate.observability.audit.archived_model import VersionFiles
from tidegate.observability.audit.replay import Tokens, logprob_of
from tidegate.observability.audit.replay_plan import (
    NO_ADAPTER,
    EngineBuild,
    Replay,
    ReplayedAdapter,
    Segment,
)
from tidegate.transport.messages import SamplingParams, SubmitTurn
from tidegate.transport.regular_files import check_regular

CACHE_BYTES_MAX = 2**30
"""Bytes of the KV cache, which holds the contexts that are replayed together."""

STEP_LOGITS_MAX = 2**25
"""Logits of one step: 2**25 in float32 are 128 MiB."""

STEP_TOKENS_MAX = 2048
"""Context positions of one step."""

RIVAL_TOKENS = 1
"""Number of a rival's tokens that are sampled first. Mostly it differs from the record, which
decides: in bfloat16, a step of AdamW by 1e-6 changes the bits of nearly every log-prob. If it does
not, four tokens are sampled next, then 16, and so on."""


class EngineReplay:
    """Replays contexts by the engine's model runner, which gets each version's weights in turn."""

    def __init__(
        self,
        replays: Sequence[Replay],
        weights: Callable[[int], Path],
        progress: Callable[[int], None],
        *,
        own_weights: Callable[[str, int], Path],
        build: EngineBuild,
    ) -> None:
        """Open the model of the replays.

        Args:
            replays: all contexts that :meth:`run` will get; their weights are archived.
            weights: returns the directory of a version.
            progress: called with each version before it is loaded.
            own_weights: returns the directory of a version that the named adapter counts itself.
            build: how the run's engines computed.

        Raises:
            AuditError: weights can't be loaded, or this machine can't compute the model as the
                engines did.
        """
        self._weights_directory = weights
        self._progress = progress
        self._own_weights = own_weights
        self._model = _open_model(self._files(_weights_due(replays[0])).base, build)
        self._block_tokens = build.block_tokens
        block_bytes = self._model.kv_token_bytes() * build.block_tokens
        needed = [self._blocks(replay) for replay in replays]
        blocks = min(sum(needed), max(1, CACHE_BYTES_MAX // block_bytes))
        self._blocks_max = max(blocks, *needed)
        runner = self._model.make_runner(
            num_blocks=self._blocks_max, block_tokens=build.block_tokens
        )
        assert isinstance(runner, ModelRunner)  # open_model refuses others if deterministic
        self._runner = runner
        is_mixture = any(layer.has_experts for layer in runner.config.layers)
        if is_mixture and build.dtype != "float32" and not build.is_deterministic:
            raise AuditError("rounding decides which experts a token is routed to")
        self._is_deterministic = build.is_deterministic
        self._options = OptionReader(vocab_size=self._model.vocab_size, max_running_turns=1)

    def run(self, replays: Sequence[Replay]) -> None:
        """Fill in ``replayed`` of every segment.

        A token that a deterministic engine does not sample again gets NaN, which never agrees; and
        so do the tokens of a rival after one that differs from the record.
        """
        for batch in self._batches(replays):
            self._replay(batch)

    def _blocks(self, replay: Replay) -> int:
        return -(-replay.stages[-1].end // self._block_tokens)

    def _batches(self, replays: Sequence[Replay]) -> Iterator[list[Replay]]:
        """Yield replays whose contexts fit into the KV cache together."""
        batch: list[Replay] = []
        free = self._blocks_max
        # Ordered by version, so that a batch needs few versions.
        for replay in sorted(replays, key=lambda r: (r.stages[0].version, r.stages[-1].version)):
            if self._blocks(replay) > free:
                yield batch
                batch, free = [], self._blocks_max
            batch.append(replay)
            free -= self._blocks(replay)
        if batch:
            yield batch

    def _replay(self, batch: list[Replay]) -> None:
        """Compute all stages of a batch, in ascending order of versions as far as possible."""
        due: defaultdict[tuple[ReplayedAdapter, int], list[_Context]] = defaultdict(list)
        first_block = 0
        for replay in batch:
            blocks = range(first_block, first_block + self._blocks(replay))
            due[_weights_due(replay)].append(_Context(replay, [*blocks]))
            first_block = blocks.stop
        key = (NO_ADAPTER, -1)
        while due:
            key = min((each for each in due if each > key), default=min(due))
            self._progress(key[1])
            ready = due.pop(key)
            self._load(key)
            for wave in _waves(ready):
                for context in wave:
                    self._share(context)
                self._compute_together([self._rows(context) for context in wave])
            for context in ready:
                replay = context.replay
                replay.stages_done += 1
                if replay.stages_done < len(replay.stages) and not context.is_decided:
                    due[_weights_due(replay)].append(context)

    def _share(self, context: "_Context") -> None:
        """Take the KV of the positions before ``context.start`` from the context's leader: whole
        blocks as they are, and a copy of the one in the middle of which the context goes on."""
        if context.leader is None:
            return
        blocks, rest = divmod(context.start, self._block_tokens)
        leader = context.leader.table
        if rest:
            self._runner.copy_block(leader[blocks], context.table[blocks])
        context.table[:blocks] = leader[:blocks]

    def _files(self, key: tuple[ReplayedAdapter, int]) -> VersionFiles:
        adapter, version = key
        own = self._own_weights(adapter.name, version) if adapter.name else None
        return VersionFiles.find(version, self._weights_directory, own)

    def _load(self, key: tuple[ReplayedAdapter, int]) -> None:
        """Fill the runner's weights with an archived version and all of its adapters."""
        adapter, version = key
        files = self._files(key)
        weights = self._runner.weights
        assert isinstance(weights, Weights)
        try:
            fill_from_directory(weights, files.base)
            for path in files.overlays:
                check_regular(path)
                for name, tensor in load_file(path).items():
                    weights.load(name, tensor)
            adapters = {}
            for name, (path, scale) in files.adapters.items():
                check_regular(path)
                adapters[name] = weights.make_adapter(load_file(path), scale)
            weights.adapters = adapters
        except (ModelError, WeightsRefused, OSError) as error:
            of = f" of adapter {adapter.name!r}" if adapter.name else ""
            raise AuditError(
                f"the archived weights v{version}{of} can't be loaded: {error}"
            ) from error
        self._runner.swap(weights)

    def _compute_together(self, contexts: list[Iterator[list["_Sample"]]]) -> None:
        """Compute the rows of several contexts, list by list: lists of one number together."""
        while contexts:
            lists = [(context, next(context, None)) for context in contexts]
            contexts = [context for context, samples in lists if samples is not None]
            self._compute([sample for _, samples in lists for sample in samples or ()])

    def _rows(self, context: "_Context") -> Iterator[list["_Sample"]]:
        """Yield a stage's rows in the order of positions: chunks, which may be none, and single
        sampling positions in turns. A list is computed before the next one is asked for.

        As the engine does, prompts are computed as chunks and output token by token.
        """
        replay, start, end = context.replay, context.start, context.replay.stage.end
        drawn = context.drawn
        positions = sorted(drawn)
        stops_early = replay.is_rival and self._is_deterministic
        count = RIVAL_TOKENS if stops_early else len(positions)
        while positions:
            first = positions[0]
            burst = [p for n, p in enumerate(positions[:count]) if p == first + n]
            positions = positions[len(burst) :]
            yield self._chunks(context, start, first)
            yield [
                self._sample(context, position, segment, token)
                for position in burst
                for segment, token in drawn[position]
            ]
            start = burst[-1] + 1
            if stops_early and all(_is_refuted(segment, start) for segment in replay.segments):
                context.is_decided = True
                return
            count *= 4
        yield self._chunks(context, start, end)

    def _sample(
        self, context: "_Context", position: int, segment: Segment, token: int
    ) -> "_Sample":
        replay = context.replay
        row = Row(
            replay.context[position : position + 1],
            position,
            context.table,
            self._sampling(replay, segment, token),
            adapter=replay.adapter.name,
        )
        return _Sample(row, segment, token, replay.context)

    def _chunks(self, context: "_Context", start: int, end: int) -> list["_Sample"]:
        """Return rows that compute the KV of positions ``[start, end)`` and sample nothing."""
        tokens, adapter = context.replay.context, context.replay.adapter.name
        chunks = [
            (first, tokens[first : min(end, first + STEP_TOKENS_MAX)])
            for first in range(start, end, STEP_TOKENS_MAX)
        ]
        return [
            _Sample(Row(chunk, first, context.table, None, adapter=adapter))
            for first, chunk in chunks
        ]

    def _sampling(self, replay: Replay, segment: Segment, token: int) -> RowSampling:
        turn = segment.sampling
        index = segment.first_token + token
        params = turn.options or SamplingParams(
            max_tokens=turn.length, temperature=turn.temperature, top_k=turn.top_k, top_p=turn.top_p
        )
        return RowSampling(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            seed=turn.seed,
            index=index,
            options=self._row_options(replay, params, turn.start, index),
        )

    def _row_options(
        self, replay: Replay, params: SamplingParams, start: int, index: int
    ) -> RowOptions | None:
        """Return the turn's options as they are after ``index`` output tokens."""
        known = replay.context[: start + index].astype("<i4")
        # Stop strings end a turn, and change no probability; they would need the tokenizer.
        sampling = msgspec.structs.replace(params, stop_strings=[])
        message = SubmitTurn(
            turn=0, token_ids=known.tobytes(), sampling=sampling, sampled_before=index
        )
        try:
            options = self._options.read(message, replay.context)
        except TurnRefused as error:
            raise AuditError(
                f"a turn's recorded sampling options are refused now: {error}. Audit with the "
                "version that recorded the run, or leave --exact out"
            ) from error
        if options is None and params.stop_strings:
            return RowOptions(sampling, replay.context, start)
        return options

    def _compute(self, samples: list["_Sample"]) -> None:
        """Run rows in steps of limited size, and store what they sample."""
        step: list[_Sample] = []
        tokens = sampled = 0
        sampled_max = max(1, STEP_LOGITS_MAX // self._model.vocab_size)
        for sample in samples:
            count, draws = len(sample.row.token_ids), sample.segment is not None
            if step and (tokens + count > STEP_TOKENS_MAX or sampled + draws > sampled_max):
                self._run(step)
                step, tokens, sampled = [], 0, 0
            step.append(sample)
            tokens, sampled = tokens + count, sampled + draws
        if step:
            self._run(step)

    def _run(self, step: list["_Sample"]) -> None:
        rows = [sample.row for sample in step]
        output, logits = self._runner.step_with_logits(rows)
        drawn = [(s.segment, s.token, s.context) for s in step if s.segment is not None]
        for n, (segment, token, context) in enumerate(drawn):
            is_same = output.token_ids[n] == segment.token_ids[token] and n not in output.failures
            if is_same:
                segment.replayed[token] = output.logprobs[n]
            elif not self._is_deterministic:
                # Rounding decided between two tokens: what the recorded one's log-prob would be.
                segment.replayed[token] = logprob_of(logits[n], segment, token, context)


@dataclass(slots=True)
class _Context:
    """A replay, and its place in the KV cache."""

    replay: Replay
    table: list[int]
    """KV blocks of its positions."""
    drawn: Mapping[int, list[tuple[Segment, int]]] = field(default_factory=dict)
    """Tokens to sample in the stage under way, by :func:`_drawn`."""
    start: int = 0
    """First position of the stage under way that is to be computed."""
    leader: "_Context | None" = None
    """Context of which the positions before ``start`` are taken, if it has computed them."""
    wave: int = 0
    """Contexts of a lower wave are computed before."""
    is_decided: bool = False
    """Whether a token of each of a rival's segments differs from the record."""


def _waves(ready: Sequence[_Context]) -> list[list[_Context]]:
    """Return the contexts of a round in the order in which to compute their stages, so that
    positions that they have in common are computed once."""
    alike: defaultdict[object, list[_Context]] = defaultdict(list)
    for context in ready:
        replay, stage = context.replay, context.replay.stage
        context.start, context.leader, context.wave = stage.start, None, 0
        context.drawn = _drawn(replay)
        history = [(each.version, each.start) for each in replay.stages[: replay.stages_done]]
        alike[replay.adapter, stage.start, tuple(history)].append(context)
    for contexts in alike.values():
        _find_leaders(contexts)
    waves: defaultdict[int, list[_Context]] = defaultdict(list)
    for context in ready:
        waves[context.wave].append(context)
    return [waves[number] for number in sorted(waves)]


def _find_leaders(contexts: Sequence[_Context]) -> None:
    """Set each context's leader: the one whose KV it takes for the tokens that both begin with.

    In lexicographic order the context just before one shares the longest beginning with it of all
    before. A rival may stop early, so the last context that is none is compared, too.
    """
    last: _Context | None = None
    last_whole: _Context | None = None
    for context in sorted(contexts, key=lambda each: each.replay.context.astype(">u4").tobytes()):
        limit = min(context.drawn, default=context.replay.stage.end)
        for other in (last_whole, last):
            if other is None or (shared := _shared(context, other, limit)) <= context.start:
                continue
            # The context that computes them: a chain of leaders would take as many waves.
            while other.leader is not None and other.start >= shared:
                other = other.leader
            context.start, context.leader, context.wave = shared, other, other.wave + 1
        last = context
        last_whole = last_whole if context.replay.is_rival else context


def _shared(context: _Context, other: _Context, limit: int) -> int:
    """Return how many tokens both contexts begin with, of those that ``other`` computes in any case
    and of the first ``limit``."""
    replay = other.replay
    if replay.is_rival:  # which may stop after its first samples
        limit = min(limit, min(other.drawn, default=limit))
    limit = min(limit, replay.stage.end)
    different = np.flatnonzero(context.replay.context[:limit] != replay.context[:limit])
    return int(different[0]) if len(different) else limit


def _drawn(replay: Replay) -> dict[int, list[tuple[Segment, int]]]:
    """Return the tokens, each with its index in its segment, that are sampled after the positions
    of a replay's stage."""
    stage = replay.stage
    drawn: defaultdict[int, list[tuple[Segment, int]]] = defaultdict(list)
    for segment in replay.segments:
        # Token i of a segment is sampled after the position before it.
        first = segment.position - 1
        last = min(stage.end, first + len(segment.token_ids))
        for position in range(max(stage.start, first), last):
            drawn[position].append((segment, position - first))
    return drawn


def _is_refuted(segment: Segment, end: int) -> bool:
    """Return whether a segment's replay differs from the record in a token that was sampled at a
    position before ``end``."""
    count = max(0, end + 1 - segment.position)
    return not np.array_equal(segment.replayed[:count], segment.recorded[:count])


@dataclass(slots=True)
class _Sample:
    """A row of a step, and the recorded token that it samples again, if any."""

    row: Row
    segment: Segment | None = None
    token: int = 0
    """Index of the token in the segment."""
    context: Tokens = field(default_factory=lambda: np.empty(0, np.int32))
    """The replay's context, of a row that samples."""


def _weights_due(replay: Replay) -> tuple[ReplayedAdapter, int]:
    """Return what reads the context next: a version, and the adapter only if it is the adapter's
    own, because the weights of a version of the run include all of its adapters."""
    adapter = replay.adapter if replay.adapter.has_own_versions else NO_ADAPTER
    return adapter, replay.stage.version


def _open_model(directory: Path, build: EngineBuild) -> ServedModel:
    """Open an archived model as the run's engines did.

    Raises:
        AuditError: this machine can't compute it so.
    """
    if build.dtype not in ("float32", "bfloat16"):
        raise AuditError(
            "an exact audit needs engines that computed in float32 or bfloat16, and these report "
            f"{build.dtype or 'no dtype'}; leave --exact out"
        )
    quantization: dict[str, Quantization] = {"int8": "int8", "fp8": "fp8"}
    try:
        model = open_model(
            directory,
            "float32" if build.dtype == "float32" else "bfloat16",
            is_deterministic=build.is_deterministic,
            quantization=quantization.get(build.quantization),
        )
    except (ConfigError, ModelError) as error:
        raise AuditError(
            f"{directory} can't be computed exactly on this machine: {error}. Audit on a machine "
            "like the engines', or leave --exact out"
        ) from error
    if not isinstance(model, OwnModel):
        raise AuditError(f"the engines computed {directory} by transformers")
    return model
