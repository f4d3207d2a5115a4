"""Scores of given tokens compared with transformers, beside other work of the engine."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.engine.external.fake_engine import DrivenEngine
from tests.engine.scoring import ScoreClient
from tests.models import make_model_directory
from tidegate.engine.models.model_config import ModelConfig
from tidegate.engine.models.model_weights import Weights, load_directory
from tidegate.engine.sampling.scoring import RowScoring, score_logits
from tidegate.errors import ScoreRefused, TurnRefused
from tidegate.transport.messages import LENGTH, KvPolicy, PauseMode
from tidegate.transport.scoring import ScoreKind

WANTS: tuple[ScoreKind, ...] = ("logprobs", "embedding", "mean_embedding", "hidden_states")

MODES: tuple[PauseMode, ...] = ("abort", "keep", "wait")

LENGTHS = (2, 8, 9, 17, 63)
"""Around the block size of 4, and several chunks of 8."""


def load(path: Path) -> tuple[Weights, Any]:
    """Return our weights of a directory, and transformers' model."""
    config = ModelConfig.from_directory(path)
    auto: Any = transformers.AutoModelForCausalLM
    if config.labels:
        auto = transformers.AutoModelForSequenceClassification
    peer = auto.from_pretrained(path, dtype=torch.float32).eval()
    return load_directory(path, config, torch.float32), peer


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Weights], list[Any]]:
    """Two versions of one model, ours and transformers'."""
    loaded = [
        load(make_model_directory(tmp_path_factory.mktemp("m") / "m", seed=seed)) for seed in (0, 1)
    ]
    return [actual for actual, _ in loaded], [expected for _, expected in loaded]


def tokens_of(length: int, seed: int = 0) -> list[int]:
    drawn: list[int] = np.random.default_rng((length, seed)).integers(0, 96, length).tolist()
    return drawn


@pytest.mark.parametrize(
    ("architecture", "max_step_tokens"),
    [("llama", 8), ("qwen2", 8), ("qwen3", 1024), ("gemma2", 8)],
)
def test_scores_among_decoding_turns_equal_transformers(
    architecture: str, max_step_tokens: int, tmp_path: Path
) -> None:
    weights, peer = load(make_model_directory(tmp_path, architecture))
    engine = DrivenEngine([weights], num_blocks=400, max_step_tokens=max_step_tokens)
    client = ScoreClient(engine)
    turns = [engine.submit(tokens_of(5, seed), 30) for seed in range(2)]
    for number, length in enumerate(LENGTHS):
        for want in WANTS:
            client.ask(tokens_of(length), want, top_logprobs=number if want == "logprobs" else 0)
        client.ask(tokens_of(length), start=length - 1, temperature=0.5, top_logprobs=3)
    engine.run()
    for request in client.asked:
        client.check(request, [peer])
    assert [engine.turns[turn].finish for turn in turns] == [LENGTH, LENGTH]
    engine.scheduler.check()
    assert engine.scheduler.free_blocks == 400


def test_scored_positions_are_computed_and_earlier_ones_come_from_the_cache(
    versions: tuple[list[Weights], list[Any]],
) -> None:
    weights, peers = versions
    engine = DrivenEngine(weights, num_blocks=64, max_step_tokens=64)
    client = ScoreClient(engine)
    whole = tokens_of(32)
    engine.submit(whole, 1)
    engine.run()  # all of it is in the cache now
    requests = [client.ask(whole), client.ask(whole, start=18), client.ask(whole, "embedding")]
    rows = engine.step()
    engine.run()
    assert rows == {0: 31, 1: 15, 2: 4}  # from block 0, 4 and 7 on, up to what is needed
    for request in requests:
        client.check(request, peers)
    engine.scheduler.check()


def test_requests_that_start_together_share_the_prompt_before_what_is_scored(
    versions: tuple[list[Weights], list[Any]],
) -> None:
    weights, peers = versions
    engine = DrivenEngine(weights, num_blocks=64, max_step_tokens=64)
    client = ScoreClient(engine)
    prompt = tokens_of(16)
    requests = [client.ask(prompt + tokens_of(6, seed), start=16) for seed in range(3)]
    assert engine.step() == {
        0: 21,
        1: 9,
        2: 9,
    }  # the token before the first reported one is computed
    for request in requests:
        client.check(request, peers)
    engine.scheduler.check()


