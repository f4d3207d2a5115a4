"""Tensor-parallel sharding: one rank's slices of the tensors, and a config with its sizes.

A layer's first matrices (query, key, value; gate, up) are split by outputs, its last ones (output,
down) by inputs; so a layer needs two all-reduces. KV heads are split, or repeated if there are
fewer than ranks. Experts are assigned whole; embedding and LM head are split by vocabulary. Norms,
router and a classification head are on every rank.

Shoeybi et al. 2019, arXiv:1909.08053, section 3.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tidegate.engine.models.layer_weights import LayerWeights, layer_targets
from tidegate.engine.models.model_config import ModelConfig
from tidegate.engine.weights.weight_store import CopyTarget, TensorSlice
from tidegate.errors import ConfigError

CUT_BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
CUT_BY_INPUTS = ("o_proj", "down_proj")
KV_PROJECTIONS = ("k_proj", "v_proj")


@dataclass(frozen=True, slots=True)
class TensorShard:
    """One rank's part of a model; the whole model if there is only one rank."""

    rank: int = 0
    ranks: int = 1

    @property
    def is_whole(self) -> bool:
        """Whether there is only one rank."""
        return self.ranks == 1

    def local(self, config: ModelConfig) -> ModelConfig:
        """Return the config with this rank's sizes, except ``vocab_size``, which stays whole.

        Raises:
            ConfigError: the model cannot be split evenly.
        """
        if self.is_whole:
            return config
        if config.attention_sinks:
            raise ConfigError(
                f"tensor_parallel_size={self.ranks}: {config.architecture} is served by one rank "
                "only; leave tensor_parallel_size out"
            )
        self._refuse_uneven(config)
        experts = config.experts
        if experts is not None:
            local_range = experts.count // self.ranks
            experts = replace(
                experts, local_range=range(self.rank * local_range, (self.rank + 1) * local_range)
            )
        return replace(
            config,
            num_heads=config.num_heads // self.ranks,
            num_kv_heads=max(1, config.num_kv_heads // self.ranks),
            intermediate_size=config.intermediate_size // self.ranks,
            experts=experts,
        )

    def vocabulary(self, config: ModelConfig) -> TensorSlice:
        """Return the range of tokens whose embeddings and logits this rank holds.

        The last rank's may be shorter.
        """
        size = self.vocabulary_rows(config)
        first = min(self.rank * size, config.vocab_size)
        return TensorSlice(0, first, min(size, config.vocab_size - first))

    def vocabulary_rows(self, config: ModelConfig) -> int:
        """Return the vocabulary rows of each rank; equal, so that logits can be gathered."""
        return -(-config.vocab_size // self.ranks)

    def layer_targets(
        self, layer: LayerWeights, local: ModelConfig, full_config: ModelConfig
    ) -> Iterator[tuple[str, CopyTarget]]:
        """Yield the copy target of this rank's part of each published tensor of a layer."""
        for name, target in layer_targets(layer, local):
            if self.is_whole or ".experts." in name:
                yield name, target
            else:
                yield name, self._cut(name, target, full_config)
        if layer.router is not None and local.experts is not None:
            (inner, hidden), experts = layer.gate_up[0].shape, local.experts
            for expert in (n for n in range(experts.count) if n not in experts.local):
                prefix = f"mlp.experts.{expert}"
                yield f"{prefix}.gate_proj.weight", CopyTarget((inner // 2, hidden), ())
                yield f"{prefix}.up_proj.weight", CopyTarget((inner // 2, hidden), ())
                yield f"{prefix}.down_proj.weight", CopyTarget((hidden, inner // 2), ())

    def _cut(self, name: str, target: CopyTarget, full_config: ModelConfig) -> CopyTarget:
        projection, kind = name.split(".")[-2:]
        if projection in CUT_BY_OUTPUTS:
            dim = 0
        elif projection in CUT_BY_INPUTS and kind == "weight":
            dim = 1
        else:
            return target
        count = target.shape[dim]
        full, first = count * self.ranks, count * self.rank
        if projection in KV_PROJECTIONS:
            full = full_config.num_kv_heads * full_config.head_dim
            first = self.rank * full_config.num_kv_heads // self.ranks * full_config.head_dim
        shape = list(target.shape)
        shape[dim] = full
        return replace(target, shape=tuple(shape), part=TensorSlice(dim, first, count))

    def _refuse_uneven(self, config: ModelConfig) -> None:
        counts = {
            "query heads": config.num_heads,
            "intermediate_size": config.intermediate_size,
        }
        if config.experts is not None:
            counts["experts"] = config.experts.count
        uneven = [f"{count} {name}" for name, count in counts.items() if count % self.ranks]
        larger, smaller = max(config.num_kv_heads, self.ranks), min(config.num_kv_heads, self.ranks)
        if larger % smaller:
            uneven.append(f"{config.num_kv_heads} KV heads")
        if uneven:
            raise ConfigError(
                f"tensor_parallel_size={self.ranks}: {config.architecture} has "
                f"{' and '.join(uneven)}, which can't be split evenly over {self.ranks} ranks; set "
                "another number of ranks"
            )


WHOLE = TensorShard()
