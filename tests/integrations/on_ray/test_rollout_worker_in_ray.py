"""RolloutWorker as a Ray actor; `make test-ray` runs it, where Ray is installed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import tidegate
from tests.models import make_model_directory

ray: Any = pytest.importorskip("ray", reason="Ray is not installed; make test-ray has it")


@pytest.fixture
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_rollout_worker_actors_generate_update_weights_and_end_with_their_engines(
    cluster: None, tmp_path: Path
) -> None:
    model = make_model_directory(tmp_path / "qwen3")
    actor: Any = ray.remote(num_cpus=1)(tidegate.RolloutWorker).remote(str(model))
    prompts = [[10, 11, 12], [20, 21]]
    groups = ray.get(actor.generate.remote(prompts, {"n": 2, "max_tokens": 4}), timeout=120)
    assert [len(group) for group in groups] == [2, 2]
    sample = groups[0][0]
    assert sample.versions == [0] * len(sample.token_ids)
    (scored,) = ray.get(
        actor.compute_log_probs.remote([sample.prompt_token_ids + sample.token_ids], 3)
    )
    assert scored == pytest.approx(sample.logprobs, abs=1e-4)
    state = {name: tensor + 0.1 for name, tensor in load_file(model / "model.safetensors").items()}
    assert ray.get(actor.update_weights.remote(state)) == 1
    again = ray.get(actor.generate.remote(prompts, {"max_tokens": 4}))
    assert {version for group in again for version in group[0].versions} == {1}
    ray.get(actor.shutdown.remote())
