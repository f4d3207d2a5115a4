"""Loading a model with transformers prints nothing, and leaves the program's own choice."""

import logging
from pathlib import Path

import pytest
from transformers.utils import logging as transformers_logging

from examples.grpo import load_trainer
from tests.models import make_model_directory
from tidegate.engine.models.quiet_transformers import quiet_transformers


def test_loading_the_trainers_model_shows_no_bars_and_no_warnings(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = make_model_directory(tmp_path / "model")
    capfd.readouterr()
    load_trainer(model, 1e-3)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("are_enabled", [False, True])
def test_a_programs_own_choice_of_bars_and_level_holds_again_afterwards(are_enabled: bool) -> None:
    log = transformers_logging
    before = log.is_progress_bar_enabled(), log.get_verbosity()
    try:
        (log.enable_progress_bar if are_enabled else log.disable_progress_bar)()  # type: ignore[no-untyped-call]
        log.set_verbosity(logging.INFO)
        with quiet_transformers():
            assert not log.is_progress_bar_enabled()
        assert (log.is_progress_bar_enabled(), log.get_verbosity()) == (are_enabled, logging.INFO)
    finally:
        (log.enable_progress_bar if before[0] else log.disable_progress_bar)()  # type: ignore[no-untyped-call]
        log.set_verbosity(before[1])
