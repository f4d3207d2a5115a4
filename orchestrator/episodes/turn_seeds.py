"""Which random numbers does a turn draw by? Those of its name, the same in every run.

Knows no episode, and nothing of how they are drawn.
"""

from tidegate.orchestrator.core.rollout import Rollout

BITS_64 = (1 << 64) - 1


def turn_seed(run_seed: int, rollout: Rollout, turn: int) -> int:
    """A 63-bit seed for a turn of the rollout: splitmix64's finaliser over what names it.

    Its name is its group, its place there and the turn: the same in every run with these tasks.
    Each part has an odd factor of its own (fractions of the golden ratio, sqrt 2 and sqrt 3), so
    that no two small names meet in one number.
    """
    x = run_seed + rollout.group_id * 0x9E3779B97F4A7C15
    x += rollout.index * 0x6A09E667F3BCC909 + turn * 0xBB67AE8584CAA73B
    return mixed(x) >> 1


def mixed(x: int) -> int:
    """splitmix64's finaliser."""
    x &= BITS_64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & BITS_64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & BITS_64
    return x ^ (x >> 31)