@pytest.mark.parametrize(("mode", "kv_policy"), [("abort", "recompute"), ("keep", "keep")])
def test_an_answer_is_of_one_version_though_weights_are_swapped_in_its_midst(
    versions: tuple[list[Weights], list[Any]], mode: PauseMode, kv_policy: KvPolicy
) -> None:
    weights, peers = versions
    engine = DrivenEngine(weights, num_blocks=64)
    client = ScoreClient(engine)
    requests = [client.ask(tokens_of(40), want) for want in WANTS]
    engine.step()
    engine.request_swap(1, mode, kv_policy)
    engine.run()
    assert {part.version for request in requests for part in client.answers(request)} == {1}
    for request in requests:
        client.check(request, peers)


def test_a_request_is_refused_if_the_live_weights_lack_its_adapter_from_a_swap_on(
    versions: tuple[list[Weights], list[Any]],
) -> None:
    engine = DrivenEngine(versions[0], num_blocks=64)
    client = ScoreClient(engine)
    with pytest.raises(ScoreRefused, match=r"v0 has no adapter 'a', it has none; publish it"):
        client.ask(tokens_of(9), adapter="a")
    engine.scheduler._adapters = frozenset("a")
    request = client.ask(tokens_of(9), adapter="a")
    engine.request_swap(1, "abort", "recompute")  # to weights without adapters
    engine.run()
    engine.settle()
    [refused] = client.refusals()
    assert (refused.request_id, "v1 has no adapter 'a'" in refused.message) == (request, True)
    engine.scheduler.check()


def test_a_swap_that_waits_lets_scores_end_first(
    versions: tuple[list[Weights], list[Any]],
) -> None:
    weights, peers = versions
    engine = DrivenEngine(weights, num_blocks=64)
    client = ScoreClient(engine)
    under_way = client.ask(tokens_of(40))
    engine.step()
    engine.request_swap(1, "wait", "recompute")
    later = client.ask(tokens_of(17))
    engine.run()
    assert [client.answers(r)[0].version for r in (under_way, later)] == [0, 1]
    for request in (under_way, later):
        client.check(request, peers)


def test_scores_are_right_under_random_turns_pauses_swaps_and_little_memory(
    versions: tuple[list[Weights], list[Any]],
) -> None:
    weights, peers = versions
    for seed in range(4):
        random = np.random.default_rng(seed)
        engine = DrivenEngine(weights, num_blocks=18, shares_prefixes=seed > 0)
        client = ScoreClient(engine)
        cancelled: set[int] = set()
        for _ in range(60):
            match int(random.integers(9)):
                case 0 | 1 | 2:
                    length = int(random.integers(2, 50))
                    tokens = tokens_of(16)[:length] + tokens_of(max(0, length - 16))
                    client.ask(
                        tokens[:length],
                        WANTS[int(random.integers(4))],
                        start=int(random.integers(1, length)),
                        priority=int(random.integers(3)),
                    )
                case 3:
                    prompt = tokens_of(16)[: int(random.integers(1, 16))]
                    engine.submit(prompt, 8, priority=int(random.integers(3)))
                case 4 if client.asked:
                    request = int(random.integers(len(client.asked)))
                    engine.scheduler.scores.cancel(request)
                    cancelled.add(request)
                case 5:
                    engine.scheduler.pause(MODES[int(random.integers(3))])
                case 6:
                    engine.scheduler.resume()
                case 7:
                    mode = MODES[int(random.integers(3))]
                    engine.request_swap(int(random.integers(2)), mode, "recompute")
            for _ in range(int(random.integers(4))):
                engine.step()
                engine.scheduler.check()
        engine.scheduler.resume()
        engine.run()
        for request in client.asked:
            if request not in cancelled or client.answers(request):
                client.check(request, peers)
        assert engine.scheduler.free_blocks == 18


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3", "gemma2"])
@pytest.mark.parametrize("labels", [1, 3])
def test_rewards_are_those_of_transformers_and_padding_is_passed_over(
    architecture: str, labels: int, tmp_path: Path
) -> None:
    weights, peer = load(
        make_model_directory(tmp_path, architecture, labels=labels, pad_token_id=7)
    )
    engine = DrivenEngine([weights], num_blocks=64)
    client = ScoreClient(engine)
    sequences = [tokens_of(length) for length in LENGTHS]
    sequences += [[*tokens_of(9), 7, 7], [7, 7], [7, *tokens_of(5)]]
    for tokens in sequences:
        client.ask(tokens, "rewards")
    client.ask(tokens_of(20), "embedding")
    engine.run()
    for request in client.asked:
        client.check(request, [peer])
    with pytest.raises(TurnRefused, match="classification head"):
        engine.submit([1, 2], 3)


