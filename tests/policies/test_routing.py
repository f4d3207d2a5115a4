"""Is it always the least loaded, and the same one each time?"""

import random

from tidegate.policies.routing import LeastLoaded


def test_of_equal_loads_the_first_by_name_is_chosen() -> None:
    engines = LeastLoaded()
    for name in ("b", "c", "a"):
        engines.set(name, 0.5)
    assert engines.least() == "a"


def test_a_load_that_has_changed_counts_and_not_what_it_was() -> None:
    engines = LeastLoaded()
    engines.set("a", 0.0)
    engines.set("b", 1.0)
    engines.set("a", 2.0)
    assert engines.least() == "b"
    engines.set("a", 0.0)
    assert engines.least() == "a"


def test_nobody_is_chosen_who_may_not_be() -> None:
    engines = LeastLoaded()
    engines.set("a", 0.0)
    engines.set("b", 1.0)
    engines.discard("a")
    engines.discard("never there")
    assert engines.least() == "b"
    engines.discard("b")
    assert engines.least() is None


def test_after_any_history_it_is_the_one_that_a_look_at_all_would_find() -> None:
    chance = random.Random(7)
    engines = LeastLoaded()
    loads: dict[str, float] = {}
    for _ in range(5000):
        name = f"engine-{chance.randrange(12)}"
        if chance.random() < 0.1:
            engines.discard(name)
            loads.pop(name, None)
        else:
            loads[name] = chance.randrange(8) / 4
            engines.set(name, loads[name])
        expected = min(((load, name) for name, load in loads.items()), default=(0.0, None))[1]
        assert engines.least() == expected
