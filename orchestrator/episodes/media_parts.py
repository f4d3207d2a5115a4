"""Media parts of OpenAI messages (images, audio, video), as references for engines and templates.

Nothing is fetched: only an engine reads a reference's content, if its model supports the medium.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from tidegate.errors import ChatRefused, ConfigError
from tidegate.transport.media import (
    DATA_URL_CHARS_MAX,
    MEDIA_CHARS_MAX,
    MEDIA_MAX,
    URL_CHARS_MAX,
    Media,
    MediaKind,
)

KINDS: Mapping[str, MediaKind] = {
    "image_url": "image",
    "audio_url": "audio",
    "video_url": "video",
    "input_audio": "audio",
}
"""Message part types and their kinds. OpenAI's ``input_audio`` has no reference but its content."""


def plain_part(part: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a part in the form of chat templates: ``{"type": "image", "url": …}``.

    Raises:
        ChatRefused: it has no reference, or one that is too long.
    """
    kind = KINDS[part["type"]]
    value = part.get(part["type"])
    if part["type"] == "input_audio":
        url = _audio_url(value)
    else:
        url = value.get("url") if isinstance(value, Mapping) else value
    if not isinstance(url, str) or not url:
        raise ChatRefused(
            f"{where} is of type {part['type']!r} and has no url; "
            "give it as {'type': 'image_url', 'image_url': {'url': ...}}, or audio as "
            "{'type': 'input_audio', 'input_audio': {'data': ..., 'format': 'wav'}}"
        )
    if why := _too_long(url):
        raise ChatRefused(f"{where} has {why}")
    return {"type": kind, "url": url}


def _audio_url(value: object) -> str | None:
    if not isinstance(value, Mapping) or not isinstance(value.get("data"), str):
        return None
    return f"data:audio/{value.get('format', 'wav')};base64,{value['data']}"


def media_of(messages: Sequence[Mapping[str, Any]]) -> list[Media]:
    """Return the media of plain messages, in order."""
    parts = [p for m in messages if isinstance(m["content"], list) for p in m["content"]]
    return [Media(part["type"], part["url"]) for part in parts if part["type"] != "text"]


def text_of(content: "str | list[dict[str, Any]]") -> str:
    """Return the text of a message's content, without media."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part["type"] == "text")


def refuse_if_written_out(prompt: str, messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise ChatRefused if the template wrote media parts as text, because it then does not support
    media."""
    media = media_of(messages)
    text = "".join(text_of(message["content"]) for message in messages) if media else ""
    if any(prompt.count(item.url) > text.count(item.url) for item in media):
        raise ChatRefused(
            "the model's chat template writes references out as text, so the model reads no "
            "images, audio or video; leave them out, or serve one that does"
        )


def check_media_size(media: Sequence[Media]) -> None:
    """Raise ConfigError if a context has too many or too large media."""
    if len(media) > MEDIA_MAX:
        raise ConfigError(f"a context must have at most {MEDIA_MAX} media, got {len(media)}")
    chars = sum(len(item.url) for item in media)
    if chars > MEDIA_CHARS_MAX:
        raise ConfigError(
            f"a context's media references may have {MEDIA_CHARS_MAX} characters together, got "
            f"{chars}; pass URLs or paths in place of data: URLs"
        )
    for item in media:
        if why := _too_long(item.url):
            raise ConfigError(f"media of kind {item.kind} have {why}")


def _too_long(url: str) -> str:
    most = DATA_URL_CHARS_MAX if url.startswith("data:") else URL_CHARS_MAX
    if len(url) <= most:
        return ""
    return (
        f"a reference of {len(url)} characters; one may have {most}. Larger content belongs in a "
        f"file or behind a URL that the engine can read"
    )


def recorded(media: Media) -> dict[str, Any]:
    """Return media for a recording; inline content is replaced by its URL's digest."""
    url = media.url
    if url.startswith("data:"):
        head, _, _ = url.partition(",")
        url = f"{head},sha256:{hashlib.sha256(url.encode()).hexdigest()}"
    place = media.position
    placed = {} if isinstance(place, int) else {"tokens": place.tokens, "digest": place.digest}
    return {"kind": media.kind, "url": url, "at": media.token_offset, **placed}
