"""The Tinker cookbook's RL loop learns the calculator task over the server: `make test-tinker`."""

from pathlib import Path

import pytest

pytest.importorskip("tinker_cookbook", reason="make test-tinker installs the cookbook")

pytestmark = [
    pytest.mark.wire,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # the cookbook's packages warn in many ways
]

STEPS = 12


def test_the_cookbooks_asynchronous_loop_learns_to_use_the_calculator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from examples.tinker_calculator import run_cookbook, served
    from examples.tiny_model import make_model

    monkeypatch.setenv("TINKER_API_KEY", "tml-anybody")
    model = tmp_path / "model"
    make_model(model)
    with served(model) as url:
        rewards = run_cookbook(url, model, tmp_path / "log", steps=STEPS, is_async=True)
    assert len(rewards) == STEPS
    assert sum(rewards[:2]) / 2 < 0.5
    assert sum(rewards[-3:]) / 3 > 0.65
