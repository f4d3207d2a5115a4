"""prime-rl's client against Tidegate's server: sample, train, update weights under way.

    python -m examples.prime_rl_loop        # in the Python in which prime-rl is installed

prime-rl's orchestrator speaks to its inference servers through ``prime_rl.utils.client``, which is
used here unchanged: it pauses the engines, has them read a directory of weights, and resumes. In
prime-rl's own configuration, give the address of ``tidegate serve`` as ``base_url`` of the client,
its control token as the API key, and ``weight_broadcast`` ``filesystem``. prime-rl's trainer needs
GPUs; in its place is a torch step here, on a tiny random model that learns to write tokens with
small numbers.
"""

import argparse
import asyncio
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import Qwen3ForCausalLM
from transformers.utils import logging as transformers_logging

import tidegate
from examples.worker_grpo import (
    LEARNING_RATE,
    SAMPLES,
    TOKENS_MAX,
    VOCABULARY,
    make_model,
    train_step,
)
from tidegate.integrations.rollout_worker import Sample

PROMPTS = 4

KEY = "PRIME_RL_INFERENCE_KEY"
"""Environment variable from which prime-rl's client reads the server's key."""


async def train(
    server: tidegate.VLLMServer, model_path: Path, outputs: Path, steps: int
) -> list[float]:
    """Sample, train and update the server's weights in turn; return each step's mean reward."""
    from prime_rl.utils import client

    os.environ[KEY] = server.control_token or ""
    config = SimpleNamespace(
        base_url=f"{server.url}/v1",
        admin_base_url=None,
        headers={},
        headers_from_env={},
        api_key_var=KEY,
    )
    admins = client.setup_admin_clients(config)
    await client.check_health(admins, timeout=30)
    model = Qwen3ForCausalLM.from_pretrained(model_path, dtype=torch.float32, local_files_only=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    history: list[float] = []
    for step in range(steps):
        prompts = torch.randint(VOCABULARY, (PROMPTS, 3)).tolist()
        sampled = [sample(admins[0], prompt, salt=str(step)) for prompt in prompts]
        history.append(train_step(model, optimizer, await asyncio.gather(*sampled)))
        directory = outputs / f"step_{step + 1}"
        model.save_pretrained(directory)
        await client.update_weights(admins, directory, step=step + 1)
        print(f"step {step}: reward {history[-1]:.3f}", flush=True)
    for admin in admins:
        await admin.aclose()
    return history


async def sample(admin: Any, prompt: list[int], *, salt: str) -> list[Sample]:
    """Return a group of samples, tokens in and tokens out, as prime-rl's environments ask."""
    sampling = {"n": SAMPLES, "max_tokens": TOKENS_MAX, "min_tokens": TOKENS_MAX, "logprobs": 0}
    body = {"token_ids": prompt, "sampling_params": sampling, "cache_salt": salt}
    answer = (await admin.post("/inference/v1/generate", json=body)).raise_for_status().json()
    return [
        Sample(
            prompt_token_ids=prompt,
            token_ids=choice["token_ids"],
            logprobs=[token["logprob"] for token in choice["logprobs"]["content"]],
            versions=[],
            finish_reason=choice["finish_reason"],
            text="",
        )
        for choice in answer["choices"]
    ]


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Run the loop; return the mean reward of each step."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args(arguments).steps
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as directory:
        path, outputs = Path(directory) / "model", Path(directory) / "outputs"
        make_model(path)
        outputs.mkdir()
        with tidegate.vllm_server(model=path, weight_directories=[outputs]) as server:
            return asyncio.run(train(server, path, outputs, steps))


if __name__ == "__main__":
    main()
