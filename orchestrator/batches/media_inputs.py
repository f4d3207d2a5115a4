"""Inputs of a model's forward pass for the images of a batch's rows.

Letters in shapes: R rows, T tokens of the longest row, I images of all rows, P patches of all
images.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from tidegate.orchestrator.core.rollout import Rollout
from tidegate.transport.images import ImageReader

TOKEN_TYPES = "mm_token_type_ids"
"""[R, T] int32: 1 at images' tokens, 0 at others. Needed for the positions of the rotary
embedding."""

PIXELS = "pixel_values"
"""[P, values of a patch] float32."""

GRIDS = "image_grid_thw"
"""[I, 3] int64: each image's patches along time, height and width."""


def media_inputs(
    rollouts: Sequence[Rollout], longest: int, images: ImageReader
) -> dict[str, torch.Tensor]:
    """Return the arguments for the rows' images, in the order of their tokens; none without images.

    Raises:
        ImageRefused: an image is gone or has changed since its prompt was made.
    """
    types = np.zeros((len(rollouts), longest), np.int32)
    pixels, grids = [], []
    for row, rollout in enumerate(rollouts):
        for each in rollout.media if rollout.may_have_media else ():
            if each.tokens:
                types[row, each.token_offset : each.token_offset + each.tokens] = 1
                processed = images.process(each, images.read(each))
                pixels.append(processed.pixel_values)
                grids.append(processed.grid)
    if not pixels:
        return {}
    return {
        TOKEN_TYPES: torch.from_numpy(types),
        PIXELS: torch.from_numpy(np.concatenate(pixels)),
        GRIDS: torch.from_numpy(np.stack(grids)),
    }


def select_images(
    columns: Mapping[str, torch.Tensor], row_ids: torch.Tensor, rows: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Return the pixels and grids of some rows' images. ``row_ids`` [N] has each token's row in
    ``columns``, without padding."""
    patches = columns[GRIDS].prod(-1)
    row_of_token = row_ids[columns[TOKEN_TYPES].bool()]
    tokens = patches * len(row_of_token) // patches.sum()
    row_of_image = row_of_token[tokens.cumsum(0) - tokens]
    chosen = torch.cat([torch.nonzero(row_of_image == row)[:, 0] for row in rows])
    pieces = torch.split(columns[PIXELS], patches.tolist())
    if not len(chosen):
        return {}
    return {
        PIXELS: torch.cat([pieces[image] for image in chosen.tolist()]),
        GRIDS: columns[GRIDS][chosen],
    }
