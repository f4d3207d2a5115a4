"""Images of a context: the content of references, their placeholder tokens and pixel values.

Orchestrator, engines and trainers read images here, from one model directory, so that an image has
the same tokens and pixel values in all of them. Nothing is fetched over a network.
"""

import base64
import binascii
import hashlib
import io
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from tidegate.errors import ImageRefused, ModelError
from tidegate.transport.media import Media, Placeholders
from tidegate.transport.regular_files import read_regular

MODEL_TYPES = ("qwen2_5_vl",)
"""Model types of config.json whose images are processed here."""

IMAGE_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""Formats that Pillow may decode. It knows others, some of which start programs."""

IMAGE_BYTES_MAX = 16 * 1024 * 1024
"""Maximum size of an image's file."""

IMAGE_PIXELS_MAX = 4096 * 4096
"""Maximum number of pixels of an image before it is scaled: 48 MiB decoded."""

IMAGES_MAX = 64
"""Maximum number of images in a context."""

DIGESTS_KEPT_MAX = 65_536
"""Number of images that are recognised when they come again, at about 200 bytes each."""

PROCESSED_BYTES_KEPT = 256 * 1024 * 1024
"""Bytes of pixel values that a process keeps for the next use. A megapixel of Qwen2.5-VL has 24 MB,
and all rollouts of a group have the same images."""


@dataclass(frozen=True, slots=True)
class Image:
    """One image, as it was read."""

    content: bytes
    digest: str
    """SHA-256 of ``content``, in hexadecimal digits."""
    tokens: int
    """Number of placeholder tokens that the model reads it at."""


@dataclass(frozen=True, slots=True)
class ProcessedImage:
    """Inputs of a model's forward pass for one image."""

    pixel_values: npt.NDArray[np.float32]
    """[patches, values of a patch]"""
    grid: npt.NDArray[np.int64]
    """[3]: number of patches along time, height and width."""


class ImageReader:
    """Reads and processes images for one model."""

    def __init__(
        self, model: Path, directories: Sequence[Path] = (), *, leaves_others: bool = False
    ) -> None:
        """``directories``: those from which paths may be read. ``leaves_others``: whether prompts
        may have images that are not read here, for engines of other kinds.

        Raises:
            ModelError: the model directory's image processor can't be loaded.
        """
        import transformers

        auto: Any = transformers.AutoImageProcessor
        try:
            # Not torchvision's, whose scaled pixels differ: all processes must agree.
            self._processor: Any = auto.from_pretrained(
                model, backend="pil", local_files_only=True, trust_remote_code=False
            )
        except Exception as error:
            raise ModelError(
                f"the image processor of {model} can't be loaded: {error}. Download the model "
                "again, with preprocessor_config.json"
            ) from error
        config = json.loads((model / "config.json").read_bytes())
        self.placeholder_id: int = config["image_token_id"]
        """Token at whose positions the model reads images. Engines never sample it."""
        self.merge: int = self._processor.merge_size
        """Number of patches along each side of the square that one token stands for."""
        self.directories = [directory.resolve() for directory in directories]
        """Directories, resolved, from which paths may be read."""
        self._leaves_others = leaves_others
        self._kept: OrderedDict[str, ProcessedImage] = OrderedDict()
        self._bytes_kept = 0
        self._tokens: dict[str, int] = {}
        """Token counts of the images read last, by digest: a group's rollouts have the same."""
        self._lock = threading.Lock()

    def read(self, media: Media) -> Image:
        """Read an image and count its placeholder tokens.

        Raises:
            ImageRefused: it can't be read, is no image or too large, or is not the image that the
                prompt was made with.
        """
        content = self._content(media)
        digest = hashlib.sha256(content).hexdigest()
        if isinstance(media.position, Placeholders) and media.position.digest != digest:
            raise ImageRefused(f"{_shown(media)} has changed since its prompt was made")
        if (tokens := self._tokens.get(digest)) is None:
            try:
                with _opened(content) as image:
                    width, height = image.size
                patches = self._processor.get_number_of_image_patches(height, width)
            except Exception as error:
                raise _unreadable(media, error) from error
            if len(self._tokens) == DIGESTS_KEPT_MAX:
                self._tokens.clear()
            tokens = self._tokens[digest] = patches // self.merge**2
        return Image(content, digest, tokens)

    def process(self, media: Media, image: Image) -> ProcessedImage:
        """Return the inputs of a forward pass for an image that :meth:`read` has read.

        Raises:
            ImageRefused: it can't be decoded.
        """
        with self._lock:
            if (kept := self._kept.get(image.digest)) is not None:
                self._kept.move_to_end(image.digest)
                return kept
        try:
            with _opened(image.content) as opened:
                inputs = self._processor(images=[opened.convert("RGB")], return_tensors="np")
        except Exception as error:
            raise _unreadable(media, error) from error
        values = np.ascontiguousarray(inputs["pixel_values"], np.float32)
        processed = ProcessedImage(values, inputs["image_grid_thw"][0].astype(np.int64))
        with self._lock:
            if image.digest not in self._kept:
                self._kept[image.digest] = processed
                self._bytes_kept += values.nbytes
            while self._bytes_kept > PROCESSED_BYTES_KEPT and len(self._kept) > 1:
                self._bytes_kept -= self._kept.popitem(last=False)[1].pixel_values.nbytes
        return processed

    def expand(
        self, token_ids: Sequence[int], media: Sequence[Media], before: int
    ) -> tuple[list[int], list[Media]]:
        """Repeat each image's placeholder once per token of the image.

        Return the tokens, and the media with their places, token counts and digests. With
        ``leaves_others``, URLs of the web and paths outside of the named directories keep one
        placeholder. ``before`` is the number of context tokens before ``token_ids``.

        Raises:
            ImageRefused: an image can't be read, or has no placeholder.
        """
        out: list[int] = []
        placed: list[Media] = []
        taken = 0
        for each in media:
            if each.kind != "image":
                placed.append(each)
                continue
            try:
                at = token_ids.index(self.placeholder_id, taken)
            except ValueError:
                raise ImageRefused(
                    f"{_shown(each)} has no placeholder token {self.placeholder_id} in its prompt; "
                    "write one for each image, in order"
                ) from None
            out += token_ids[taken:at]
            taken = at + (each.tokens or 1)
            place: int | Placeholders = before + len(out)
            if each.tokens or not self._leaves_others or self._is_readable(each.url):
                image = self.read(each)
                place = Placeholders(before + len(out), image.tokens, image.digest)
            placed.append(msgspec.structs.replace(each, position=place))
            out += [self.placeholder_id] * (1 if isinstance(place, int) else place.tokens)
        return [*out, *token_ids[taken:]], placed

    def _content(self, media: Media) -> bytes:
        if media.kind != "image":
            raise ImageRefused(f"the model reads no {media.kind}, only images; leave it out")
        if is_fetched(media.url):
            raise ImageRefused(
                f"{_shown(media)} is on a network, and Tidegate's engines fetch nothing; read it "
                "in the episode, and pass a data: URL or a path within image_directories"
            )
        content = decoded(media) if media.url.startswith("data:") else self._file(media)
        if len(content) > IMAGE_BYTES_MAX:
            raise ImageRefused(f"{_shown(media)} has more than {IMAGE_BYTES_MAX} bytes")
        return content

    def _is_readable(self, url: str) -> bool:
        if url.startswith("data:"):
            return True
        return not is_fetched(url) and any(map(_path(url).is_relative_to, self.directories))

    def _file(self, media: Media) -> bytes:
        path = _path(media.url)
        if not any(map(path.is_relative_to, self.directories)):
            raise ImageRefused(
                f"{_shown(media)} is in none of the directories that images may be read from; name "
                "its directory in image_directories (of an engine started by hand: "
                "--image-directory), or pass a data: URL"
            )
        try:
            return read_regular(path, IMAGE_BYTES_MAX)
        except OSError as error:
            raise ImageRefused(f"{_shown(media)} can't be read: {error.strerror}") from None


