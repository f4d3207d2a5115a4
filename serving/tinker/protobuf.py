"""Protobuf bodies of the Tinker API: decodes ``forward_backward``, encodes samples and outputs.

The message types are those of the installed SDK, because the service publishes no ``.proto`` file.
Arrays travel as little-endian bytes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from tinker.proto import tinker_public_pb2 as pb

from tidegate.serving.http.errors import ApiError
from tidegate.serving.openai.response_bodies import as_json
from tidegate.serving.tinker.training import BatchResult, Datum, LossBatch, UserError

MASKED_LOGPROB = -99999.0
"""Log-prob, of token 0, at positions of a top-k matrix that were not scored."""

VALUES_MAX = 16 * 1024 * 1024
"""Values of a request's sparse tensors, their zeros included: 128 MiB of int64. A body of 64 MiB
has as many dense ones."""

OUTPUT_TYPE = "scalar"
"""``loss_fn_output_type`` of all losses here."""

_DTYPES: "Mapping[int, np.dtype[Any]]" = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_INT64: np.dtype("<i8"),
    pb.DTYPE_INT32: np.dtype("<i4"),
}


# ---------------------------------------------------------------- training requests


@dataclass(frozen=True, slots=True)
class TrainingRequest:
    """Envelope of a ``forward_backward`` request; its batch is decoded when it is carried out."""

    model_id: str
    seq_id: int
    forward_only: bool
    message: Any
    """The protobuf message."""

    def canonical(self) -> bytes:
        """Return the message's bytes with its maps in order, which a retry may send otherwise."""
        encoded: bytes = self.message.SerializeToString(deterministic=True)
        return encoded

    def batch(self, tokens_max: int) -> LossBatch:
        """Decode the sequences and the loss.

        Raises:
            UserError: a sequence has something other than tokens, a malformed array, or more than
                ``tokens_max`` tokens.
        """
        config = dict(self.message.loss_fn_config)
        for name, value in self.message.loss_fn_config_v2.items():
            if value.WhichOneof("value") != "number":
                raise UserError(f"loss_fn_config[{name!r}] must be a number, got {value.text!r}")
            config[name] = value.number
        data = self.message.data
        tensors = [each for datum in data for each in datum.loss_fn_inputs.values()]
        values = sum(_sparse_values(each) for each in tensors)
        if values > VALUES_MAX:
            raise UserError(
                f"the request's sparse tensors have {values} values with their zeros, and may have "
                f"{VALUES_MAX}; send fewer sequences, or targets without unused columns"
            )
        data = [_datum(place, datum, tokens_max) for place, datum in enumerate(data)]
        return LossBatch(data, self.message.loss_fn, config)


def decode_training(body: bytes) -> TrainingRequest:
    """Decode the body of ``forward_backward``.

    Raises:
        ApiError: it is no such message.
    """
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except Exception as error:  # noqa: BLE001 - protobuf's DecodeError, wherever it comes from
        why = f"the body is no ForwardBackwardRequest in protobuf: {error}"
        raise ApiError(400, why) from None
    return TrainingRequest(message.model_id, message.seq_id, message.forward_only, message)


def _datum(place: int, message: Any, tokens_max: int) -> Datum:
    chunks = []
    for chunk in message.model_input:
        if (kind := chunk.WhichOneof("chunk")) != "encoded_text":
            raise UserError(f"data[{place}] has a chunk of {kind}; only encoded_text is served")
        chunks.append(_array(chunk.encoded_text.tokens, np.dtype("<i4"), "model_input"))
    ids = np.concatenate(chunks) if chunks else np.zeros(0)
    if len(ids) > tokens_max:
        raise UserError(
            f"data[{place}] has {len(ids)} tokens, and a sequence may have {tokens_max}: shorten "
            f"it, or start the server with a larger --tenant-sequence-tokens"
        )
    inputs = {name: _tensor(name, tensor) for name, tensor in message.loss_fn_inputs.items()}
    return Datum(ids.astype(np.int64), inputs)


