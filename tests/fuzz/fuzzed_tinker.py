"""Fuzzing of the Tinker server over HTTP: JSON and protobuf bodies, and a start after them.

A hostile tenant's requests are those of :mod:`tests.fuzz.fuzzed_http`; another tenant trains and
samples in between. At the end the server is started again from its journals, and must serve both.
"""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from tinker.proto import tinker_public_pb2 as pb

import tidegate
from tests.fuzz.fuzzed_http import (
    ANSWER_TIMEOUT_S,
    BODIES_PER_SESSION,
    PROTOBUF_TYPE,
    Client,
    FuzzedGateway,
)
from tests.models import make_model_directory
from tidegate.serving.http.server import JSON_TYPE
from tidegate.serving.tinker.app import BODY_BYTES_MAX

HOSTILE, HEALTHY = "tml-hostile", "tml-healthy"

API = "/api/v1/"

PATHS: dict[str, dict[str, Any]] = {
    "client/config": {"sdk_version": "0"},
    "create_session": {"tags": ["x"], "user_metadata": {"a": 1}, "sdk_version": "0"},
    "session_heartbeat": {"session_id": "{session}"},
    "create_model": {
        "session_id": "{session}",
        "model_seq_id": 1,
        "base_model": "{base}",
        "lora_config": {"rank": 4, "seed": 1, "train_mlp": True},
        "optimizer_config": {"type": "adamw"},
    },
    "get_info": {"model_id": "{model}"},
    "unload_model": {"model_id": "{session}:train:1"},
    "forward_backward": {},
    "optim_step": {
        "model_id": "{model}",
        "seq_id": "{seq}",
        "adam_params": {"learning_rate": 1e-3, "beta1": 0.9, "grad_clip_norm": 1.0},
    },
    "save_weights": {"model_id": "{model}", "seq_id": "{seq}", "path": "x", "ttl_seconds": 60},
    "save_weights_for_sampler": {
        "model_id": "{model}",
        "seq_id": "{seq}",
        "sampling_session_seq_id": 7,
        "kind": "snapshot",
    },
    "load_weights": {
        "model_id": "{model}",
        "seq_id": "{seq}",
        "path": "tinker://x/weights/y",
        "optimizer": True,
    },
    "weights_info": {"tinker_path": "tinker://x/weights/y"},
    "create_sampling_session": {
        "session_id": "{session}",
        "sampling_session_seq_id": 1,
        "base_model": "{base}",
    },
    "asample": {
        "sampling_session_id": "{sampler}",
        "seq_id": "{seq}",
        "num_samples": 2,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [3, 4, 5]}]},
        "sampling_params": {"max_tokens": 4, "seed": 1, "stop": [5], "top_p": 0.9, "top_k": 3},
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 2,
    },
    "retrieve_future": {"request_id": "{model}:create"},
    "cancel_future": {"request_id": "{sampler}:0"},
    "telemetry": {"events": []},
}
"""Valid requests, where names in braces stand for the session's own."""


