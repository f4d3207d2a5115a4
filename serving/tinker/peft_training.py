"""Reference training backend: torch and PEFT, several LoRA adapters on one resident base model.

Runs on a CPU, or on a GPU that torch sees. Letters in shapes: B sequences of a micro-batch, T
positions of the longest, V vocabulary, K targets of one position.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

from tidegate.engine.models.quiet_transformers import quiet_transformers
from tidegate.serving.tinker.losses import (
    RATIO_MASK,
    TARGETS,
    LossFunction,
    LossTerms,
    loss_function,
)
from tidegate.serving.tinker.training import (
    LORA_ALPHA,
    AdamStep,
    BatchResult,
    Datum,
    DatumResult,
    LoraSpec,
    LossBatch,
    TrainedAdapter,
    UserError,
)

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
"""Projections that engines apply adapters to, by Hugging Face's names."""

RANK_MAX = 512
"""Largest rank that engines accept."""

MICRO_BATCH_TOKENS = 2048
"""Padded positions of one forward pass, unless a single sequence is longer: the logits of a
vocabulary of 150,000 take 1.2 GB at float32."""

PLACEHOLDER = "placeholder"
"""Adapter that is never used: PEFT's model cannot be without one."""

CONFIG_FILE, TENSORS_FILE = "adapter_config.json", "adapter_model.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
"""Adam's state, one tensor per parameter and moment: ``NAME/exp_avg``."""


@dataclass(slots=True)
class _Model:
    """One adapter in training."""

    name: str
    """The adapter's name in PEFT's model; a model id may have dots, which PEFT refuses."""
    parameters: dict[str, torch.nn.Parameter]
    """Trained parameters, by PEFT's names in adapter files."""
    optimizer: torch.optim.AdamW