def test_a_score_too_large_for_a_frame_is_sent_in_parts(
    versions: tuple[list[Weights], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, peers = versions
    monkeypatch.setattr("tidegate.engine.scheduling.score_queue.PART_BYTES_MAX", 300)
    engine = DrivenEngine(weights, num_blocks=64)
    client = ScoreClient(engine)
    requests = [
        client.ask(tokens_of(40), top_logprobs=5),
        client.ask(tokens_of(9), "hidden_states"),
    ]
    engine.run()
    assert [len(client.answers(request)) for request in requests] == [7, 9]
    for request in requests:
        client.check(request, peers)


@pytest.mark.parametrize(
    ("tokens", "asked", "reported"),
    [
        ([], {}, "token_ids is empty"),
        ([1, 96], {}, "is outside the model's vocabulary"),
        ([1], {}, "a single token has no log-prob, because no token precedes it; send two"),
        ([1, 2, 3], {"start": 0}, "because no token precedes it"),
        ([1, 2, 3], {"start": 3}, "start must be in .1, 2. for logprobs of 3 tokens, got 3"),
        ([1, 2], {"top_logprobs": 97}, "top_logprobs must be in .0, 96., got 97"),
        ([1, 2], {"temperature": 0.0}, "temperature divides logits"),
        ([1, 2], {"temperature": float("nan")}, "temperature divides logits"),
        ([5] * 65, {}, "65 tokens are more than the model's context of 64"),
        ([5] * 60, {}, "15 KV blocks of 4 tokens but the whole cache has 10"),
        ([5] * 9, {"want": "rewards"}, "rewards was requested"),
    ],
)
def test_an_impossible_score_request_is_refused_with_its_numbers(
    versions: tuple[list[Weights], list[Any]],
    tokens: list[int],
    asked: dict[str, Any],
    reported: str,
) -> None:
    client = ScoreClient(DrivenEngine(versions[0], num_blocks=10))
    with pytest.raises(ScoreRefused, match=reported):
        client.ask(tokens, **asked)
    assert client.engine.scheduler.free_blocks == 10


def test_logprobs_are_exact_to_float32_in_a_large_vocabulary() -> None:
    logits = 4 * torch.randn(3, 151_936, generator=torch.Generator().manual_seed(0))
    exact = logits.double().div(0.7).log_softmax(-1)
    row = RowScoring(3, "logprobs", np.array([5, 70_000, 151_935], np.int32), 3, 0.7)
    reported = score_logits(logits, row)
    chosen = exact.gather(1, torch.tensor([[5], [70_000], [151_935]]))[:, 0]
    np.testing.assert_allclose(reported.logprobs, chosen, atol=4e-6)  # type: ignore[arg-type]
    np.testing.assert_allclose(reported.top_logprobs, exact.topk(3).values, atol=4e-6)  # type: ignore[arg-type]
    ranks = (exact > chosen[:, None]).sum(-1) + 1
    np.testing.assert_array_equal(reported.ranks, ranks)


def test_a_model_with_nan_scores_fails_the_request(tmp_path: Path) -> None:
    weights, _ = load(make_model_directory(tmp_path))
    weights.final_norm.fill_(float("nan"))
    client = ScoreClient(DrivenEngine([weights]))
    client.ask([1, 2, 3])
    client.engine.run()
    assert "compute NaN or infinity" in client.refusals()[0].message
