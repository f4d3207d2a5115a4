"""Calls of the Tinker SDK that several tests make; import it only where the SDK is."""

from pathlib import Path
from typing import Any

import numpy as np
import tinker

SENTENCE = list(range(20, 30))


def datum(token_ids: list[int] = SENTENCE, **inputs: Any) -> Any:
    """One sequence, each token of which predicts the next."""
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(token_ids[:-1]),
        loss_fn_inputs={"target_tokens": np.asarray(token_ids[1:]), **inputs},
    )


def new_client(service: Any, model: Path, **lora: Any) -> Any:
    return service.create_lora_training_client(base_model=str(model), rank=4, **lora).result()


def train(client: Any, steps: int = 1, learning_rate: float = 0.02) -> list[float]:
    """Train, with the next steps sent before the results of the last ones are read; return the
    losses."""
    outputs = []
    for _ in range(steps):
        outputs.append(client.forward_backward([datum()], "cross_entropy"))
        last = client.optim_step(tinker.AdamParams(learning_rate=learning_rate))
    last.result()
    return [output.result().metrics["loss:sum"] for output in outputs]
