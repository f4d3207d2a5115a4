"""Our reading of config.json agrees with transformers', for old and sparse files too."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.models.test_model_parity import (
    assert_sampled_by,
    load_peer,
    load_runner,
    make_turns,
)
from tests.engine.scheduling.driving import drive
from tests.models import make_model_directory

NEWER = ("rope_parameters", "layer_types", "dtype")
"""Fields that transformers before version 5 did not write."""

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}

SPELLINGS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "llama3 rope": (
        "llama",
        {
            "rope_theta": 5e3,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
        (),
    ),
    "llama3 rope that doesn't say what it stretches": (
        "llama",
        {
            "rope_scaling": {
                "type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
            }
        },
        (),
    ),
    "yarn": ("qwen3", {"rope_theta": 2e3, "rope_scaling": YARN}, ()),
    "layers with a window by their number": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
        (),
    ),
    "a window that is switched off": (
        "qwen2",
        {"use_sliding_window": False, "sliding_window": 20, "max_window_layers": 0},
        (),
    ),
    "experts by their older name": ("qwen3_moe", {"num_experts": 6}, ("num_local_experts",)),
    "every second layer": ("gemma2", {"rope_theta": 2e3, "hidden_act": "silu"}, ()),
    "caps and scales left out": (
        "gemma2",
        {},
        ("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"),
    ),
    "every third layer, two ropes": (
        "gemma3_text",
        {"rope_theta": 3e4, "rope_local_base_freq": 300.0, "sliding_window_pattern": 3},
        (),
    ),
    "one rope stretched": (
        "gemma3_text",
        {
            "rope_theta": 3e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 2,
        },
        ("tie_word_embeddings",),
    ),
    "ropes left out": ("gemma3_text", {"sliding_window_pattern": 2}, ()),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_a_config_as_older_versions_wrote_it_means_the_same(spelling: str, tmp_path: Path) -> None:
    model_type, fields, omitted = SPELLINGS[spelling]
    path = make_model_directory(tmp_path, model_type)
    file = path / "config.json"
    written = {
        name: value
        for name, value in json.loads(file.read_text()).items()
        if name not in (*NEWER, *omitted)
    }
    file.write_text(json.dumps(written | fields))
    check(path)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0, "rope_theta": 300.0}}),
        ("qwen3", {"rope_scaling": YARN}),
        ("qwen3", {"rope_scaling": YARN, "original_max_position_embeddings": 32}),
    ],
    ids=["linear", "yarn", "yarn, its context said twice"],
)
def test_what_was_added_to_a_config_by_hand_replaces_what_was_there(
    model_type: str, fields: dict[str, Any], tmp_path: Path
) -> None:
    path = make_model_directory(tmp_path, model_type)
    file = path / "config.json"
    written = json.loads(file.read_text())
    assert "rope_parameters" in written
    file.write_text(json.dumps(written | fields))
    check(path)


def check(path: Path) -> None:
    """Check that we compute what transformers does."""
    turns = make_turns()
    drive(load_runner(path), turns, new_tokens=8)
    assert_sampled_by(load_peer(path), turns)
