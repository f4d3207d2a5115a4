"""The Tinker cookbook's minimal recipes learn sums over the server: `make test-tinker`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("tinker_cookbook", reason="make test-tinker installs the cookbook")

pytestmark = [
    pytest.mark.wire,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore"),  # the cookbook's packages warn in many ways
]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    import tidegate
    from examples.tinker_recipes import INSTEAD, NAME, prepared

    model = tmp_path_factory.mktemp("recipes") / "model"
    with (
        prepared(model),
        tidegate.tinker_server(
            model=model, engines=2, served_model_name=NAME, stable_reinforce=INSTEAD
        ) as server,
    ):
        yield server.url


def test_rl_loop_learns_sums_with_its_default_loss(url: str, tmp_path: Path) -> None:
    from examples.tinker_recipes import run_rl_loop

    rewards = run_rl_loop(url, tmp_path, steps=40, loss_fn="stable_reinforce")
    assert rewards[0] < 0.45
    assert sum(rewards[-5:]) / 5 > 0.7


def test_sl_loop_learns_sums(url: str, tmp_path: Path) -> None:
    from examples.tinker_recipes import run_sl_loop

    losses = run_sl_loop(url, tmp_path, steps=30)
    assert losses[-1] < losses[0] / 2
