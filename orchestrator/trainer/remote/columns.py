"""Codec of named arrays: bytes laid end to end, cut into frames of limited size.

Batches and scores of remote trainers travel in this form, beside a header message. Arrays are of
numpy or torch.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from tidegate.errors import BadFrame
from tidegate.orchestrator.fleet.scores import Readout, Score, TokenScores
from tidegate.transport.trainer_messages import FRAME_BYTES, Column, ScoresReply
from tidegate.transport.weight_channels.base import ITEM_BYTES

if TYPE_CHECKING:
    import torch

NUMPY_DTYPES = ("float32", "int16", "int32", "int64", "bool", "uint8")
"""Dtypes that may be sent; numpy and torch have the same names for them."""

Array = npt.NDArray[np.generic]


def to_frames(arrays: Iterable[tuple[str, Array]]) -> tuple[list[Column], list[bytes]]:
    """Return a description of each array, and the frames that hold their bytes."""
    columns, pieces = [], []
    for name, array in arrays:
        columns.append(Column(name, str(array.dtype), array.size, list(array.shape[1:])))
        pieces.append(np.ascontiguousarray(array).tobytes())
    stream = b"".join(pieces)
    starts = range(0, len(stream), FRAME_BYTES)
    if len(starts) == 1:
        return columns, [stream]
    return columns, [stream[start : start + FRAME_BYTES] for start in starts]


def from_frames(columns: Sequence[Column], frames: Sequence[bytes]) -> list[Array]:
    """Return the arrays, which are writable.

    Raises:
        BadFrame: the frames don't have the bytes that the columns describe.
    """
    stream = bytearray().join(frames)
    arrays, start = [], 0
    for column in columns:
        if column.dtype not in NUMPY_DTYPES:
            raise BadFrame(f"array {column.name!r} has unsupported dtype {column.dtype!r}")
        end = start + column.count * ITEM_BYTES[column.dtype]
        if end > len(stream):
            raise BadFrame(f"array {column.name!r} ends at byte {end} of {len(stream)}")
        dtype = np.dtype(column.dtype)
        array = np.frombuffer(stream, dtype, column.count, start)
        try:
            arrays.append(array.reshape(-1, *column.shape))
        except ValueError:
            raise BadFrame(
                f"array {column.name!r} has {column.count} values, no whole number of entries of "
                f"shape {column.shape}"
            ) from None
        start = end
    if start != len(stream):
        raise BadFrame(f"the frames hold {len(stream)} bytes, the columns describe {start}")
    return arrays


def tensors_of(columns: Sequence[Column], frames: Sequence[bytes]) -> "Mapping[str, torch.Tensor]":
    """Return the arrays as tensors, by name.

    Raises:
        BadFrame: as :func:`from_frames`.
    """
    import torch

    arrays = from_frames(columns, frames)
    return {
        column.name: torch.from_numpy(array.copy())  # aligned
        for column, array in zip(columns, arrays, strict=True)
    }


def scores_to_wire(scores: Sequence[Score]) -> tuple[ScoresReply, list[bytes]]:
    """Return the header message of scores, and its frames: each array of each score."""
    metadata: list[Any] = []
    arrays: list[tuple[str, Array]] = []
    for score in scores:
        if isinstance(score, TokenScores):
            metadata.append([score.version, score.engine, score.start])
            arrays += [
                ("logprobs", score.logprobs),
                ("top_ids", score.top_ids.reshape(-1)),
                ("top_logprobs", score.top_logprobs.reshape(-1)),
            ]
        else:
            rows = score.values.shape[0] if score.values.ndim > 1 else 0
            metadata.append([score.version, score.engine, rows])
            arrays.append(("values", score.values.reshape(-1)))
    columns, frames = to_frames(arrays)
    return ScoresReply(metadata=metadata, columns=columns), frames


def scores_from_wire(message: ScoresReply, frames: Sequence[bytes]) -> list[Score]:
    """Return the scores that were sent, in their order."""
    arrays = iter(from_frames(message.columns, frames))
    names = iter(message.columns)
    scores: list[Score] = []
    for version, engine, number in message.metadata:  # number: a Readout's rows, or the start
        column = next(names)
        values: Any = next(arrays)
        if column.name == "values":
            rows = values.reshape(number, -1) if number else values
            scores.append(Readout(version, engine, rows))
            continue
        next(names), next(names)
        ids: Any = next(arrays)
        top: Any = next(arrays)
        shape = (len(values), ids.size // max(1, len(values)))
        scores.append(
            TokenScores(version, engine, number, values, ids.reshape(shape), top.reshape(shape))
        )
    return scores
