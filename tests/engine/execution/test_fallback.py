"""The transformers fallback: parity on our KV blocks, and refusal of models it cannot serve."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.engine.models.test_model_parity import (
    TOLERANCE_NATS,
    assert_sampled_by,
    load_peer,
    make_turns,
)
from tests.engine.scheduling.driving import GREEDY, drive
from tests.models import HYBRID_TYPES, make_model_directory
from tidegate.engine.execution.fallback import FallbackRunner, probe
from tidegate.engine.execution.runner import Row, Runner
from tidegate.engine.execution.served_model import open_model
from tidegate.engine.models.fallback_weights import load_fallback
from tidegate.engine.sampling.scoring import Reads, RowScore, RowScoring, join_scores
from tidegate.errors import ModelError

pytestmark = pytest.mark.slow

HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in HYBRID_TYPES}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "learned positions, fused qkv": ("gpt2", {}),
    "partial rotary, untied": ("gpt_neox", {"tied": False}),
    "no positions but a bias of attention": ("bloom", {}),
    "sliding and full layers, scaled logits": (
        "cohere2",
        {"sliding_window": 20, "num_hidden_layers": 4, "logit_scale": 0.5},
    ),
    "keys wider than values": (
        "deepseek_v3",
        {
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 16,
            "num_key_value_heads": 4,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "moe_intermediate_size": 24,
            "first_k_dense_replace": 1,
        },
    ),
    "attention sinks": (
        "gpt_oss",
        {
            "sliding_window": 20,
            "swiglu_limit": 5.0,  # Tidegate computes 7.0 only
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "tied": False,
        },
    ),
    "ours but for its activation": ("llama", {"hidden_act": "relu"}),
    "time steps below their limit": ("nemotron_h", {"time_step_min": 1.4}),
    "time steps above their limit": ("falcon_h1", {"time_step_limit": [0.01, 0.2]}),
    **HYBRIDS,
}


def open_runner(path: Path, dtype: Any = "float32") -> Runner:
    model = open_model(path, dtype)
    assert model.code == "transformers"
    return model.make_runner(num_blocks=128, block_tokens=8)


@pytest.mark.parametrize("model", MODELS)
def test_turns_in_mixed_chunked_batches_equal_one_forward(model: str, tmp_path: Path) -> None:
    model_type, options = MODELS[model]
    path = make_model_directory(tmp_path, model_type, **options)
    turns = make_turns()

    drive(open_runner(path), turns, new_tokens=32)

    assert_sampled_by(load_peer(path), turns)


@pytest.mark.parametrize(
    "model", ["learned positions, fused qkv", "sliding and full layers, scaled logits"]
)
def test_given_tokens_are_scored_in_chunks_as_in_one_forward(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate.engine.sampling.scoring.LOGITS_MAX", 5 * 96)
    model_type, options = MODELS[model]
    path = make_model_directory(tmp_path, model_type, **options)
    context = np.random.default_rng(0).integers(0, 96, 41).astype(np.int32)
    requested: list[tuple[Reads, int]] = [("logprobs", 3), ("hidden_states", 0), ("sum", 0)]
    with torch.no_grad():
        output = load_peer(path)(
            torch.from_numpy(context[:40].astype(np.int64))[None], output_hidden_states=True
        )
    logprobs, hidden = output.logits[0].log_softmax(-1), output.hidden_states[-1][0]
    for reads, top in requested:
        reported: list[RowScore] = []
        runner = open_runner(path)
        for start, end, positions in ((0, 9, 0), (9, 20, 7), (20, 40, 20)):
            scoring = RowScoring(positions, reads, context[end - positions + 1 : end + 1], top)
            row = Row(
                context[start:end], start, [3, 1, 4, 0, 5], None, scoring if positions else None
            )
            reported += runner.step([row]).scores
        score = join_scores(reported)
        if reads == "logprobs":
            chosen = logprobs[13:].gather(
                1, torch.from_numpy(context[14:].astype(np.int64))[:, None]
            )
            assert score.logprobs is not None
            assert score.top_logprobs is not None
            np.testing.assert_allclose(score.logprobs, chosen[:, 0], atol=TOLERANCE_NATS)
            top_logprobs = logprobs[13:].topk(3, -1).values
            np.testing.assert_allclose(score.top_logprobs, top_logprobs, atol=TOLERANCE_NATS)
            continue
        assert score.values is not None
        expected = hidden[13:] if reads == "hidden_states" else hidden[13:].sum(0)
        values = score.values if reads == "hidden_states" else score.values.sum(0)
        np.testing.assert_allclose(values, expected, atol=1e-3)


@pytest.mark.parametrize("model", ["gpt2", "gemma2", *HYBRIDS])
def test_a_row_reads_what_rows_before_it_in_its_step_write_in_each_implementation(
    model: str, tmp_path: Path
) -> None:
    model_type, options = MODELS.get(model, (model, {}))
    path = make_model_directory(tmp_path, model_type, **options)
    runner = open_model(path, "float32").make_runner(num_blocks=9, block_tokens=8)
    context = np.random.default_rng(0).integers(0, 96, 43).astype(np.int32)
    table = [5, 2, 7, 0, 3, 8]

    output = runner.step(
        [
            Row(context[:16], 0, table, None),
            Row(context[16:40], 16, table, None),
            Row(context[40:], 40, table, GREEDY),
        ]
    )

    with torch.no_grad():
        logits = load_peer(path)(torch.from_numpy(context.astype(np.int64))[None]).logits[0, -1]
    assert output.token_ids.tolist() == [int(logits.argmax())]
    assert output.logprobs[0] == pytest.approx(
        float(logits.log_softmax(-1).amax()), abs=TOLERANCE_NATS
    )


@pytest.mark.parametrize("model", HYBRIDS)
def test_turns_that_share_full_blocks_continue_from_the_state_at_their_end(
    model: str, tmp_path: Path
) -> None:
    model_type, options = MODELS[model]
    path = make_model_directory(tmp_path, model_type, **options)
    runner = open_runner(path)
    random = np.random.default_rng(0)
    prompt = random.integers(1, 96, 24).astype(np.int32)
    ends = [random.integers(1, 96, count).astype(np.int32) for count in (5, 9, 1)]
    tables = [[4, 9, 1, number, number + 50] for number in (20, 21, 22)]
    runner.step([Row(np.concatenate([prompt, ends[0]]), 0, tables[0], GREEDY)])

    output = runner.step(
        [Row(end, 24, table, GREEDY) for end, table in zip(ends[1:], tables[1:], strict=True)]
    )

    peer = load_peer(path)
    for end, logprob in zip(ends[1:], output.logprobs, strict=True):
        context = torch.from_numpy(np.concatenate([prompt, end]).astype(np.int64))
        with torch.no_grad():
            expected = peer(context[None]).logits[0, -1].log_softmax(-1).amax()
        assert float(logprob) == pytest.approx(float(expected), abs=TOLERANCE_NATS)


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_computes_in_float32_whatever_dtype_the_layers_have(
    tied: bool, tmp_path: Path
) -> None:
    path = make_model_directory(tmp_path, "gpt2", dtype="bfloat16", tied=tied)
    model = open_model(path, "auto")
    runner = model.make_runner(num_blocks=8, block_tokens=8)
    assert isinstance(runner, FallbackRunner)
    published = torch.randn(96, 64)

    staged = model.allocate()
    staged.load("transformer.wte.weight" if tied else "lm_head.weight", published)
    runner.swap(staged)

    module = runner.weights.module
    assert runner.weights.dtype == torch.bfloat16
    assert torch.equal(module.lm_head.weight, published)
    assert module(torch.tensor([[1, 2]])).logits.dtype == torch.float32
    if tied:
        assert torch.equal(module.transformer.wte.weight, published.bfloat16())


def test_a_slow_engine_warns_of_the_reason(tmp_path: Path) -> None:
    model = open_model(make_model_directory(tmp_path, "gpt2"), "float32")

    assert model.architecture == "GPT2LMHeadModel"
    assert (model.vocab_size, model.context_tokens_max) == (96, 512)
    assert model.kv_token_bytes() == 2 * 2 * 64 * 4
    assert model.warning is not None
    assert "GPT2LMHeadModel; Tidegate's own code computes Gemma2ForCausalLM" in model.warning
    assert "transformers computes it" in model.warning
    assert open_model(make_model_directory(tmp_path / "own"), "float32").warning is None


def test_contexts_end_where_a_rope_would_turn_cached_keys_otherwise(tmp_path: Path) -> None:
    rope: dict[str, Any] = {
        "rope_type": "longrope",
        "short_factor": 8 * [1.0],
        "long_factor": 8 * [4.0],
        "original_max_position_embeddings": 64,
    }
    fields: dict[str, Any] = {"rope_parameters": rope, "original_max_position_embeddings": 64}
    model = open_model(make_model_directory(tmp_path, "phi3", **fields), "float32")

    assert model.context_tokens_max == 64
    assert model.warning is not None
    assert "Contexts end at 64 of the 512 tokens" in model.warning


@pytest.mark.parametrize(
    ("model_type", "options", "words"),
    [
        ("mamba", {"state_size": 4, "tied": True}, "Mamba.* can't be run from keys and values"),
        (
            "jamba",
            {"num_experts": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
            "Jamba.* keeps more state of a context than its cache in transformers",
        ),
    ],
)
def test_models_that_do_not_continue_from_their_state_are_refused(
    model_type: str, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = make_model_directory(tmp_path, model_type, **options)

    with pytest.raises(ModelError, match=words):
        open_model(path, "float32")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "has an encoder"),
        ({"quantization_config": {"quant_method": "fp8"}}, "is quantised"),
        ({"use_bidirectional_attention": True}, "attends to later tokens"),
        ({"model_type": "nobody_knows"}, "can't read"),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "mine.MineConfig"}}, "can't read"),
    ],
)
def test_what_transformers_can_not_serve_either_is_refused_by_name(
    change: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = make_model_directory(tmp_path, "gpt2")
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))

    with pytest.raises(ModelError, match=words):
        open_model(path, "float32")


def test_a_directory_that_lacks_tensors_is_refused_by_name(tmp_path: Path) -> None:
    path = make_model_directory(tmp_path, "gpt2")
    tensors = load_file(path / "model.safetensors")
    del tensors["transformer.h.1.mlp.c_fc.bias"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ModelError, match=r"lacks 1 .*h\.1\.mlp\.c_fc\.bias"):
        open_model(path, "float32")


class Forgetful(transformers.GPT2LMHeadModel):  # type: ignore[no-untyped-call]
    """Model that reads single tokens otherwise than a whole context, from position 40 on."""

    def forward(self, input_ids: torch.Tensor, **options: Any) -> Any:
        output = super().forward(input_ids, **options)
        is_late = options["attention_mask"].shape[1] > 40 and input_ids.shape[1] == 1
        output.logits = output.logits + is_late * 0.01 * torch.arange(96.0)
        return output


def test_a_model_that_does_not_continue_from_keys_and_values_is_found_out(tmp_path: Path) -> None:
    model: Any = Forgetful.from_pretrained(make_model_directory(tmp_path, "gpt2"))

    words = r"Forgetful keeps more state of a context.* differ by 0\.\d+ on average if .* token by"
    with pytest.raises(ModelError, match=words):
        probe(model.eval(), vocab_size=96)
    assert probe(model, vocab_size=96, context_tokens_max=40).token_bytes > 0


def test_contexts_end_where_a_dynamic_mask_would_choose_other_positions(tmp_path: Path) -> None:
    path = make_model_directory(tmp_path, "doge", keep_window_size=24)
    model = open_model(path, "float32")

    assert model.context_tokens_max == 24
    assert model.warning is not None
    assert "Contexts end at 24 of the 512 tokens that config.json allows" in model.warning
    assert "chooses other positions" in model.warning


def test_copies_of_clamped_weights_compute_beside_each_other(tmp_path: Path) -> None:
    path = make_model_directory(tmp_path, "nemotron_h", time_step_min=1.4)
    first = load_fallback(path, torch.float32)
    second = first.allocate_copy()
    seen: list[torch.Tensor] = []

    def nested(*_: Any) -> None:
        if not seen:
            seen.append(torch.empty(0))
            seen[0] = second.module(torch.tensor([[1, 2, 3]])).logits

    mixer = next(m for m in first.module.modules() if hasattr(m, "time_step_limit"))
    mixer.norm.register_forward_pre_hook(nested)
    logits = first.module(torch.tensor([[1, 2, 3]])).logits
    assert torch.equal(logits, seen[0])
    assert not any(m.open_clamps for m in first.module.modules() if hasattr(m, "open_clamps"))


def test_a_float16_directory_is_computed_in_float32_and_says_so(tmp_path: Path) -> None:
    for model_type in ("qwen3", "gpt2"):
        path = make_model_directory(tmp_path / model_type, model_type, dtype="float16")
        model = open_model(path, "auto")
        turns = make_turns()
        drive(model.make_runner(num_blocks=128, block_tokens=8), turns, new_tokens=4)

        assert model.dtype == "float32"
        assert model.warning is not None
        assert "is in float16 and is computed in float32, exactly" in model.warning
        assert_sampled_by(load_peer(path).float(), turns)


def test_contexts_end_with_a_table_of_learned_positions(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 96,
    }
    whisper: dict[str, Any] = {"d_model": 64, "max_target_positions": 40, "encoder_layers": 1}
    path = make_model_directory(
        tmp_path, "whisper", **sizes, **whisper, pad_token_id=0, decoder_start_token_id=0
    )
    assert open_model(path, "float32").context_tokens_max == 40
    bart: dict[str, Any] = {
        "d_model": 64,
        "max_position_embeddings": 40,
        "encoder_layers": 1,
        "pad_token_id": 0,
    }
    path = make_model_directory(tmp_path / "bart", "bart", **sizes, **bart)
    assert open_model(path, "float32").context_tokens_max == 40  # its table has two rows more


def test_a_model_without_an_lm_head_is_refused_by_name(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4)
    model: Any = transformers.GPT2ForSequenceClassification(config)
    model.save_pretrained(tmp_path)

    words = "is a GPT2ForSequenceClassification, which has no LM head.*such as a GPT2LMHeadModel"
    with pytest.raises(ModelError, match=words):
        open_model(tmp_path, "float32")
