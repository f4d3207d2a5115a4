"""Images in the vLLM-compatible server's conversations."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import tidegate
from tests.models import IMAGE_PAD_ID, data_url, make_image_model_directory
from tests.serving.vllm_server.vllm_serving import Client
from tidegate.transport.images import ImageReader
from tidegate.transport.media import Media

pytestmark = pytest.mark.wire


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_model_directory(tmp_path_factory.mktemp("vl"))


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[tidegate.VLLMServer]:
    with tidegate.vllm_server(model=model, served_model_name="tiny", engines=1) as server:
        yield server


def asking(url: str) -> dict[str, Any]:
    content = [
        {"type": "text", "text": "what?"},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    return {"model": "tiny", "messages": [{"role": "user", "content": content}]}


def test_a_conversation_with_an_image_has_the_log_probs_of_a_plain_forward(
    client: Client, model: Path
) -> None:
    url = data_url(3)
    body = asking(url) | {"max_tokens": 6, "logprobs": True, "return_token_ids": True, "seed": 1}
    answer = client.post("/v1/chat/completions", body)
    (choice,) = answer["choices"]
    prompt = answer["prompt_token_ids"]
    assert prompt.count(IMAGE_PAD_ID) == 6
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert client.post("/tokenize", asking(url))["tokens"] == prompt
    reader = ImageReader(model)
    media = Media("image", url)
    image = reader.process(media, reader.read(media))
    auto: Any = transformers.AutoModelForImageTextToText
    ids = torch.tensor([prompt + choice["token_ids"]])
    with torch.no_grad():
        logits = auto.from_pretrained(model, dtype=torch.float32)(
            ids,
            pixel_values=torch.from_numpy(image.pixel_values),
            image_grid_thw=torch.from_numpy(image.grid[None]),
            mm_token_type_ids=(ids == IMAGE_PAD_ID).int(),
        ).logits[0, len(prompt) - 1 : -1]
    logits[:, IMAGE_PAD_ID] = -torch.inf
    expected = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
    reported = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert reported == pytest.approx(expected.tolist(), abs=1e-4)


def test_what_cannot_be_served_with_an_image_is_refused_by_name(client: Client) -> None:
    route, good = "/v1/chat/completions", asking(data_url(3))
    bad = client.refusal(route, asking("data:image/png;base64,AAAA"))
    assert bad["code"] == 400
    assert "can't be read as an image" in bad["message"]
    assert "fetch nothing" in client.refusal(route, asking("https://host/cat.png"))["message"]
    cut = client.refusal(route, good | {"truncate_prompt_tokens": 4})
    assert "a prompt with images can't be truncated" in cut["message"]
    rendered = client.refusal(f"{route}/render", good)
    assert "a rendered prompt carries no images" in rendered["message"]
