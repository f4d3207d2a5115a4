"""Tests of which tasks a resumed run starts again."""

from hypothesis import given
from hypothesis import strategies as st

from tidegate.orchestrator.core.group import TaskKey
from tidegate.orchestrator.core.taken_tasks import TakenTasks

KEYS = st.builds(TaskKey, st.integers(0, 3), st.integers(0, 2))


@given(returned=st.dictionaries(KEYS, st.booleans()), offer=st.integers(-1, 3))
def test_a_resume_keeps_returned_tasks_that_can_be_run_and_counts_those_that_cannot(
    returned: dict[TaskKey, bool], offer: int
) -> None:
    """Iterator ``offer`` is given again; of those before it only the journal has the tasks."""
    tasks = TakenTasks()
    for key, is_in_journal in returned.items():
        tasks.put_back(key, "task", b"task" if is_in_journal else b"")
    tasks.resume(offer)
    kept = {key for key, body in returned.items() if key.offer == offer or body}
    assert tasks.requeued.keys() == {key for key in kept if key.offer <= offer}
    assert tasks.dropped == sum(key.offer < offer and not body for key, body in returned.items())
