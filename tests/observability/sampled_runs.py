"""Runs sampled token by token with `transformers`, in every way in which an engine may sample.

Independent of the audit: one context at a time, no padding, one forward pass per token.
"""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
import transformers

from tidegate.engine.execution.block_cache import cache_argument
from tidegate.observability.records.recording import RunRecorder
from tidegate.orchestrator.core.provenance import TurnPrefill
from tidegate.orchestrator.core.rollout import Rollout, RolloutState, Turn
from tidegate.transport.messages import KvSpan, SamplingParams
from tidegate.transport.sampling import LogitsProcessor, TokenBias

VOCAB = 40
VERSIONS = 3


def make_models(
    versions: int = VERSIONS,
    model_type: str = "qwen3",
    drift: float = 0.02,
    changed_share: float = 1.0,
    **config_fields: Any,
) -> list[Any]:
    """Return a random model and its successors, each ``changed_share`` of whose weights move by
    ``drift`` times a normal number from the one before."""
    torch.manual_seed(1)
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "tie_word_embeddings": True,
        "initializer_range": 0.3,
        "pad_token_id": None,
    }
    config = transformers.AutoConfig.for_model(model_type, **(fields | config_fields))
    auto: Any = transformers.AutoModelForCausalLM
    models = [auto.from_config(config).eval()]
    for _ in range(1, versions):
        model = auto.from_config(config).eval()
        model.load_state_dict(models[-1].state_dict())
        with torch.no_grad():
            for parameter in model.parameters():
                change = torch.randn_like(parameter) * drift
                if changed_share < 1:
                    change *= torch.rand_like(parameter) < changed_share
                parameter.add_(change)
        models.append(model)
    return models