class FuzzedTinker:
    def __init__(self, seed: int, directory: Path) -> None:
        self.fuzzed = FuzzedGateway(seed, directory, error_fields=(b'"detail"',))
        self._directory = directory
        self._model = make_model_directory(directory / "model", "qwen3")
        self._names: dict[str, str] = {}
        """What the names in braces stand for."""
        self._seq_id = 0

    def feed(self, bodies: int, each: Callable[[int], None]) -> None:
        with self._server() as server:
            asyncio.run(self._feed(server, bodies, each))
        with self._server() as server:  # which carries out again what the journals have
            asyncio.run(self._feed(server, 1, lambda number: None))

    def _server(self) -> tidegate.TinkerServer:
        return tidegate.tinker_server(
            model=self._model,
            engines=1,
            api_keys={HOSTILE: "hostile", HEALTHY: "healthy"},
            state_directory=self._directory / "state",
        )

    async def _feed(
        self, server: tidegate.TinkerServer, bodies: int, each: Callable[[int], None]
    ) -> None:
        fuzzed = self.fuzzed
        client = Client(int(server.url.rpartition(":")[2]))
        try:
            for number in range(bodies):
                if number % BODIES_PER_SESSION == 0:
                    await self._serve_healthy_tenant(client)
                    await self._begin_hostile_session(client)
                each(number)
                path, right = fuzzed.chance.choice(list(PATHS.items()))
                right, protobuf = self._named(right), None
                if path == "forward_backward":
                    self._seq_id += 1
                    protobuf = training_body(self._names["model"], self._seq_id)
                await fuzzed.send(client, API + path, HOSTILE, right, BODY_BYTES_MAX, protobuf)
            await self._serve_healthy_tenant(client)
        finally:
            client.end()

    def _named(self, right: dict[str, Any]) -> dict[str, Any]:
        """Fill in names; a request of a model gets the number after the last one's."""
        filled = dict(right)
        for field, value in right.items():
            if value == "{seq}":
                self._seq_id += 1
                filled[field] = self._seq_id
            elif isinstance(value, str):
                filled[field] = value.format(**self._names)
        return filled

    async def _begin_hostile_session(self, client: Client) -> None:
        if self._names:
            await self._call(client, HOSTILE, f"sessions/{self._names['session']}/finish")
        self._names, self._seq_id = await self._new_session(client, HOSTILE), 0

    async def _new_session(self, client: Client, key: str) -> dict[str, str]:
        """Begin a session with a model and a sampler of the base model; return their names."""
        base = str(self._model)
        session = (await self._call(client, key, "create_session"))["session_id"]
        fields = {"session_id": session, "base_model": base}
        created = await self._call(
            client, key, "create_model", model_seq_id=0, lora_config={"rank": 4}, **fields
        )
        await self._call(client, key, "retrieve_future", request_id=created["request_id"])
        sampler = await self._call(
            client, key, "create_sampling_session", sampling_session_seq_id=0, **fields
        )
        return {
            "session": session,
            "model": created["model_id"],
            "sampler": sampler["sampling_session_id"],
            "base": base,
        }

    async def _serve_healthy_tenant(self, client: Client) -> None:
        """Train and sample as another tenant, in a session of its own."""
        names = await self._new_session(client, HEALTHY)
        body = training_body(names["model"], 1)
        _, answer = await self._post(client, HEALTHY, "forward_backward", body, PROTOBUF_TYPE)
        futures = [json.loads(answer)]
        sample = {**PATHS["asample"], "sampling_session_id": names["sampler"], "seq_id": 0}
        futures.append(await self._call(client, HEALTHY, "asample", **sample))
        for future in futures:
            result = await self._call(
                client, HEALTHY, "retrieve_future", request_id=future["request_id"]
            )
            if "error" in result:
                self.fuzzed.failures.append(f"a healthy tenant got {str(result)[:300]}")
        await self._call(client, HEALTHY, f"sessions/{names['session']}/finish")
        self.fuzzed.healthy += 1

    async def _call(self, client: Client, key: str, path: str, **fields: Any) -> dict[str, Any]:
        """Send a valid request until it has a result."""
        while True:
            status, answer = await self._post(client, key, path, json.dumps(fields).encode())
            if status not in (200, 204, 408):
                self.fuzzed.failures.append(f"a healthy {path} got {status} {answer[:300]!r}")
            if status != 408:  # the result is not there yet
                found: dict[str, Any] = json.loads(answer or b"{}")
                return found

    async def _post(
        self, client: Client, key: str, path: str, body: bytes, body_type: str = JSON_TYPE
    ) -> tuple[int, bytes]:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return await client.post(API + path, key, body, body_type)


def training_body(model_id: str, seq_id: int) -> bytes:
    request = pb.ForwardBackwardRequest(model_id=model_id, seq_id=seq_id, loss_fn="cross_entropy")
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.arange(20, 24, dtype="<i4").tobytes()
    targets = datum.loss_fn_inputs["target_tokens"]
    targets.dense, targets.dtype = np.arange(21, 25, dtype="<i8").tobytes(), pb.DTYPE_INT64
    targets.shape.append(4)
    encoded: bytes = request.SerializeToString()
    return encoded
