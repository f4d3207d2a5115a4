"""The Tinker SDK, unmodified, trains and samples through the server: `make test-tinker`."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

tinker = pytest.importorskip("tinker", reason="make test-tinker installs the SDK")

from tests.serving.tinker_server.sdk_calls import SENTENCE, datum, new_client, train  # noqa: E402

pytestmark = pytest.mark.wire


def forward_logprobs(client: Any, token_ids: list[int]) -> list[float]:
    output = client.forward([datum(token_ids)], "cross_entropy").result()
    found: list[float] = output.loss_fn_outputs[0]["logprobs"].data
    return found


def test_a_model_learns_a_sentence_and_its_sampler_says_it(service: Any, model: Path) -> None:
    client = service.create_lora_training_client(base_model=str(model), rank=8, seed=1).result()
    losses = train(client, steps=30)
    assert losses[-1] < 0.1 * losses[0]

    sampler = client.save_weights_and_get_sampling_client().result()
    said = sampler.sample(
        tinker.ModelInput.from_ints(SENTENCE[:3]),
        1,
        tinker.SamplingParams(max_tokens=7, temperature=0.0),
    ).result()
    assert said.sequences[0].tokens == SENTENCE[3:]


def test_logprobs_of_samples_prompts_and_forward_passes_are_the_same(
    service: Any, model: Path
) -> None:
    client = new_client(service, model)
    train(client, learning_rate=0.05)
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt = tinker.ModelInput.from_ints(SENTENCE[:4])
    answer = sampler.sample(
        prompt,
        3,
        tinker.SamplingParams(max_tokens=20),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=3,
    ).result()

    for sequence in answer.sequences:
        everything = SENTENCE[:4] + sequence.tokens
        expected = forward_logprobs(client, everything)
        assert sequence.logprobs == pytest.approx(expected[3:], abs=1e-4)
        assert len(sequence.topk_logprobs[0]) == 3
    assert answer.prompt_logprobs[0] is None
    assert answer.prompt_logprobs[1:] == pytest.approx(expected[:3], abs=1e-4)
    assert answer.topk_prompt_logprobs[0] is None
    assert [len(each) for each in answer.topk_prompt_logprobs[1:]] == [2, 2, 2]
    base = service.create_sampling_client(base_model=str(model)).result()
    assert base.compute_logprobs(prompt).result()[1:] != pytest.approx(expected[:3], abs=1e-2)


def test_a_snapshot_keeps_its_weights_and_an_inflight_sampler_gets_newer_ones(
    service: Any, model: Path
) -> None:
    client = new_client(service, model)
    train(client, learning_rate=0.05)
    snapshot = client.save_weights_and_get_sampling_client().result()
    inflight = client.save_weights_and_get_sampling_client(kind="inflight").result()
    prompt = tinker.ModelInput.from_ints(SENTENCE)
    first = snapshot.compute_logprobs(prompt).result()[1:]
    # Which of the prompt's KV is cached decides the last bits.
    assert inflight.compute_logprobs(prompt).result()[1:] == pytest.approx(first, abs=1e-5)

    train(client, learning_rate=0.05)
    newer = client.save_weights_and_get_sampling_client(kind="inflight").result()
    second = newer.compute_logprobs(prompt).result()[1:]
    assert second == pytest.approx(forward_logprobs(client, SENTENCE), abs=1e-4)
    assert second != pytest.approx(first, abs=1e-3)
    assert inflight.compute_logprobs(prompt).result()[1:] == pytest.approx(second, abs=1e-5)
    assert snapshot.compute_logprobs(prompt).result()[1:] == pytest.approx(first, abs=1e-5)


def test_saved_sampler_weights_are_sampled_by_their_path_and_do_not_change(
    service: Any, model: Path
) -> None:
    client = new_client(service, model)
    train(client, learning_rate=0.05)
    path = client.save_weights_for_sampler("first").result().path
    assert path == f"tinker://{client.model_id}/sampler_weights/first"
    expected = forward_logprobs(client, SENTENCE)
    train(client, learning_rate=0.05)
    with pytest.raises(tinker.RequestFailedError, match="first exists, and checkpoints do not"):
        client.save_weights_for_sampler("first").result()
    sampler = service.create_sampling_client(model_path=path).result()
    found = sampler.compute_logprobs(tinker.ModelInput.from_ints(SENTENCE)).result()
    assert found[1:] == pytest.approx(expected, abs=1e-4)
    assert sampler.get_base_model() == str(model)


@pytest.mark.parametrize("loss_fn", ["importance_sampling", "ppo", "cispo"])
def test_a_policy_loss_makes_rewarded_tokens_likelier(
    service: Any, model: Path, loss_fn: str
) -> None:
    client = new_client(service, model, seed=1)
    before = forward_logprobs(client, SENTENCE)
    advantages = np.asarray([1.0] * 9, np.float32)
    policy = datum(SENTENCE, logprobs=np.asarray(before, np.float32), advantages=advantages)
    output = client.forward_backward([policy], loss_fn)
    client.optim_step(tinker.AdamParams(learning_rate=0.01)).result()
    sign = sum(before) if loss_fn == "cispo" else 9.0
    assert output.result().metrics["loss:sum"] == pytest.approx(-sign, rel=1e-3)
    assert sum(forward_logprobs(client, SENTENCE)) > sum(before)


def test_a_custom_loss_runs_on_the_client_and_gives_the_same_gradient(
    service: Any, model: Path
) -> None:
    def loss(data: Any, logprobs: Any) -> Any:
        return -sum(each.sum() for each in logprobs), {}

    steps = []
    for is_custom in (True, False):
        client = new_client(service, model, seed=7)
        if is_custom:
            client.forward_backward_custom([datum(SENTENCE)], loss).result()
        else:
            client.forward_backward([datum(SENTENCE)], "cross_entropy").result()
        steps.append(client.optim_step(tinker.AdamParams()).result().metrics["grad_norm"])
    assert steps[0] == pytest.approx(steps[1], rel=1e-5)


def test_what_is_not_served_is_refused_by_name_and_training_continues(
    service: Any, model: Path
) -> None:
    client = new_client(service, model)
    with pytest.raises(tinker.RequestFailedError, match="'stable_reinforce' is not served here"):
        client.forward_backward([datum(SENTENCE)], "stable_reinforce").result()
    image = tinker.types.ImageChunk(data=b"png", format="png")
    picture = tinker.Datum(
        model_input=tinker.ModelInput(chunks=[image]),
        loss_fn_inputs={"target_tokens": np.asarray([1])},
    )
    with pytest.raises(tinker.RequestFailedError, match="a chunk of image; only encoded_text"):
        client.forward_backward([picture], "cross_entropy").result()
    dimuon = tinker.types.optimizer.DimuonParams(learning_rate=0.1)
    with pytest.raises(tinker.RequestFailedError, match="'dimuon' is not served here"):
        client.optim_step(dimuon).result()
    train(client, learning_rate=0.05)

    with pytest.raises(tinker.BadRequestError, match="'other/model' is not served here"):
        service.create_lora_training_client(base_model="other/model").result()
    with pytest.raises(tinker.RequestFailedError, match="has no projection to train"):
        service.create_lora_training_client(
            base_model=str(model), train_mlp=False, train_attn=False
        ).result()
    base = service.create_sampling_client(base_model=str(model)).result()
    prompt = tinker.ModelInput.from_ints([20, 21])
    for options, why in (
        ({"prompt_alt_tokens_k": 2}, "prompt_alt_tokens_k is not served here"),
        ({"num_samples": 0}, "num_samples must be in"),
        ({"sampling_params": tinker.SamplingParams(max_tokens=0)}, "max_tokens must be at least 1"),
        ({"prompt": tinker.ModelInput.from_ints([2000])}, r"token ids must be in \[0, 96\)"),
    ):
        given = {
            "prompt": prompt,
            "num_samples": 1,
            "sampling_params": tinker.SamplingParams(max_tokens=1),
        }
        with pytest.raises(tinker.RequestFailedError, match=why):
            base.sample(**{**given, **options}).result()


def test_a_model_and_its_samplers_end_with_the_session(
    server: Any, service: Any, model: Path
) -> None:
    with tinker.ServiceClient(base_url=server.url, api_key="tml-anybody") as other:
        client = new_client(other, model)
        sampler = client.save_weights_and_get_sampling_client().result()
        path = client.save_weights_for_sampler("kept").result().path
        sampler.compute_logprobs(tinker.ModelInput.from_ints(SENTENCE)).result()
    kept = service.create_sampling_client(model_path=path).result()
    kept.compute_logprobs(tinker.ModelInput.from_ints(SENTENCE)).result()
    ended = path.replace("kept", "ephemeral-0")
    with pytest.raises(tinker.BadRequestError, match="there is no checkpoint"):
        service.create_sampling_client(model_path=ended).result()