def open_images(
    model: Path, directories: Sequence[Path] = (), *, leaves_others: bool = False
) -> ImageReader | None:
    """Return the reader of a model's images; None if the model reads none that Tidegate processes.
    The arguments are :class:`ImageReader`'s.

    Raises:
        ModelError: as for :class:`ImageReader`.
    """
    try:
        config = json.loads(read_regular(model / "config.json"))
    except (OSError, ValueError):
        return None  # other code refuses the directory
    is_read = isinstance(config, dict) and config.get("model_type") in MODEL_TYPES
    return ImageReader(model, directories, leaves_others=leaves_others) if is_read else None


def is_fetched(url: str) -> bool:
    """Return whether a reference's content is on a network."""
    return "://" in url.partition(",")[0] and not url.startswith(("file://", "data:"))


def collapsed(token_ids: Sequence[int], media: Sequence[Media]) -> list[int]:
    """Return tokens with one placeholder per image, for engines that repeat placeholders."""
    out = list(token_ids)
    for each in sorted(media, key=lambda each: each.token_offset, reverse=True):
        if each.tokens:
            del out[each.token_offset + 1 : each.token_offset + each.tokens]
    return out


def decoded(media: Media) -> bytes:
    """Return the content of a ``data:`` URL.

    Raises:
        ImageRefused: it is not in base64.
    """
    head, _, data = media.url.partition(",")
    try:
        if not head.endswith(";base64"):
            raise binascii.Error("it is not in base64")
        return base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _unreadable(media, error) from None


def _path(url: str) -> Path:
    return Path(url.removeprefix("file://")).resolve()


def _opened(content: bytes) -> Any:
    """Return a Pillow image, turned as its EXIF says; its pixels may not be decoded yet."""
    from PIL import Image as Pillow
    from PIL import ImageOps

    image = Pillow.open(io.BytesIO(content), formats=IMAGE_FORMATS)
    if (pixels := image.width * image.height) > IMAGE_PIXELS_MAX:
        raise ValueError(f"it has {pixels} pixels, and may have {IMAGE_PIXELS_MAX}")
    ImageOps.exif_transpose(image, in_place=True)
    return image


def _unreadable(media: Media, error: Exception) -> ImageRefused:
    return ImageRefused(f"{_shown(media)} can't be read as an image: {error}")


def _shown(media: Media) -> str:
    url = media.url if len(media.url) <= 80 else f"{media.url[:40]}… ({len(media.url)} characters)"
    return f"the {media.kind} {url!r}"