class Sampler:
    """A rollout being sampled: its KV cache, and the version that computed each position."""

    def __init__(self, models: list[Any], rollout_id: int, prompt: list[int]) -> None:
        self.models = models
        self.rollout = Rollout(rollout_id, group_id=rollout_id // 2, index=rollout_id % 2)
        self.rollout.extend(prompt)
        self.random = torch.Generator().manual_seed(rollout_id)
        self.cache: Any = transformers.DynamicCache()
        self.history: list[int] = []

    def turn(self, **sampling: Any) -> Turn:
        turn = Turn(self.rollout, SamplingParams(max_tokens=100, **sampling))
        self.rollout.turns.append(turn)
        return turn

    def forget(self) -> None:
        """Drop the KV, as after an abort or a recompute."""
        self.cache, self.history = transformers.DynamicCache(), []

    def prefill(self, version: int, *, chunk: int | None = None) -> None:
        """Compute the missing positions, or ``chunk`` of them, except the last one."""
        missing = len(self.rollout.token_ids) - 1 - len(self.history)
        for _ in range(missing if chunk is None else chunk):
            self._read_one(version)

    def tokens(self, count: int, version: int, engine: str = "engine-0") -> None:
        """Sample with the present KV; record a prefill if positions were computed anew."""
        turn = self.rollout.turns[-1]
        if not turn.prefills or self._was_prefilled(turn):
            self.prefill(version)
            versions = [*self.history, version]
            turn.prefills = (*turn.prefills, TurnPrefill(turn.length, tuple(_runs(versions))))
        for _ in range(count):
            logits = self._read_one(version)
            token_id, logprob = self._draw(logits, turn.sampling)
            turn.append(token_id, logprob, version, engine)

    def _was_prefilled(self, turn: Turn) -> bool:
        """Return whether the KV was dropped since the previous token."""
        return len(self.history) < len(self.rollout.token_ids) - 1

    def _read_one(self, version: int) -> torch.Tensor:
        token_id = self.rollout.token_ids[len(self.history)]
        with torch.no_grad():
            model = self.models[version]
            output = model(
                input_ids=torch.tensor([[token_id]]),
                use_cache=True,
                **cache_argument(model, self.cache),
            )
        self.history.append(version)
        logits: torch.Tensor = output.logits[:, -1]
        return logits

    def _draw(self, logits: torch.Tensor, sampling: SamplingParams) -> tuple[int, float]:
        logits = self._penalised(logits, sampling)
        ids = torch.empty(1, 0, dtype=torch.long)
        if sampling.temperature == 0:
            token = int(logits.argmax())
            return token, float(logits.log_softmax(-1)[0, token])
        logits = transformers.TemperatureLogitsWarper(sampling.temperature)(ids, logits)
        if sampling.min_p:
            min_p: Any = transformers.MinPLogitsWarper(sampling.min_p)
            logits = min_p(ids, logits)
        if sampling.top_k:
            logits = transformers.TopKLogitsWarper(sampling.top_k)(ids, logits)
        if sampling.top_p < 1:
            logits = transformers.TopPLogitsWarper(sampling.top_p)(ids, logits)
        token = int(torch.multinomial(logits.softmax(-1), 1, generator=self.random))
        return token, float(logits.log_softmax(-1)[0, token])

    def _penalised(self, logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
        """Apply vLLM's penalties (as loops), biases and processors; [1, V]."""
        turn = self.rollout.turns[-1]
        output = turn.token_ids.tolist()
        for one in sampling.logit_bias:
            logits[0, one.token_id] += one.bias
        if len(output) < sampling.min_tokens:
            logits[0, sampling.stop_token_ids] = -torch.inf
        r = sampling.repetition_penalty
        for token in {*self.rollout.token_ids.tolist()}:
            logits[0, token] = (
                logits[0, token] / r if logits[0, token] > 0 else logits[0, token] * r
            )
        for token in {*output}:
            times = output.count(token)
            logits[0, token] -= sampling.frequency_penalty * times + sampling.presence_penalty
        for text in sampling.logits_processors:
            logits = self._processed(logits, LogitsProcessor.from_str(text), len(output))
        return logits

    @staticmethod
    def _processed(logits: torch.Tensor, processor: LogitsProcessor, index: int) -> torch.Tensor:
        if processor.name == "temperature_schedule":
            return logits / [2.0, 1.5, 1.0, 0.5, 0.5, 0.5][index]
        if processor.name == "allowed_tokens":
            allowed = processor.arguments["token_ids"]
            return torch.full_like(logits, -torch.inf).index_copy(
                1, torch.tensor(allowed), logits[:, allowed]
            )
        return logits  # user-defined


def _runs(versions: list[int]) -> list[KvSpan]:
    spans = []
    start = 0
    for version, group in itertools.groupby(versions):
        end = start + len(list(group))
        spans.append(KvSpan(version, start, end))
        start = end
    return spans


def one_version(models: list[Any], rollout_id: int, *, version: int, tokens: int) -> Rollout:
    """Two turns of one version, with an observation between them."""
    sampler = Sampler(models, rollout_id, list(range(2, 5 + rollout_id % 4)))
    sampler.turn()
    sampler.tokens(tokens, version)
    sampler.rollout.extend([7, 8, 9])
    sampler.forget()
    sampler.turn()
    sampler.tokens(tokens + 2, version)
    return sampler.rollout


def aborted(models: list[Any], rollout_id: int) -> Rollout:
    """Sampled by v0, ended by a pause, continued by v1 on another engine."""
    sampler = Sampler(models, rollout_id, [1, 2, 3])
    sampler.turn()
    sampler.tokens(4, 0)
    sampler.forget()
    sampler.tokens(5, 1, "engine-1")
    return sampler.rollout


def recomputed(models: list[Any], rollout_id: int) -> Rollout:
    """Kept with its KV recomputed at each of two new versions."""
    sampler = Sampler(models, rollout_id, [1, 2, 3, 4])
    sampler.turn()
    for version, tokens in ((0, 3), (1, 1), (2, 4)):
        sampler.forget()
        sampler.tokens(tokens, version)
    return sampler.rollout


def kept(models: list[Any], rollout_id: int) -> Rollout:
    """Kept with its KV: v1 and then v2 continue from what v0 computed."""
    sampler = Sampler(models, rollout_id, [1, 2, 3, 4, 5])
    sampler.turn()
    sampler.tokens(4, 0)
    sampler.tokens(3, 1)
    sampler.tokens(3, 2)
    return sampler.rollout


def kept_over_turns(models: list[Any], rollout_id: int) -> Rollout:
    """The second turn starts from the first one's KV, which two versions computed."""
    sampler = Sampler(models, rollout_id, [1, 2])
    sampler.turn()
    sampler.tokens(3, 0)
    sampler.tokens(3, 1)
    sampler.rollout.extend([5, 6])
    sampler.turn()
    sampler.tokens(4, 1)
    sampler.rollout.extend([5])
    sampler.forget()
    sampler.turn()
    sampler.tokens(2, 2)
    return sampler.rollout


def swapped_in_prefill(models: list[Any], rollout_id: int) -> Rollout:
    """Weights change between two chunks of a prompt."""
    sampler = Sampler(models, rollout_id, [1, 2, 3, 4, 5, 6])
    sampler.turn()
    sampler.prefill(0, chunk=2)
    sampler.tokens(5, 1)
    return sampler.rollout


def filtered(models: list[Any], rollout_id: int) -> Rollout:
    """One turn for each kind of sampling."""
    sampler = Sampler(models, rollout_id, [3, 2, 1])
    for sampling in (
        {"temperature": 0.0},
        {"temperature": 0.6},
        {"top_k": 5},
        {"top_p": 0.7},
        {"temperature": 1.3, "top_k": 12, "top_p": 0.8},
        {"top_p": 0.01},
    ):
        sampler.turn(**sampling)
        sampler.tokens(6, 1)
        sampler.rollout.extend([4])
    return sampler.rollout


SCHEDULE = LogitsProcessor("temperature_schedule", {"initial": 2, "final": 0.5, "warmup_tokens": 3})


def with_options(models: list[Any], rollout_id: int) -> Rollout:
    """One turn for each other sampling option; the last with an unknown logits processor."""
    sampler = Sampler(models, rollout_id, [3, 2, 1])
    for sampling in (
        {"min_p": 0.1},
        {"repetition_penalty": 1.5, "presence_penalty": 0.5, "frequency_penalty": 0.25},
        {"logit_bias": [TokenBias(4, 3.0)], "min_tokens": 4, "stop_token_ids": [6]},
        {"logits_processors": [SCHEDULE.to_str()]},
        {
            "logits_processors": [
                LogitsProcessor("allowed_tokens", {"token_ids": [5, 6, 7]}).to_str()
            ]
        },
        {"temperature": 0.0, "repetition_penalty": 0.5},
        {"temperature": 1.3, "top_k": 12, "top_p": 0.8, "min_p": 0.02, "presence_penalty": 1.0},
        {"logits_processors": [LogitsProcessor("my_own").to_str()]},
    ):
        sampler.turn(**sampling)
        sampler.tokens(6, 1)
        sampler.rollout.extend([4])
    return sampler.rollout


KINDS: list[Callable[[list[Any], int], Rollout]] = [
    aborted,
    recomputed,
    kept,
    kept_over_turns,
    swapped_in_prefill,
    filtered,
]


def record_run(
    directory: Path,
    models: list[Any],
    rollouts: list[Rollout],
    *,
    dtype: str = "float32",
    archive_weights: str = "all",
) -> Path:
    """Record rollouts and weights as a run does, of engines that computed in ``dtype``."""
    model = directory.with_name(directory.name + "-model")
    models[0].save_pretrained(model)
    settings = {"archive_weights": archive_weights}
    with RunRecorder(
        directory, settings=settings, model=model, archive_weights=archive_weights
    ) as recorder:
        for version, weights in enumerate(models[1:], start=1):
            recorder.weights(version, weights.state_dict())
        for engine in ("engine-0", "engine-1"):
            recorder.engine_dtype(engine, dtype)
        for rollout in rollouts:
            rollout.reward = 1.0
            rollout.state = RolloutState.TRAINED
            recorder.rollout(rollout, task=None, advantage=0.0, consumed_version=2)
    return directory


def edit_rollout(directory: Path, rollout_id: int, edit: Callable[[dict[str, Any]], None]) -> None:
    """Change one row of what a run recorded."""
    path = directory / "trajectories.parquet"
    table = pq.read_table(path)
    rows = table.to_pylist()
    edit(next(row for row in rows if row["rollout_id"] == rollout_id))
    pq.write_table(pa.Table.from_pylist(rows, schema=table.schema), path)


Row = dict[str, Any]


def tag(turn: Row, span: int, version: int, oldest: int | None = None) -> None:
    """Tag a span with a version and its KV with those from ``oldest`` on."""
    kv = {"kv_oldest": version if oldest is None else oldest, "kv_newest": version}
    turn["spans"][span] |= {"version": version, **kv}


def tag_all(row: Row, version: int) -> None:
    for turn in row["turns"]:
        tag(turn, 0, version)
        turn["prefills"][0]["spans"][0]["version"] = version


def move_boundary(row: Row, shift: int, *, span: int = 0, turn: int = 0) -> None:
    """Move the end of a span."""
    spans = row["turns"][turn]["spans"]
    spans[span]["end"] += shift
    spans[span + 1]["start"] += shift


def claim_a_recompute(row: Row) -> None:
    """Say of a row of :func:`kept` that its KV was computed anew with v1."""
    turn = row["turns"][0]
    tag(turn, 1, 1)
    tag(turn, 2, 2, oldest=1)
    turn["prefills"].append({"at": 4, "spans": [{"version": 1, "start": 0, "end": 9}]})
