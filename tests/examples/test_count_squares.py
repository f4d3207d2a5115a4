"""The example that counts squares: its pictures, and a short run."""

import base64
import io

import numpy as np
import pytest
from PIL import Image

from examples.count_squares import COUNTS, draw, main


@pytest.mark.parametrize("seed", range(8))
def test_a_picture_has_as_many_squares_as_its_task_says(seed: int) -> None:
    picture = draw(seed)
    file = io.BytesIO(base64.b64decode(picture.url.partition(",")[2]))
    lit = np.asarray(Image.open(file)).any(-1)
    assert picture.count in COUNTS
    assert lit.sum() == picture.count * 6 * 6


@pytest.mark.wire
@pytest.mark.slow
async def test_a_short_run_trains_and_judges_itself() -> None:
    before, after = await main(seed=0, versions=2)
    assert 0 <= before <= 1
    assert 0 <= after <= 1