class PeftTraining:
    """Trains LoRA adapters on one base model by PEFT.

    Implements :class:`~tidegate.serving.tinker.training.TrainingBackend`.
    """

    def __init__(self, model: Path, *, device: str = "cpu") -> None:
        """Load the base model, in the dtype of its directory."""
        with quiet_transformers():
            base: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto")
        if getattr(base.config.get_text_config(), "attn_logit_softcapping", None) is not None:
            base.set_attn_implementation("eager")  # transformers 5.17's default leaves the cap out
        base.requires_grad_(False)
        linear = {
            name.rpartition(".")[2]
            for name, module in base.named_modules()
            if isinstance(module, torch.nn.Linear)
        }
        self._attention = [name for name in ATTENTION if name in linear]
        self._mlp = [name for name in MLP if name in linear]
        self._base_name = str(model)
        self._vocab_size: int = base.get_input_embeddings().num_embeddings
        placeholder = self._config((self._attention or self._mlp)[:1], rank=1)
        self._peft = peft.PeftModel(base.to(device).eval(), placeholder, PLACEHOLDER)
        self._device = device
        self._models: dict[str, _Model] = {}
        self._created = 0

    # ------------------------------------------------------------ adapters

    def create(self, model_id: str, spec: LoraSpec) -> None:
        """Add an adapter that changes nothing yet."""
        wanted = [
            *(self._attention if spec.train_attn else ()),
            *(self._mlp if spec.train_mlp else ()),
        ]
        if not wanted:
            raise UserError(
                f"an adapter of train_attn={spec.train_attn}, train_mlp={spec.train_mlp} has no "
                f"projection to train in this base model, which has "
                f"{', '.join([*self._attention, *self._mlp])}"
            )
        if not 0 < spec.rank <= RANK_MAX:
            raise UserError(f"rank must be in [1, {RANK_MAX}], got {spec.rank}")
        name = f"model{self._created}"
        self._created += 1
        with torch.random.fork_rng(devices=[]):
            if spec.seed is not None:
                torch.manual_seed(spec.seed)
            else:
                torch.seed()
            self._peft.add_adapter(name, self._config(wanted, rank=spec.rank))
        marker = f".{name}."
        parameters = {
            full.replace(marker, "."): parameter
            for full, parameter in self._peft.named_parameters()
            if marker in full
        }
        for parameter in parameters.values():
            parameter.data = parameter.data.float()  # Adam's small steps would vanish in bfloat16
        optimizer = torch.optim.AdamW(parameters.values())
        self._models[model_id] = _Model(name, parameters, optimizer)

    def adapter(self, model_id: str) -> TrainedAdapter:
        """Return a copy of the adapter for the engines."""
        model = self._models[model_id]
        tensors = {n: p.detach().cpu().clone().contiguous() for n, p in model.parameters.items()}
        return TrainedAdapter(tensors, _plain_config(self._peft.peft_config[model.name]))

    def remove(self, model_id: str) -> None:
        """Drop an adapter; harmless if there is none."""
        model = self._models.pop(model_id, None)
        if model is not None:
            self._peft.set_adapter(PLACEHOLDER)
            self._peft.delete_adapter(model.name)

    def _config(self, projections: Sequence[str], *, rank: int) -> peft.LoraConfig:
        return peft.LoraConfig(
            r=rank,
            lora_alpha=LORA_ALPHA,
            target_modules=list(projections),
            base_model_name_or_path=self._base_name,
        )

    # ------------------------------------------------------------ training

    def forward_backward(
        self, model_id: str, batch: LossBatch, *, forward_only: bool
    ) -> BatchResult:
        """Compute a loss, and unless ``forward_only`` add its gradient to the adapter's."""
        loss = loss_function(batch.loss_fn)
        self._check(loss, batch)
        self._peft.set_adapter(self._models[model_id].name)
        results: list[DatumResult | None] = [None] * len(batch.data)
        loss_sum = 0.0
        with torch.set_grad_enabled(not forward_only):
            for places in micro_batches([len(datum.token_ids) for datum in batch.data]):
                data = [batch.data[place] for place in places]
                logprobs = self._logprobs(data)
                total = torch.zeros((), device=self._device)
                for place, datum, own in zip(places, data, logprobs, strict=True):
                    inputs = {
                        name: torch.from_numpy(values).to(self._device, torch.float32)
                        for name, values in datum.loss_inputs.items()
                        if name != TARGETS
                    }
                    losses = loss.token_losses(LossTerms(own, inputs, batch.loss_config))
                    total = total + losses.sum()
                    results[place] = DatumResult(_numpy(own), _numpy(losses))
                if not forward_only:
                    total.backward()  # type: ignore[no-untyped-call]
                loss_sum += float(total.detach())
        return BatchResult([each for each in results if each is not None], {"loss:sum": loss_sum})

    def _logprobs(self, data: Sequence[Datum]) -> list[torch.Tensor]:
        """Return each sequence's target log-probs, shaped as its targets."""
        longest = max(len(datum.token_ids) for datum in data)
        ids = torch.zeros(len(data), longest, dtype=torch.long)  # [B, T], padded on the right
        mask = torch.zeros_like(ids)
        for row, datum in enumerate(data):
            ids[row, : len(datum.token_ids)] = torch.from_numpy(datum.token_ids)
            mask[row, : len(datum.token_ids)] = 1
        output = self._peft(
            input_ids=ids.to(self._device), attention_mask=mask.to(self._device), use_cache=False
        )
        found = []
        for row, datum in enumerate(data):
            rows = torch.log_softmax(output.logits[row, : len(datum.token_ids)].float(), dim=-1)
            targets = torch.from_numpy(datum.loss_inputs[TARGETS]).to(self._device)
            columns = targets if targets.ndim == 2 else targets[:, None]
            found.append(rows.gather(-1, columns).reshape(targets.shape))
        return found

    def _check(self, loss: LossFunction, batch: LossBatch) -> None:
        known = loss.required | loss.optional
        if unknown := set(batch.loss_config) - loss.config_fields:
            raise UserError(
                f"loss_fn={batch.loss_fn!r} has no setting {min(unknown)!r}; its settings are "
                f"{sorted(loss.config_fields) or 'none'}"
            )
        if lacking := loss.required_config - set(batch.loss_config):
            raise UserError(
                f"loss_fn={batch.loss_fn!r} needs {', '.join(sorted(lacking))} in loss_fn_config: "
                f"there is no default"
            )
        for name, value in batch.loss_config.items():
            if not math.isfinite(value):
                raise UserError(f"loss_fn_config[{name!r}] must be finite, got {value}")
        for place, datum in enumerate(batch.data):
            where = f"data[{place}]"
            given = set(datum.loss_inputs)
            if missing := loss.required - given:
                raise UserError(f"{where} lacks {min(missing)!r}, which {batch.loss_fn!r} needs")
            if surplus := given - known:
                raise UserError(
                    f"{where} has {min(surplus)!r}, which {batch.loss_fn!r} does not use; it uses "
                    f"{', '.join(sorted(known))}"
                )
            self._check_shapes(where, datum)
            if RATIO_MASK in given and not datum.loss_inputs[RATIO_MASK].any():
                raise UserError(f"{where}: {RATIO_MASK} marks no token; mark the sampled ones")

    def _check_shapes(self, where: str, datum: Datum) -> None:
        positions, targets = len(datum.token_ids), datum.loss_inputs[TARGETS]
        if not positions:
            raise UserError(f"{where} has no token; give at least 1")
        if targets.ndim not in (1, 2) or len(targets) != positions:
            raise UserError(
                f"{where} has {positions} input tokens, so target_tokens must have as many rows, "
                f"got shape {list(targets.shape)}"
            )
        for name, ids in (("model_input", datum.token_ids), (TARGETS, targets)):
            if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocab_size:
                raise UserError(
                    f"{where}: ids of {name} must be in [0, {self._vocab_size}), got "
                    f"[{ids.min()}, {ids.max()}]"
                )
        for name, values in datum.loss_inputs.items():
            if values.shape != targets.shape:
                raise UserError(
                    f"{where}: {name} has shape {list(values.shape)}, and target_tokens "
                    f"{list(targets.shape)}; they must be equal"
                )
            if not np.isfinite(values).all():
                raise UserError(
                    f"{where}: {name} has a value that is NaN or infinite; all must be finite"
                )

    def optim_step(self, model_id: str, step: AdamStep) -> Mapping[str, float]:
        """Update the adapter with its gradient, clear the gradient, and return metrics."""
        model = self._models[model_id]
        parameters = [p for p in model.parameters.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(p.grad for p in parameters if p.grad is not None)
        if not norm.isfinite():
            self.clear_gradients(model_id)
            raise UserError(
                "the gradient has NaN or infinity, so it was discarded and the weights are "
                "unchanged: look for advantages, weights or loss settings that are too large, or "
                "go back to a checkpoint if the weights have diverged"
            )
        if step.grad_clip_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, step.grad_clip_norm, norm)
        for group in model.optimizer.param_groups:
            group.update(
                lr=step.learning_rate,
                betas=step.betas,
                eps=step.eps,
                weight_decay=step.weight_decay,
            )
        model.optimizer.step()
        model.optimizer.zero_grad(set_to_none=True)
        return {"grad_norm": float(norm)}

    def clear_gradients(self, model_id: str) -> None:
        """Forget the gradients since the last step."""
        self._models[model_id].optimizer.zero_grad(set_to_none=True)

    # ------------------------------------------------------------ files

    def save(self, model_id: str, directory: Path) -> None:
        """Write the adapter to a directory as PEFT does, and the optimizer's state beside it."""
        model = self._models[model_id]
        write_adapter_files(self.adapter(model_id), directory)
        state: dict[str, torch.Tensor] = {}
        for name, parameter in model.parameters.items():
            for moment, value in model.optimizer.state.get(parameter, {}).items():
                state[f"{name}/{moment}"] = value.detach().cpu().clone()
        save_file(state, directory / OPTIMIZER_FILE)

    def load(self, model_id: str, directory: Path, *, optimizer: bool) -> None:
        """Replace the adapter's weights by those of a directory of :meth:`save`."""
        model = self._models[model_id]
        saved = load_file(directory / TENSORS_FILE)
        shapes = {name: tuple(p.shape) for name, p in model.parameters.items()}
        if shapes != {name: tuple(tensor.shape) for name, tensor in saved.items()}:
            raise UserError(
                f"the checkpoint {directory.name} is of another shape than this model's adapter; "
                f"create a training client from it instead"
            )
        state = load_file(directory / OPTIMIZER_FILE) if optimizer else {}
        with torch.no_grad():
            for name, parameter in model.parameters.items():
                parameter.copy_(saved[name])
        model.optimizer = torch.optim.AdamW(model.parameters.values())
        for key, value in state.items():
            name, _, moment = key.rpartition("/")
            model.optimizer.state[model.parameters[name]][moment] = value.to(
                value.device if moment == "step" else self._device
            )


def write_adapter_files(adapter: TrainedAdapter, directory: Path) -> None:
    """Write an adapter to a directory as PEFT's ``save_pretrained`` does."""
    directory.mkdir(parents=True, exist_ok=True)
    save_file(dict(adapter.tensors), directory / TENSORS_FILE)
    (directory / CONFIG_FILE).write_text(json.dumps(adapter.config, indent=2, sort_keys=True))


def micro_batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Yield places of sequences of similar length, at most MICRO_BATCH_TOKENS padded together."""
    batch: list[int] = []
    for place in sorted(range(len(lengths)), key=lambda each: lengths[each]):
        if batch and (len(batch) + 1) * lengths[place] > MICRO_BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def _numpy(values: torch.Tensor) -> "np.typing.NDArray[np.float32]":
    return values.detach().float().cpu().numpy()


def _plain_config(config: Any) -> dict[str, Any]:
    fields: dict[str, Any] = config.to_dict()
    return {
        name: sorted(value) if isinstance(value, set) else getattr(value, "value", value)
        for name, value in fields.items()
    }
