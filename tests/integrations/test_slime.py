"""The rollout function for slime, with slime's own classes and contract tests from a checkout.

    make test-slime SLIME=CHECKOUT

Tried with slime 0.3.1, commit 624b824a8. Its training loop needs GPUs and was not run.
"""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import tidegate
from examples import slime_rollout
from tests.integrations.slime_contract import solve
from tests.models import make_model_directory
from tidegate.errors import ConfigError, EpisodeError
from tidegate.integrations import slime
from tidegate.orchestrator.settings.config import run_settings

CHECKOUT = os.environ.get("TIDEGATE_SLIME", "")

ROOT = Path(__file__).parents[2]

FUNCTION = "tidegate.integrations.slime.generate_rollout"

pytestmark = [
    pytest.mark.wire,
    pytest.mark.skipif(not CHECKOUT, reason="TIDEGATE_SLIME must name slime's checkout"),
]


@pytest.fixture
def sample_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    """slime's ``Sample``; Ray and the router, which it imports besides, are stubbed."""
    monkeypatch.setattr(sys, "path", [*sys.path, CHECKOUT])  # slime's has a package "examples" too
    for name in ("ray", "sglang_router"):
        if name not in sys.modules:
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
    from slime.utils.types import Sample

    return Sample


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_model_directory(tmp_path / "model")


class DataSource:
    """Prompts without end, in groups of two samples."""

    def __init__(self, sample_class: Any) -> None:
        self._sample_class = sample_class
        self.groups = 0

    def get_samples(self, count: int) -> list[list[Any]]:
        groups = []
        for _ in range(count):
            first = 2 * self.groups
            groups.append([self._sample_class(index=first + i, prompt="one") for i in range(2)])
            self.groups += 1
        return groups


def test_slimes_own_contract_tests_pass() -> None:
    contract = f"{CHECKOUT}/tests/plugin_contracts/test_plugin_rollout_contracts.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.integrations.slime_contract"]
    tests = subprocess.run(
        [*command, "-p", "no:cacheprovider", "--rootdir", CHECKOUT, "-c", "/dev/null", contract],
        env=os.environ
        | {
            "PYTHONPATH": f"{ROOT}:{CHECKOUT}:{os.environ.get('PYTHONPATH', '')}",
            "SLIME_CONTRACT_ROLLOUT_FUNCTION_PATH": FUNCTION,
        },
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert tests.returncode == 0, tests.stdout[-3000:] + tests.stderr[-2000:]
    assert "6 passed" in tests.stdout


def test_samples_are_masked_versioned_and_of_the_newest_weights(
    sample_class: Any, model: Path, tmp_path: Path
) -> None:
    weights = tmp_path / "weights"
    args = SimpleNamespace(update_weight_disk_dir=str(weights), reward_key=None)
    source = DataSource(sample_class)
    with tidegate.serve_sync(model=model, group_size=2, groups_per_batch=3, max_staleness=1) as run:
        slime.use_run(run, episode=solve)
        for version in range(3):
            output = slime.generate_rollout(args, version, source)
            assert [len(group) for group in output.samples] == [2, 2, 2]
            indices = [sample.index for group in output.samples for sample in group]
            assert indices == sorted(set(indices))
            for group in output.samples:
                for sample in group:
                    assert sample.loss_mask == [1] * 4 + [0] * 4 + [1] * 3
                    assert len(sample.rollout_log_probs) == sample.response_length == 11
                    assert len(sample.tokens) == len("one") + 11
                    assert sample.reward == 3.0
                    assert sample.status == sample_class.Status.TRUNCATED
                    assert version - 1 <= int(sample.weight_versions[0]) <= version
            written = make_model_directory(weights / f"weight_v{version + 1:06d}", seed=version)
            if version == 1:
                make_model_directory(weights / "weight_v000009")  # being written
            slime.mark_weights(args, str(written), [])
        assert source.groups < 3 * 3 + 3 * 2 + 1  # no more than the bound admits
        assert run.statistics().ledger.error == 0


@pytest.mark.usefixtures("sample_class")
def test_the_example_learns_from_slimes_own_data_source_within_the_bound(
    capsys: pytest.CaptureFixture[str],
) -> None:
    history = slime_rollout.main(["--steps", "16"])
    assert sum(history[-4:]) > sum(history[:4]) + 0.1
    assert "most stale token: 1 versions" in capsys.readouterr().out


def test_a_run_that_hands_over_groups_again_is_refused() -> None:
    run: Any = SimpleNamespace(settings=run_settings(model="m", max_staleness=2, max_uses=2))
    with pytest.raises(ConfigError, match="max_uses=2 hands over groups again"):
        slime.use_run(run)


def test_a_run_is_started_by_slimes_arguments_and_its_reward_model_is_asked(
    sample_class: Any, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slime, "_rollouts", None)
    with pytest.raises(ConfigError, match="use_run"):
        slime.generate_rollout(None, 0, None)
    args = SimpleNamespace(
        hf_checkpoint=str(model),
        n_samples_per_prompt=2,
        rollout_batch_size=2,
        rollout_temperature=1.0,
        rollout_max_response_len=5,
        reward_key=None,
        custom_rm_path=None,
        rm_type="random",
        tidegate={"max_staleness": 0},
    )
    output = slime.generate_rollout(args, 0, DataSource(sample_class))
    rollouts: Any = slime._rollouts
    try:
        assert {sample.reward for group in output.samples for sample in group} <= {0, 1}
        assert all(s.response_length == 5 for group in output.samples for s in group)
    finally:
        rollouts.run.__exit__(None, None, None)


def test_an_episode_that_forks_or_generates_nothing_gives_no_batch(
    sample_class: Any, model: Path
) -> None:
    async def silent(episode: tidegate.Episode, sample: Any) -> float:
        episode.append(sample.prompt)
        return 0.0

    with tidegate.serve_sync(model=model, group_size=2, groups_per_batch=1, max_staleness=0) as run:
        held_out = {"held out": [sample_class(index=0, prompt="one")]}
        slime.use_run(run, episode=silent, evaluation=held_out)
        with pytest.raises(EpisodeError, match="1 of 1 episodes of the evaluation set 'held out'"):
            slime.generate_rollout(SimpleNamespace(), 0, None, evaluation=True)
