"""Counter-based random numbers: the i-th uniform number of a seed, without state.

What a turn samples must not depend on the batch, on chunking, or on which engine continues it, so
its i-th number is a pure function of its seed and i.

Source: SplitMix64, Steele, Lea & Flood 2014, "Fast splittable pseudorandom number generators".
"""

import numpy as np
import numpy.typing as npt

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
"""2^64 over the golden ratio, made odd: the step between a seed's states."""


def uniforms(
    seeds: npt.NDArray[np.uint64], indices: npt.NDArray[np.uint64]
) -> npt.NDArray[np.float64]:
    """Return the ``indices[s]``-th number of each ``seeds[s]``, uniform in [0, 1).

    Arguments and result are [S]; results are multiples of 2^-53. Seeds are scrambled first, because
    successive seeds would otherwise give the same sequence shifted by one.
    """
    with np.errstate(over="ignore"):
        states = _scramble(seeds + GOLDEN_GAMMA) + (indices + np.uint64(1)) * GOLDEN_GAMMA
        bits = _scramble(states) >> np.uint64(11)
    return bits.astype(np.float64) * np.float64(2.0**-53)


def _scramble(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
