"""Small chat templates in the shapes of real model families, and a tokenizer for them."""

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models

CHATML = """
{%- if tools %}
{{- '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\n\n' }}{%- endif %}
{{- 'Tools:' }}
{%- for tool in tools %}{{- '\n' + (tool | tojson) }}{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{{- '<|im_start|>user\n' + message.content + '<|im_end|>\n' }}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant' }}
{%- if message.content %}{{- '\n' + message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\n' }}{%- endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
"""As Qwen2.5's: later renderings show every message unchanged."""

CHATML_THINKING = """
{%- set ns = namespace(last_query=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set ns.last_query = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set content = message.content %}
{%- set thought = '' %}
{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}
{%- endif %}
{{- '<|im_start|>assistant\n' }}
{%- if loop.index0 > ns.last_query and (loop.last or thought) %}
{{- '<think>\n' + thought + '\n</think>\n\n' }}
{%- endif %}
{{- content }}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
"""As Qwen3's: reasoning before the last question is left out."""

LLAMA3 = """
{{- bos_token }}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", ' }}
{{- '"parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' }}
{%- elif message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + (message.content | tojson) + '<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}
{{- message.content | trim }}{{- '<|eot_id|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"""

GEMMA = """
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
{%- set role = 'model' if message.role == 'assistant' else 'user' %}
{{- '<start_of_turn>' + role + '\n' + (message.content | trim) + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\n' }}{%- endif %}
"""

DEEPSEEK = """
{{- bos_token }}
{%- for message in messages if message.role == 'system' %}{{- message.content }}{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<|User|>' + message.content }}
{%- elif message.role == 'tool' %}{{- '<|tool_output|>' + message.content }}
{%- elif message.role == 'assistant' %}
{{- '<|Assistant|>' + message.content.split('</think>')[-1] + '<|end_of_sentence|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|Assistant|>' }}{%- endif %}
"""
"""As DeepSeek R1's: reasoning is never shown again; all system messages come first."""

SUMMARY = """
{%- for message in messages %}
{%- if loop.index0 < messages | length - 3 %}{{- message.role[0] + '..' }}
{%- else %}{{- message.role + ': ' + message.content + '\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}
"""
"""Shows only the last three messages and the number of others: rewrites history each time."""

TEMPLATES = {
    "chatml": CHATML,
    "chatml_thinking": CHATML_THINKING,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "deepseek": DEEPSEEK,
    "summary": SUMMARY,
}

SPECIAL = [
    "<|end|>",
    "<|im_end|>",
    "<|im_start|>",
    "<bos>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|User|>",
    "<|Assistant|>",
    "<|tool_output|>",
    "<|end_of_sentence|>",
]
"""Special tokens, with ids 0, 1, …."""

PLAIN_MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
"""Strings with a token of their own that is not special."""

ENDS = {
    "chatml": "<|im_end|>",
    "chatml_thinking": "<|im_end|>",
    "llama3": "<|eot_id|>",
    "gemma": "<end_of_turn>",
    "deepseek": "<|end_of_sentence|>",
    "summary": "<|end|>",
}


CHATML_SEEING = """
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'text' %}{{- part.text }}{%- else %}{{- '<' + part.type + '>' }}{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
"""As Qwen2-VL's: a placeholder for each image, audio and video."""

TEMPLATES["chatml_seeing"] = CHATML_SEEING
ENDS["chatml_seeing"] = "<|im_end|>"


def chat_tokenizer() -> Tokenizer:
    """Make a tokenizer: a token per mark, printable character, line break and some letter pairs."""
    letters = [*map(chr, range(32, 127)), "\n"]
    merges = [("a", "b"), ("i", "n"), ("\n", "\n"), ("e", "r"), ("}", "\n"), (".", "\n")]
    words = [*SPECIAL, *PLAIN_MARKS, *letters, *(a + b for a, b in merges)]
    model = models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=merges)
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in SPECIAL])
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in PLAIN_MARKS])
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def add_chat_template(path: Path, name: str) -> Path:
    """Write this tokenizer and template to a model directory."""
    tokenizer = chat_tokenizer()
    path.mkdir(exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"chat_template": TEMPLATES[name], "bos_token": {"content": "<bos>"}}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    stop = tokenizer.token_to_id(ENDS[name])
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, stop]}))
    return path
