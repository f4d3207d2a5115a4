"""A whole run of verl's own command on a CPU, with the real verl 0.9.1."""

import re
import subprocess
import sys

import pytest

pytest.importorskip("verl", reason="`make test-verl` has verl, in a Python of its own")

pytestmark = [pytest.mark.wire, pytest.mark.slow, pytest.mark.timeout(900)]

MAX_STALENESS = 1
"""That of the example."""


def test_verls_own_command_trains_on_a_cpu_within_the_bound() -> None:
    command = [sys.executable, "-m", "examples.verl_grpo", "--steps", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800, check=False)

    assert done.returncode == 0, done.stderr[-4000:]
    steps = [line for line in done.stdout.splitlines() if "training/global_step:" in line]
    assert len(steps) == 3

    def values(name: str) -> list[float]:
        found = [re.search(rf"{name}:(?:np\.\w+\()?([-\d.e]+)", line) for line in steps]
        return [float(each[1]) for each in found if each is not None]

    # verl recomputes the log-probs of the rollouts' tokens, in part under newer weights.
    assert values("training/rollout_probs_diff_max")[0] < 1e-3
    staleness = values("training/off_policy/trajectory_staleness_worst/max")
    assert len(staleness) == 3
    assert max(staleness) <= MAX_STALENESS
