import numpy as np

from tidegate.kernels.uniforms import uniforms


def test_a_number_depends_on_its_seed_and_index_alone() -> None:
    seeds = np.array([1, 2, 3, 2**64 - 1], np.uint64)
    indices = np.array([5, 0, 7, 2**40], np.uint64)

    together = uniforms(seeds, indices)

    alone = [uniforms(seeds[n : n + 1], indices[n : n + 1])[0] for n in range(4)]
    assert together.tolist() == alone


def test_the_first_numbers_never_change() -> None:
    # A recorded run replays only while these stay. Computed apart, in unbounded integers.
    numbers = uniforms(np.array([0, 0, 1, 1], np.uint64), np.array([0, 1, 0, 1], np.uint64))

    assert numbers.tolist() == [
        0.6524484863740322,
        0.7012121095215252,
        0.36818951565166946,
        0.9435642308648544,
    ]


def test_numbers_fill_the_unit_interval_evenly_along_seeds_and_along_indices() -> None:
    many = np.arange(100_000, dtype=np.uint64)
    zero = np.zeros_like(many)

    for numbers in (uniforms(many, zero), uniforms(zero, many)):
        counts, _ = np.histogram(numbers, bins=100, range=(0.0, 1.0))
        assert numbers.min() >= 0.0
        assert numbers.max() < 1.0
        assert np.abs(counts - 1000).max() < 5 * 1000**0.5
        assert abs(np.corrcoef(numbers[1:], numbers[:-1])[0, 1]) < 0.015


def test_successive_seeds_do_not_give_one_sequence_shifted() -> None:
    indices = np.arange(1000, dtype=np.uint64)

    first, second = (set(uniforms(np.full(1000, seed, np.uint64), indices)) for seed in (4, 5))

    assert first.isdisjoint(second)
