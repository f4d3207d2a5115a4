"""How does vLLM get images, audio and video? As references beside a prompt of tokens.

Its server fetches and decodes them, and puts as many tokens as they need in place of each
placeholder; nothing here opens one. Read in 0.32's `/inference/v1/generate`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tidegate.transport.media import Media, MediaKind

REQUEST = "GenerateRequest"
"""The body's name in /openapi.json."""

SIGNS: Mapping[MediaKind, tuple[str, ...]] = {
    "image": ("vision_config", "image_token_id", "image_token_index"),
    "audio": ("audio_config", "audio_token_id", "audio_token_index"),
    "video": ("video_token_id", "video_token_index"),
}
"""Fields that config.json has, at its top, where the model reads such a thing. vLLM doesn't say;
what it can't read after all, it refuses by turn."""


def takes_references(api: Mapping[str, Any]) -> bool:
    """Whether the server of this /openapi.json reads ``content_parts``: one that does not passes
    them over without a word."""
    schema = api.get("components", {}).get("schemas", {}).get(REQUEST, {})
    return "content_parts" in schema.get("properties", {})


def media_of(model: Path) -> frozenset[MediaKind]:
    """What the model of a directory reads beside tokens."""
    try:
        config = json.loads((model / "config.json").read_text())
    except (OSError, ValueError):
        return frozenset()  # it is refused elsewhere
    return frozenset(kind for kind, signs in SIGNS.items() if any(sign in config for sign in signs))


def content_part(media: Media) -> dict[str, str]:
    """One medium as an entry of ``content_parts``; a path becomes a URL."""
    url = media.url
    if url.startswith("/"):
        url = Path(url).as_uri()
    return {"type": f"{media.kind}_url", "url": url}
