"""Test of the example of a draft model that follows the policy, in a short form."""

from pathlib import Path

import pytest

from examples.following_draft import main
from examples.tiny_model import make_model

pytestmark = pytest.mark.wire

SHORT = "--versions 3 --warm-up-batches 1 --warm-up-steps 5 --groups-per-batch 2 --draft-steps 1"


@pytest.mark.usefixtures("drafts_pay")
def test_all_modes_train_and_engines_accept_some_draft_tokens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_model(tmp_path / "tiny", seed=0, steps_max=10)
    main(["--model", str(tmp_path / "tiny"), "--runs", str(tmp_path), *SHORT.split()])
    *_, plain, stays, follows = capsys.readouterr().out.splitlines()
    assert plain.startswith("plain")
    assert " 1.00 tokens per turn and step" in plain
    for mode, line in (("stays", stays), ("follows", follows)):
        assert line.startswith(f"{mode} ")
        assert " 1.00 tokens per turn and step" not in line
