"""Trains, samples and saves through the SDK of any release: python release_client.py URL MODEL.

Prints the largest difference between the log-probs of a sampler and of a forward pass.
"""

import os
import sys
from typing import Any

import tinker
from tinker import types

IDS = list(range(20, 40))
N = len(IDS) - 1


def datum(**inputs: float) -> Any:
    given = {name: [value] * N for name, value in inputs.items()}
    tensors = {
        name: types.TensorData(data=values, dtype="float32", shape=[N])
        for name, values in given.items()
    }
    targets = types.TensorData(data=IDS[1:], dtype="int64", shape=[N])
    return types.Datum(
        model_input=types.ModelInput.from_ints(IDS[:-1]),
        loss_fn_inputs={"target_tokens": targets, **tensors},
    )


def ready(client: Any) -> Any:
    """Return a client that later releases return as a future."""
    return client.result() if hasattr(client, "result") else client


def custom_loss(data: Any, logprobs: Any) -> Any:
    return sum((each**2).sum() for each in logprobs), {}


def main(url: str, model: str) -> None:
    service = tinker.ServiceClient(base_url=url)
    client = ready(service.create_lora_training_client(base_model=model, rank=4, seed=1))
    client.forward_backward([datum(weights=1.0)], "cross_entropy").result()
    client.forward_backward([datum(logprobs=-1.0, advantages=1.0)], "ppo").result()
    client.forward_backward_custom([datum()], custom_loss).result()
    client.optim_step(types.AdamParams(learning_rate=1e-3)).result()
    sampler = ready(client.save_weights_and_get_sampling_client())
    prompt = types.ModelInput.from_ints(IDS)
    params = types.SamplingParams(max_tokens=4)
    sampled = sampler.sample(prompt, 2, params, include_prompt_logprobs=True).result()
    assert all(len(each.logprobs) == len(each.tokens) for each in sampled.sequences)
    passed = client.forward([datum(weights=1.0)], "cross_entropy").result()
    trained = passed.loss_fn_outputs[0]["logprobs"].tolist()
    path = client.save_state("kept").result().path
    ready(service.create_training_client_from_state(path))
    saved = client.save_weights_for_sampler("sampled").result().path
    ready(service.create_sampling_client(model_path=saved)).sample(prompt, 1, params).result()
    rest_client = service.create_rest_client()
    assert len(rest_client.list_checkpoints(client.model_id).result().checkpoints) == 2
    rest_client.delete_checkpoint_from_tinker_path(path).result()
    pairs = zip(sampled.prompt_logprobs[1:], trained, strict=True)
    sys.stdout.write(str(max(abs(ours - theirs) for ours, theirs in pairs)))


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # older releases wait for their own threads
