"""Which model do the demo's agents use? The tiny one, with tokens and a chat template for tools.

Words that no agent can vary are a token each, all else is characters. What the template writes for
a conversation only ever grows, and a tool call reads as Qwen's. It knows no task but by its words.
"""

import string

from tokenizers import Tokenizer

from examples.calculator import INSTRUCTION
from examples.frozen_lake import RULES
from examples.tiny_model import character_tokenizer

SPECIAL = ("<pad>", "<eos>", "<unk>", "<user>", "<assistant>", "<tool>")
CALL_BEGIN = '<tool_call>{"name": "calculate", "arguments": {"expression": "'
CALL_END = '"}}</tool_call>'
PHRASES = (
    *("<tool_call>", '{"name": "', "calculate", '", "arguments": {"expression": "', '"}}'),
    *("</tool_call>", "Tools:", INSTRUCTION, RULES),
)
CHARACTERS = string.ascii_letters + string.digits + " +-=.,>?:;'\"()[]{}/_#\n"

CHAT_TEMPLATE = """\
{%- if tools %}
{{- "Tools:" }}{% for tool in tools %}{{ " " + tool.function.name }}{% endfor %}{{ "\\n" }}
{%- endif %}
{%- for message in messages %}
{{- "<" + message.role + ">" + (message.content or "") }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + "}</tool_call>" }}
{%- endfor %}
{{- "<eos>" }}
{%- endfor %}
{%- if add_generation_prompt %}{{ "<assistant>" }}{% endif %}
"""
"""``arguments`` come as an object, as templates are given them."""


def agent_tokenizer() -> Tokenizer:
    """Characters and phrases."""
    return character_tokenizer([*SPECIAL, *PHRASES, *CHARACTERS], special=SPECIAL, phrases=PHRASES)
