"""Client of the Tinker server over plain HTTP, one for each tenant."""

from pathlib import Path
from typing import Any

import httpx
import numpy as np

TIMEOUT_S = 60


class Tenant:
    """One tenant's client."""

    def __init__(self, url: str, key: str) -> None:
        self.http = httpx.Client(
            base_url=f"{url}/api/v1/", headers={"x-api-key": key}, timeout=TIMEOUT_S
        )

    def post(self, to: str, /, **body: Any) -> dict[str, Any]:
        answer = self.http.post(to, json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def refusal(self, to: str, /, **body: Any) -> tuple[int, str]:
        answer = self.http.post(to, json=body)
        return answer.status_code, answer.json()["detail"]

    def result(self, future: dict[str, Any]) -> dict[str, Any]:
        return self.post("retrieve_future", request_id=future["request_id"])

    def new_model(self, model: Path) -> str:
        session = self.post("create_session", tags=[], sdk_version="0")["session_id"]
        future = self.post(
            "create_model",
            session_id=session,
            model_seq_id=0,
            base_model=str(model),
            lora_config={"rank": 4, "seed": 1},
        )
        model_id: str = self.result(future)["model_id"]
        assert model_id == f"{session}:train:0"
        return model_id

    def forward_backward(
        self, model_id: str, seq_id: int, targets: list[int], *, length: int = 4
    ) -> httpx.Response:
        from tinker.proto import tinker_public_pb2 as pb

        request = pb.ForwardBackwardRequest(
            model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy"
        )
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = np.arange(
            20, 20 + length, dtype="<i4"
        ).tobytes()
        tensor = datum.loss_fn_inputs["target_tokens"]
        tensor.dense, tensor.dtype = np.asarray(targets, "<i8").tobytes(), pb.DTYPE_INT64
        tensor.shape.append(len(targets))
        headers = {"content-type": "application/x-protobuf"}
        return self.http.post(
            "forward_backward", content=request.SerializeToString(), headers=headers
        )

    def policy_gradient(self, model_id: str, seq_id: int, loss_fn: str) -> httpx.Response:
        """Send four tokens with log-probs and advantages."""
        from tinker.proto import tinker_public_pb2 as pb

        request = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn=loss_fn)
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = np.arange(20, 24, dtype="<i4").tobytes()
        for name, values, dtype in (
            ("target_tokens", np.arange(21, 25, dtype="<i8"), pb.DTYPE_INT64),
            ("logprobs", np.full(4, -4.0, "<f4"), pb.DTYPE_FLOAT32),
            ("advantages", np.ones(4, "<f4"), pb.DTYPE_FLOAT32),
        ):
            tensor = datum.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = values.tobytes(), dtype
        headers = {"content-type": "application/x-protobuf"}
        return self.http.post(
            "forward_backward", content=request.SerializeToString(), headers=headers
        )

    def new_sampler(self, model: Path) -> str:
        """Return a new session's sampler of the base model."""
        session = self.post("create_session", tags=[], sdk_version="0")["session_id"]
        sampler = self.post(
            "create_sampling_session",
            session_id=session,
            sampling_session_seq_id=0,
            base_model=str(model),
        )
        sampler_id: str = sampler["sampling_session_id"]
        return sampler_id
