"""A real engine process with other architectures, weight updates in flight included."""

from pathlib import Path

import pytest
import torch

from tests.engine.models.test_model_parity import TOLERANCE_NATS, load_peer
from tests.engine.orchestra import PROMPT, Orchestra, Publisher
from tests.models import make_model_directory
from tidegate.transport.messages import LENGTH, SamplingParams, Shutdown

pytestmark = pytest.mark.wire

OPTIONS = ["--max-running-turns", "8", "--max-step-tokens", "16"]
"""Small steps, so that the prompt is prefilled in chunks."""


@pytest.mark.parametrize(("model_type", "code"), [("gemma2", "tidegate"), ("gpt2", "transformers")])
def test_a_turn_continues_under_new_weights_and_the_engine_says_whose_code_computes(
    model_type: str, code: str, tmp_path: Path
) -> None:
    directories = [
        make_model_directory(tmp_path / str(seed), model_type, seed=seed) for seed in range(2)
    ]
    with Orchestra(tmp_path, directories[0], OPTIONS) as engine:
        assert engine.welcome().model_code == code
        publisher = Publisher(engine)
        turn = engine.submit(PROMPT, SamplingParams(max_tokens=40, temperature=0.0))
        engine.read_tokens(turn, 3)
        engine.acknowledges = False  # so that it can't finish before the swap
        publisher.stage(1, directories[1])
        engine.acknowledges = True
        engine.acknowledge()
        publisher.swap(1, "keep", "recompute")
        seen = engine.finish(turn)
        engine.send(Shutdown())
        assert engine.exit_status() == 0
        publisher.close()
        output = engine.stderr.read_text()

    assert ("So transformers computes it" in output) == (code == "transformers")
    assert seen.finish == LENGTH
    assert sorted(set(seen.versions)) == [0, 1]
    context = torch.tensor([PROMPT + seen.token_ids])
    for version, path in enumerate(directories):
        with torch.no_grad():
            logits = load_peer(path)(context).logits[0, len(PROMPT) - 1 : -1]
        logprobs = torch.log_softmax(logits, -1)
        for index in [n for n, sampled_by in enumerate(seen.versions) if sampled_by == version]:
            assert seen.token_ids[index] == int(logprobs[index].argmax())
            expected = float(logprobs[index].amax())
            assert seen.logprobs[index] == pytest.approx(expected, abs=TOLERANCE_NATS)