def _tensor(name: str, message: Any) -> npt.NDArray[Any]:
    dtype = _DTYPES.get(message.dtype)
    if dtype is None:
        raise UserError(f"{name} has dtype {message.dtype}; send float32 or int64")
    shape = list(message.shape)
    if any(length < 0 for length in shape):
        raise UserError(f"{name} has shape {shape}, whose lengths must be 0 or more")
    if message.WhichOneof("encoding") == "sparse_csr":
        return _dense(name, message.sparse_csr, dtype, shape)
    values = _array(message.dense, dtype, name)
    if shape and math.prod(shape) != values.size:
        raise UserError(
            f"{name} has {values.size} values, which do not fill its shape {list(shape)}"
        )
    return values.reshape(shape) if shape else values


def _sparse_values(message: Any) -> int:
    """Return the number of values that a sparse tensor has as a dense one; 0 for a dense one."""
    if message.WhichOneof("encoding") != "sparse_csr":
        return 0
    return math.prod(max(0, length) for length in message.shape)


def _dense(name: str, csr: Any, dtype: "np.dtype[Any]", shape: Sequence[int]) -> npt.NDArray[Any]:
    """Return a sparse [N, K] matrix (compressed rows) as a dense one, with zeros between."""
    values = _array(csr.values, dtype, name)
    starts = _array(csr.crow_indices, np.dtype("<i8"), name)
    columns = _array(csr.col_indices, np.dtype("<i8"), name)
    is_valid = (
        len(shape) == 2
        and len(starts) == shape[0] + 1
        and len(values) == len(columns)
        and starts[0] == 0
        and starts[-1] == len(values)
        and (np.diff(starts) >= 0).all()
        and ((columns >= 0) & (columns < shape[1])).all()
    )
    if not is_valid:
        raise UserError(
            f"{name} is no sparse matrix (CSR) of shape {list(shape)}: its row starts, columns and "
            "values must fit that shape"
        )
    matrix = np.zeros(shape, dtype)
    matrix[np.repeat(np.arange(shape[0]), np.diff(starts)), columns] = values
    return matrix


def _array(data: bytes, dtype: "np.dtype[Any]", name: str) -> npt.NDArray[Any]:
    if len(data) % dtype.itemsize:
        raise UserError(
            f"{name} has {len(data)} bytes, which must be a multiple of {dtype.itemsize} for "
            f"{dtype.name}"
        )
    return np.frombuffer(data, dtype).copy()


# ---------------------------------------------------------------- results


def encode_batch_result(result: BatchResult) -> bytes:
    """Encode a ``ForwardBackwardOutput``: one record per result shape."""
    output = pb.ForwardBackwardOutput(loss_fn_output_type=OUTPUT_TYPE)
    output.metrics.update(result.metrics)
    start = 0
    while start < len(result.data):
        trailing = result.data[start].logprobs.shape[1:]
        end = start
        while end < len(result.data) and result.data[end].logprobs.shape[1:] == trailing:
            end += 1
        record = output.loss_fn_outputs.add(type_tag=OUTPUT_TYPE, num_datums=end - start)
        data = result.data[start:end]
        for name, arrays in (
            ("logprobs", [each.logprobs for each in data]),
            ("elementwise_loss", [each.losses for each in data]),
        ):
            field = record.fields[name]
            field.data = b"".join(each.astype("<f4").tobytes() for each in arrays)
            ends = np.cumsum([0, *(4 * each.size for each in arrays)], dtype="<i8")
            field.offsets = ends.tobytes()
            field.dtype = pb.DTYPE_FLOAT32
            field.trailing_shape.extend(trailing)
        start = end
    encoded: bytes = output.SerializeToString()
    return encoded


