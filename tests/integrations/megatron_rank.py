"""Rank of Megatron-core on a CPU: ``python -m tests.integrations.megatron_rank DIR RANK JSON``.

It makes a random GPTModel of DIR/model's config, computes the logits of a sequence with the other
ranks, and writes them and its parts to DIR/RANK.pt.
"""

import contextlib
import json
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch.nn import functional

from tests.megatron_layout import Sizes
from tidegate.integrations.megatron import MegatronRanks, hugging_face_parts

TOKENS = list(range(3, 39, 3))


def use_cpu() -> None:
    """Replace what Megatron-core's forward pass asks of CUDA or of TransformerEngine."""
    from megatron.core import tensor_parallel
    from megatron.core.transformer.moe import moe_utils

    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    tensor_parallel.get_cuda_rng_tracker().fork = contextlib.nullcontext
    moe_utils.te_general_gemm = None


def transformer_config(config: Any, sizes: Sizes) -> Any:
    """Return Megatron-core's config for a Hugging Face one."""
    from megatron.core.transformer import TransformerConfig

    mixture: dict[str, Any] = {}
    if config.model_type == "qwen3_moe":
        mixture = {
            "num_moe_experts": config.num_experts,
            "moe_router_topk": config.num_experts_per_tok,
            "moe_ffn_hidden_size": config.moe_intermediate_size,
            "moe_token_dispatcher_type": "allgather",
            "moe_router_load_balancing_type": "none",
        }
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=getattr(config, "head_dim", None),
        ffn_hidden_size=config.intermediate_size,
        layernorm_epsilon=config.rms_norm_eps,
        normalization="RMSNorm",
        activation_func=functional.silu,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=config.model_type == "qwen2",
        qk_layernorm=config.model_type.startswith("qwen3"),
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        expert_model_parallel_size=sizes.expert,
        expert_tensor_parallel_size=sizes.expert_tensor,
        **mixture,
    )


def random_model(config: Any, sizes: Sizes, vocabulary: int) -> tuple[Any, MegatronRanks]:
    """Return this rank's model, and its place."""
    from megatron.core import parallel_state as state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    torch.manual_seed(0)  # the same replicas on all ranks
    ours = transformer_config(config, sizes)
    model = GPTModel(
        ours,
        get_gpt_layer_local_spec(
            num_experts=ours.num_moe_experts,
            qk_layernorm=ours.qk_layernorm,
            normalization="RMSNorm",
        ),
        vocab_size=vocabulary,
        max_sequence_length=64,
        pre_process=state.is_pipeline_first_stage(),
        post_process=state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=config.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=config.rope_parameters["rope_theta"],
    ).eval()
    place = MegatronRanks.current(first_layer=model.decoder.layers[0].layer_number - 1)
    for name, parameter in model.named_parameters():
        own = [name, place.first_layer]
        if ".experts." in name:
            own += [place.expert_rank, place.expert_tensor_rank]
        elif getattr(parameter, "tensor_model_parallel", False):
            own += [place.tensor_rank]
        noise = torch.Generator().manual_seed(zlib.crc32(str(own).encode()))
        with torch.no_grad():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=noise))
    return model, place


def logits(model: Any, rank: int, sizes: Sizes) -> torch.Tensor | None:
    """Return this rank's columns of the logits, [tokens, V]; None before the last stage."""
    tokens, places = torch.tensor([TOKENS]), torch.arange(len(TOKENS))[None]
    within = sizes.tensor * sizes.data
    if not model.pre_process:
        hidden = torch.empty(len(TOKENS), 1, model.config.hidden_size)
        dist.recv(hidden, rank - within)
        model.set_input_tensor(hidden)
    mask = torch.ones(1, 1, len(TOKENS), len(TOKENS), dtype=torch.bool).triu(1)
    with torch.no_grad():
        result: torch.Tensor = model(tokens, places, mask)
    if model.post_process:
        return result[0]
    dist.send(result.contiguous(), rank + within)
    return None


def main(directory: Path, rank: int, sizes: Sizes) -> None:
    """Write this rank's parts and logits."""
    from megatron.core import parallel_state

    use_cpu()
    dist.init_process_group(
        "gloo", init_method=f"file://{directory}/meeting", rank=rank, world_size=sizes.world
    )
    parallel_state.initialize_model_parallel(
        sizes.tensor,
        sizes.pipeline,
        expert_model_parallel_size=sizes.expert,
        expert_tensor_parallel_size=sizes.expert_tensor,
    )
    config = transformers.AutoConfig.from_pretrained(directory / "model")
    model, place = random_model(config, sizes, vocabulary=-(-config.vocab_size // 16) * 16)
    parts = hugging_face_parts(model.state_dict(), config, place)
    saved = {name: (part.tensor, part.shape, part.start) for name, part in parts.items()}
    torch.save((saved, place.tensor_rank, logits(model, rank, sizes)), directory / f"{rank}.pt")
    dist.barrier()


if __name__ == "__main__":
    torch.set_num_threads(1)
    _, directory, rank, sizes = sys.argv
    main(Path(directory), int(rank), Sizes(**json.loads(sizes)))
