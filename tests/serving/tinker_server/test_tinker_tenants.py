"""Two tenants at once: each one's training is what it is alone, bit for bit."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tidegate

tinker = pytest.importorskip("tinker", reason="make test-tinker installs the SDK")

pytestmark = [
    pytest.mark.wire,
    pytest.mark.timeout(600),
]

PROMPT = [20, 21, 22, 23]
STEPS, SAMPLES, TOKENS = 5, 8, 12
Curve = list[tuple[float, float]]
"""Mean reward and loss of each step."""


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[tidegate.TinkerServer]:
    with tidegate.tinker_server(
        model=model,
        engines=2,
        deterministic=True,
        api_keys={"tml-alice": "alice", "tml-bob": "bob"},
    ) as server:
        yield server


def learn(
    server: tidegate.TinkerServer, model: Path, key: str, seed: int, *, kind: str = "snapshot"
) -> Curve:
    """Reward even tokens, by a policy gradient over samples of the newest weights."""
    curve: Curve = []
    with tinker.ServiceClient(base_url=server.url, api_key=key) as service:
        client = service.create_lora_training_client(
            base_model=str(model), rank=4, seed=seed
        ).result()
        for step in range(STEPS):
            sampler = client.save_weights_and_get_sampling_client(kind=kind).result()
            params = tinker.SamplingParams(max_tokens=TOKENS, seed=1000 * seed + step, stop=[])
            prompt = tinker.ModelInput.from_ints(PROMPT)
            sequences = sampler.sample(prompt, SAMPLES, params).result().sequences
            rewards = np.array([np.mean([t % 2 == 0 for t in s.tokens]) for s in sequences])
            data = [
                datum(sequence, float(advantage))
                for sequence, advantage in zip(sequences, rewards - rewards.mean(), strict=True)
            ]
            output = client.forward_backward(data, "importance_sampling").result()
            client.optim_step(tinker.AdamParams(learning_rate=0.02)).result()
            curve.append((float(rewards.mean()), output.metrics["loss:sum"]))
    return curve


def datum(sequence: Any, advantage: float) -> Any:
    everything = [*PROMPT, *sequence.tokens]
    before = len(PROMPT) - 1
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(everything[:-1]),
        loss_fn_inputs={
            "target_tokens": np.asarray(everything[1:]),
            "logprobs": np.asarray([0.0] * before + list(sequence.logprobs), np.float32),
            "advantages": np.asarray([0.0] * before + [advantage] * TOKENS, np.float32),
        },
    )


def test_a_tenants_rewards_and_losses_are_those_it_has_alone(
    server: tidegate.TinkerServer, model: Path
) -> None:
    alone = {
        "tml-alice": learn(server, model, "tml-alice", 1),
        "tml-bob": learn(server, model, "tml-bob", 2, kind="inflight"),
    }
    assert alone["tml-alice"] != alone["tml-bob"]
    beside: dict[str, Curve] = {}

    def run(key: str, seed: int, kind: str) -> None:
        beside[key] = learn(server, model, key, seed, kind=kind)

    threads = [
        threading.Thread(target=run, args=each)
        for each in (("tml-alice", 1, "snapshot"), ("tml-bob", 2, "inflight"))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert beside == alone
