"""Client of the Tinker server over plain HTTP, one for each tenant."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import httpx
import numpy as np

TIMEOUT_S = 60


class Tenant:
    """One tenant's client; use it in ``with``."""

    def __init__(self, url: str, key: str) -> None:
        self.http = httpx.Client(
            base_url=f"{url}/api/v1/", headers={"x-api-key": key}, timeout=TIMEOUT_S
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def post(self, to: str, /, **body: Any) -> dict[str, Any]:
        answer = self.http.post(to, json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def refusal(self, to: str, /, **body: Any) -> tuple[int, str]:
        answer = self.http.post(to, json=body)
        return answer.status_code, answer.json()["detail"]

    def result(self, future: Mapping[str, Any]) -> dict[str, Any]:
        return self.post("retrieve_future", request_id=future["request_id"])

    def new_session(self) -> str:
        session_id: str = self.post("create_session", tags=[], sdk_version="0")["session_id"]
        return session_id

    def create(self, session: str, number: int, model: Path | str) -> httpx.Response:
        """Create the model of this number in a session."""
        body = {"session_id": session, "model_seq_id": number, "base_model": str(model)}
        return self.http.post("create_model", json=body | {"lora_config": {"rank": 4, "seed": 1}})

    def new_model(self, model: Path) -> str:
        session = self.new_session()
        model_id: str = self.result(self.create(session, 0, model).json())["model_id"]
        assert model_id == f"{session}:train:0"
        return model_id

    def forward_backward(
        self, model_id: str, seq_id: int, targets: Sequence[int], loss_fn: str = "cross_entropy"
    ) -> httpx.Response:
        """Train on as many tokens as there are targets, with log-probs and advantages for other
        losses than cross-entropy."""
        from tinker.proto import tinker_public_pb2 as pb

        n = len(targets)
        inputs = {"target_tokens": (np.asarray(targets, "<i8"), pb.DTYPE_INT64)}
        if loss_fn != "cross_entropy":
            inputs["logprobs"] = np.full(n, -4.0, "<f4"), pb.DTYPE_FLOAT32
            inputs["advantages"] = np.ones(n, "<f4"), pb.DTYPE_FLOAT32
        request = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn=loss_fn)
        datum = request.data.add()
        datum.model_input.add().encoded_text.tokens = np.arange(20, 20 + n, dtype="<i4").tobytes()
        for name, (values, dtype) in inputs.items():
            tensor = datum.loss_fn_inputs[name]
            tensor.dense, tensor.dtype = values.tobytes(), dtype
            tensor.shape.append(n)
        return self.send(request)

    def send(self, request: Any) -> httpx.Response:
        """Send a message of ``forward_backward``."""
        headers = {"content-type": "application/x-protobuf"}
        content = request.SerializeToString()
        return self.http.post("forward_backward", content=content, headers=headers)

    def new_sampler(self, model: Path | str, session: str | None = None, number: int = 0) -> str:
        """Return the sampler of a base model, in a new session unless one is given."""
        sampler = self.post(
            "create_sampling_session",
            session_id=session or self.new_session(),
            sampling_session_seq_id=number,
            base_model=str(model),
        )
        sampler_id: str = sampler["sampling_session_id"]
        return sampler_id

    def sample(
        self, sampler: str, seq_id: int = 0, *, tokens: Sequence[int] = (20, 21), **fields: Any
    ) -> dict[str, Any]:
        """Ask for samples after a prompt; return the future."""
        chunk = {"type": "encoded_text", "tokens": list(tokens)}
        params = {"max_tokens": 3, "stop": []} | fields.pop("sampling_params", {})
        return self.post(
            "asample",
            sampling_session_id=sampler,
            seq_id=seq_id,
            prompt={"chunks": [chunk]},
            sampling_params=params,
            **fields,
        )
