"""Program with TRL's vLLM client, run by TRL's Python; arguments: server URL, model directory."""

import json
import sys

import requests
from accelerate import PartialState
from trl.experimental.async_grpo.vllm_client import VLLMClient

TIMEOUT_S = 60


def main(url: str, model: str) -> None:
    PartialState()  # required by its logging
    client = VLLMClient(url, server_timeout=TIMEOUT_S)
    client.wait_for_server_ready()
    reported = {
        "max_model_len": client.get_max_model_len(),
        "dtype": client.get_dtype(),
        "world_size": client.get_world_size(),
        "has_lora": client.get_server_info()["lora_config"]["max_loras"] > 1,
    }
    label = _label(url)
    client.pause()
    reported["frozen"] = requests.get(f"{url}/is_paused", timeout=TIMEOUT_S).json()["is_paused"]
    client.init_weight_transfer_engine({})
    client.start_weight_update()
    client.update_weights({"path": model})
    client.finish_weight_update()
    client.resume()
    reported["label_is_kept"] = _label(url) == label  # the client sends no version
    try:
        client.load_lora_adapter("no", "/nowhere")
    except RuntimeError:  # the client's error for a 404
        reported["missing_adapter"] = 404
    client.unload_lora_adapter("no")
    sys.stdout.write(json.dumps(reported))


def _label(url: str) -> str:
    info = requests.get(f"{url}/weight_info", timeout=TIMEOUT_S).json()
    return str(info["weight_version"])


if __name__ == "__main__":
    main(*sys.argv[1:])
