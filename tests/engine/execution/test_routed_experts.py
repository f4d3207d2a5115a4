"""Routed experts that runners record: the choices of transformers' routers, by context position."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.engine.models.test_model_parity import load_peer, load_runner, make_turns
from tests.engine.ranks.ranked import ranked_engine
from tests.engine.scheduling.driving import GREEDY, DrivenTurn, drive
from tests.models import make_model_directory
from tests.policies.test_routing_replay import MIXTURES
from tidegate.engine.execution.position_cache import PositionCache, Positions
from tidegate.engine.execution.runner import Row, Runner
from tidegate.engine.execution.served_model import open_model
from tidegate.policies.routing_replay import record_routed_experts

NEW_TOKENS = 12

OWN_TYPES = ("qwen3_moe", "gpt_oss")

FALLBACKS = [name for name, (model_type, _) in MIXTURES.items() if model_type not in OWN_TYPES]


def asking_turns() -> list[DrivenTurn]:
    turns = make_turns()
    for turn in turns:
        turn.reports_experts = True
    return turns


def peer_experts(peer: Any, context: list[int]) -> npt.NDArray[np.int64]:
    """Return the sorted routed experts [P, L, k] of one forward pass of transformers."""
    with torch.no_grad(), record_routed_experts(peer) as recorder:
        peer(torch.tensor(context)[None])
    return np.sort(recorder.routed_experts().numpy(), -1)


def assert_as_transformers(turns: list[DrivenTurn], path: Path) -> None:
    peer = load_peer(path)
    for turn in turns:
        assert [len(part) for part in turn.routed_experts[1:]] == [1] * (NEW_TOKENS - 1)
        reported = np.sort(np.concatenate(turn.routed_experts), -1)
        expected = peer_experts(peer, turn.context[:-1])
        assert reported.shape == expected.shape
        # Two experts of nearly equal scores may change places by the order of a sum.
        assert (reported == expected).all(-1).mean() > 0.999


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("qwen3_moe", {}),
        (
            "qwen3_moe",
            {"num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
        ),
        ("gpt_oss", {}),
    ],
)
def test_our_model_code_reports_the_experts_that_transformers_routes_to(
    is_compiled: bool, model_type: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    path = make_model_directory(tmp_path, model_type, **fields)
    turns = asking_turns()

    drive(load_runner(path, is_compiled=is_compiled), turns, new_tokens=NEW_TOKENS)

    assert {part.dtype for turn in turns for part in turn.routed_experts} == {np.dtype(np.uint8)}
    assert_as_transformers(turns, path)


@pytest.mark.slow
@pytest.mark.parametrize("mixture", FALLBACKS)
def test_mixtures_that_transformers_computes_report_its_routers_choices(
    mixture: str, tmp_path: Path
) -> None:
    model_type, fields = MIXTURES[mixture]
    path = make_model_directory(tmp_path, model_type, **fields)
    model = open_model(path, "float32")
    assert model.code == "transformers"
    assert model.refused_options == {}
    turns = asking_turns()

    drive(model.make_runner(num_blocks=128, block_tokens=8), turns, new_tokens=NEW_TOKENS)

    assert_as_transformers(turns, path)


def test_ranks_of_an_engine_report_what_one_alone_does(tmp_path: Path) -> None:
    path = make_model_directory(tmp_path, "qwen3_moe", tied=False)
    turns = asking_turns()
    with ranked_engine(path, 2) as engine:
        drive(engine.runner, turns, new_tokens=NEW_TOKENS)
    assert_as_transformers(turns, path)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_blocks_that_rows_share_have_the_routed_experts_of_the_row_that_computed_them(
    model_type: str, tmp_path: Path
) -> None:
    path = make_model_directory(tmp_path, model_type, **MIXTURES.get(model_type, ("", {}))[1])
    runner: Runner = open_model(path, "float32").make_runner(num_blocks=16, block_tokens=8)
    context = np.random.default_rng(0).integers(1, 96, 19).astype(np.int32)
    first = Row(context[:17], 0, [5, 2, 9], None, positions_from=0)
    alone = runner.step([first])
    second = Row(context[16:19], 16, [5, 2, 11], GREEDY, positions_from=0)

    shared = runner.step([second])

    assert alone.positions == {}  # samples nothing
    expected = peer_experts(load_peer(path), context.tolist())
    np.testing.assert_array_equal(np.sort(shared.positions["routed_experts"][0], -1), expected)


def test_only_rows_that_ask_have_their_experts_reported(tmp_path: Path) -> None:
    runner = load_runner(make_model_directory(tmp_path, "qwen3_moe"))
    tokens = np.arange(1, 5, dtype=np.int32)
    rows = [
        Row(tokens, 0, [0], GREEDY),
        Row(tokens, 0, [1], GREEDY, positions_from=2),
        Row(tokens, 0, [2], GREEDY),
    ]

    assert runner.step(rows[::2]).positions == {}
    output = runner.step(rows)
    assert {row: part.shape for row, part in output.positions["routed_experts"].items()} == {
        1: (2, 2, 2)
    }


def test_ids_above_255_are_two_bytes() -> None:
    cache = PositionCache(num_blocks=2, block_tokens=2, value_max=256)
    cache.write(np.array([3, 0]), np.array([[[256, 1]], [[0, 255]]]))
    [read] = cache.read([Positions([1, 0], 1, 3)])
    assert read.dtype == np.uint16
    assert read.tolist() == [[[256, 1]], [[0, 255]]]


def test_a_model_without_a_mixture_says_why_it_reports_no_experts(tmp_path: Path) -> None:
    for model_type in ("qwen3", "gpt2"):
        model = open_model(make_model_directory(tmp_path / model_type, model_type), "float32")
        assert "has no mixture-of-experts layers" in model.refused_options["routed_experts"]
