"""Tests of the example in OpenRLHF's shape: it trains, and the engines serve its weights."""

import pytest

from examples.worker_grpo import main

pytestmark = pytest.mark.wire


def test_each_step_is_generated_by_the_weights_of_the_step_before(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--steps", "3"]) in (0, 1)  # three steps need not show an improvement
    output = capsys.readouterr().out
    assert [f"engines serve v{version}" in output for version in range(5)] == [
        False, True, True, True, False,
    ]  # fmt: skip
    assert "mean reward" in output
