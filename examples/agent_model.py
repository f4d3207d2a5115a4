"""Tokenizer and chat template of the agent demo's tiny model.

``tool_demonstrations.py`` and ``lake_demonstrations.py`` use them for their models; built on
``tokenizers``. Fixed phrases are one token each, all other tokens are characters. The template's
output only ever grows as a conversation continues, and tool calls are in Qwen's format.
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
"""Jinja chat template. Tool-call ``arguments`` are an object, as templates expect."""


def agent_tokenizer() -> Tokenizer:
    """Return the tokenizer of characters and fixed phrases."""
    return character_tokenizer([*SPECIAL, *PHRASES, *CHARACTERS], special=SPECIAL, phrases=PHRASES)