def batch_result_fields(result: BatchResult) -> dict[str, Any]:
    """Return a ``ForwardBackwardOutput`` as JSON values."""
    return {
        "loss_fn_output_type": OUTPUT_TYPE,
        "loss_fn_outputs": [
            {
                "logprobs": _tensor_fields(each.logprobs),
                "elementwise_loss": _tensor_fields(each.losses),
            }
            for each in result.data
        ],
        "metrics": dict(result.metrics),
    }


def _tensor_fields(values: npt.NDArray[np.float32]) -> dict[str, Any]:
    return {"data": values.ravel().tolist(), "dtype": "float32", "shape": list(values.shape)}


@dataclass(frozen=True, slots=True)
class TopTokens:
    """Likeliest tokens at each position."""

    token_ids: npt.NDArray[np.int32]
    """[n, k], likeliest first."""
    logprobs: npt.NDArray[np.float32]
    """[n, k]"""

    def write(self, message: Any) -> None:
        """Fill in a protobuf ``TopkLogprobs``."""
        message.length, message.k = self.token_ids.shape
        message.token_ids = self.token_ids.astype("<i4").tobytes()
        message.logprobs = self.logprobs.astype("<f4").tobytes()

    def fields(self) -> list[list[tuple[int, float]] | None]:
        """Return a list of pairs per position, None where nothing was scored."""
        rows = zip(self.token_ids.tolist(), self.logprobs.tolist(), strict=True)
        return [
            None if row and row[0] == MASKED_LOGPROB else list(zip(ids, row, strict=True))
            for ids, row in rows
        ]


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """One sampled sequence."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    has_stopped: bool
    """Whether the sequence ended with a stop token or string, and not because of its length."""
    top: TopTokens | None
    spans: Sequence[Mapping[str, Any]]
    """Weight versions of the tokens; in JSON answers only, because protobuf has no field."""
    by_position: Mapping[str, Any]
    """Attachments of every position but the last, by their fields; likewise in JSON only."""


@dataclass(frozen=True, slots=True)
class SampleResult:
    """Result of ``asample``."""

    samples: Sequence[SampledSequence]
    prompt_logprobs: npt.NDArray[np.float32] | None = None
    """[prompt tokens], NaN where not scored."""
    top_prompt: TopTokens | None = None

    def encode(self, is_protobuf: bool) -> bytes:
        """Encode a ``SampleResponse``, as protobuf or as JSON."""
        if not is_protobuf:
            return msgspec.json.encode(self._fields())
        response = pb.SampleResponse()
        for sample in self.samples:
            sequence = response.sequences.add(
                stop_reason=pb.STOP_REASON_STOP if sample.has_stopped else pb.STOP_REASON_LENGTH,
                tokens=np.asarray(sample.token_ids, "<i4").tobytes(),
                logprobs=np.asarray(sample.logprobs, "<f4").tobytes(),
            )
            if sample.top is not None:
                sample.top.write(sequence.topk_sampled_logprobs)
        if self.prompt_logprobs is not None:
            response.prompt_logprobs = self.prompt_logprobs.astype("<f4").tobytes()
        if self.top_prompt is not None:
            self.top_prompt.write(response.topk_prompt_logprobs)
        encoded: bytes = response.SerializeToString()
        return encoded

    def _fields(self) -> dict[str, Any]:
        prompt = self.prompt_logprobs
        return {
            "type": "sample",
            "sequences": [
                {
                    "stop_reason": "stop" if sample.has_stopped else "length",
                    "tokens": list(sample.token_ids),
                    "logprobs": list(sample.logprobs),
                    "topk_logprobs": None if sample.top is None else sample.top.fields(),
                    "weight_versions": list(sample.spans),
                    **as_json(sample.by_position),
                }
                for sample in self.samples
            ],
            "prompt_logprobs": None
            if prompt is None
            else [None if np.isnan(each) else float(each) for each in prompt],
            "topk_prompt_logprobs": None if self.top_prompt is None else self.top_prompt.fields(),
        }
