"""Error bodies of the APIs: words and codes that clients act on."""

from tidegate.errors import ContextFull
from tidegate.serving.http.errors import AnthropicErrors, OpenAIErrors


def test_a_full_context_is_answered_in_the_words_by_which_harnesses_compact_messages() -> None:
    full = ContextFull(tokens=1100, tokens_max=1024)
    openai = OpenAIErrors().answer_to(full)
    assert openai.status == 400
    error = OpenAIErrors().body(openai)["error"]
    assert error["code"] == "context_length_exceeded"
    assert error["type"] == "invalid_request_error"
    assert "maximum context length is 1024 tokens" in error["message"]
    anthropic = AnthropicErrors().answer_to(full)
    assert anthropic.status == 400
    error = AnthropicErrors().body(anthropic)["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"] == "prompt is too long: 1100 tokens > 1024 maximum"
