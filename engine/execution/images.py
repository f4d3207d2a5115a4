"""Images in an engine's sequences: places, rotary positions, and keys in prefix caches."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from tidegate.errors import ImageRefused
from tidegate.transport.images import DIGESTS_KEPT_MAX, IMAGES_MAX, Image, ImageReader
from tidegate.transport.media import Media


@dataclass(frozen=True, slots=True)
class RowImage:
    """One image of a sequence."""

    start: int
    """Context position of its first placeholder token."""
    end: int
    grid: npt.NDArray[np.int64]
    """[2]: tokens along height and width."""
    key: int
    """Negative number of the image's content, which stands for its tokens in prefix caches. No
    other content ever has the same number on this engine."""
    media: Media
    image: Image


class SequenceImages:
    """Reads the images of submitted turns."""

    def __init__(self, reader: ImageReader) -> None:
        self._reader = reader
        self._keys: OrderedDict[str, int] = OrderedDict()
        self._keys_given = 0

    def read(self, media: Sequence[Media], prompt: npt.NDArray[np.int32]) -> tuple[RowImage, ...]:
        """Read and decode the images of a context.

        Raises:
            ImageRefused: an image can't be read, or images and placeholder tokens differ.
        """
        places = prompt == self._reader.placeholder_id
        if not media and not places.any():
            return ()
        if len(media) > IMAGES_MAX:
            raise ImageRefused(f"a context may have {IMAGES_MAX} images, got {len(media)}")
        images: list[RowImage] = []
        for each in media:
            image = self._reader.read(each)
            grid = self._reader.process(each, image).grid[1:] // self._reader.merge
            start, end = each.token_offset, each.token_offset + image.tokens
            if images and start <= images[-1].end:
                raise ImageRefused(
                    f"no token is between two images, at position {start}, and transformers takes "
                    "them for one; write tokens around each, as the chat template does"
                )
            if each.tokens != image.tokens or places[start:end].sum() != image.tokens:
                raise ImageRefused(
                    f"an image has {image.tokens} tokens, which must be the placeholder "
                    f"{self._reader.placeholder_id} from position {each.token_offset} on; the "
                    f"submission says {each.tokens}"
                )
            images.append(RowImage(start, end, grid, self._key(image.digest), each, image))
        if (tokens := int(places.sum())) != sum(each.image.tokens for each in images):
            raise ImageRefused(
                f"{tokens} tokens of the context are the placeholder {self._reader.placeholder_id},"
                f" and its {len(images)} images have {sum(each.image.tokens for each in images)}"
            )
        return tuple(images)

    def _key(self, digest: str) -> int:
        if digest not in self._keys:
            self._keys_given += 1
            self._keys[digest] = -self._keys_given
            if len(self._keys) > DIGESTS_KEPT_MAX:
                self._keys.popitem(last=False)
        self._keys.move_to_end(digest)
        return self._keys[digest]


def write_keys(images: Sequence[RowImage], tokens: npt.NDArray[np.int32], start: int) -> None:
    """Replace placeholders in ``tokens``, which begin at position ``start``, by their images'
    keys."""
    for image in images:
        tokens[max(image.start - start, 0) : max(image.end - start, 0)] = image.key


def positions(images: Sequence[RowImage], start: int, end: int) -> torch.Tensor:
    """Return the rotary positions [3, T] of context positions ``[start, end)`` along time, height
    and width.

    Text after an image continues at the image's first position plus its longer side, as in
    ``get_rope_index`` of transformers' Qwen2.5-VL.
    """
    out = np.tile(np.arange(start, end), (3, 1))
    shift = 0
    for image in images:
        if image.start >= end:
            break
        height, width = image.grid.tolist()
        tokens = np.arange(max(image.start, start), min(image.end, end)) - image.start
        places = np.stack([np.zeros_like(tokens), tokens // width, tokens % width])
        out[:, tokens + image.start - start] = places + image.start + shift
        after = max(height, width) - height * width
        shift += after
        out[:, max(image.end - start, 0) :] += after
    return torch.from_numpy(out)
