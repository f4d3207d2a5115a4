from typing import Annotated, get_args, get_origin, get_type_hints

from tidegate.orchestrator.settings.config import RunOptions, RunSettings


def test_type_checkers_know_every_setting_and_no_other() -> None:
    assert set(get_type_hints(RunOptions)) == set(RunSettings.model_fields)


def test_plain_settings_have_the_same_type_for_type_checkers_and_at_run_time() -> None:
    hints = get_type_hints(RunOptions)
    declared = get_type_hints(RunSettings)
    for name in RunSettings.model_fields:
        kind = declared[name]
        if get_origin(kind) is Annotated:
            kind = get_args(kind)[0]
        if kind in (int, float, bool, str):
            assert hints[name] == kind, name
