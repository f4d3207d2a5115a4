"""Small chat templates in the shapes of real model families, and a tokenizer for them."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models

from tidegate.orchestrator.episodes.tool_calls import HARMONY_MARKS, KIMI_MARKS

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
"""As Qwen3's: reasoning before the last question is omitted."""

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

SMOLLM2 = """
{%- for message in messages %}
{%- if loop.first and messages[0].role != 'system' %}
{{- '<|im_start|>system\nYou are SmolLM.<|im_end|>\n' }}
{%- endif %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
"""As SmolLM2's: has a system message of its own, and ignores tools."""

TEMPLATES = {
    "chatml": CHATML,
    "chatml_thinking": CHATML_THINKING,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "deepseek": DEEPSEEK,
    "summary": SUMMARY,
    "smollm2": SMOLLM2,
}

QWEN_CODER = """
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>\n<function=' + call.function.name + '>\n' }}
{%- for name, value in call.function.arguments.items() %}
{{- '<parameter=' + name + '>\n' }}
{{- (value | tojson if value is mapping or value is iterable and value is not string else value) }}
{{- '\n</parameter>\n' }}
{%- endfor %}
{{- '</function>\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
"""As Qwen3-Coder's: each argument as text between tags; values as Python writes them."""

GLM = """
{%- set ns = namespace(last=-1) %}
{%- for message in messages if message.role == 'user' %}{%- set ns.last = loop.index0 %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|assistant|>\n' }}
{%- if message.reasoning_content and loop.index0 > ns.last %}
{{- '<think>' + message.reasoning_content + '</think>\n' }}
{%- else %}{{- '<think></think>\n' }}{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\n<tool_call>' + call.function.name + '\n' }}
{%- for name, value in call.function.arguments.items() %}
{{- '<arg_key>' + name + '</arg_key>\n<arg_value>' }}
{{- value if value is string else (value | tojson) }}{{- '</arg_value>\n' }}
{%- endfor %}
{{- '</tool_call>' }}
{%- endfor %}
{%- elif message.role == 'tool' %}
{{- '<|observation|>\n<tool_response>' + message.content + '</tool_response>' }}
{%- else %}{{- '<|user|>\n' + message.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\n' }}{%- endif %}
"""
"""As GLM-4.6's: reasoning apart from the content, and shown after the last question only. Nothing
ends a turn but the next message's header."""

MINIMAX = """
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>ai\n' }}
{%- if message.reasoning_content %}
{{- '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}
{%- endif %}
{{- message.content }}
{%- if message.tool_calls %}
{{- '\n<minimax:tool_call>\n' }}
{%- for call in message.tool_calls %}
{{- '<invoke name="' + call.function.name + '">\n' }}
{%- for name, value in call.function.arguments.items() %}
{{- '<parameter name="' + name + '">' }}
{{- value if value is string else (value | tojson) }}{{- '</parameter>\n' }}
{%- endfor %}
{{- '</invoke>\n' }}
{%- endfor %}
{{- '</minimax:tool_call>' }}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>ai\n<think>\n' }}{%- endif %}
"""
"""As MiniMax M2's: the prompt begins the reasoning, which is shown in all turns."""

KIMI = """
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.role == 'tool' %}{{- '## Return of ' + message.tool_call_id + '\n' }}{%- endif %}
{{- message.content }}
{%- if message.tool_calls %}
{{- '<|tool_calls_section_begin|>' }}
{%- for call in message.tool_calls %}
{{- '<|tool_call_begin|>' + call['id'] + '<|tool_call_argument_begin|>' }}
{{- call.function.arguments | tojson }}{{- '<|tool_call_end|>' }}
{%- endfor %}
{{- '<|tool_calls_section_end|>' }}
{%- endif %}
{{- '<|im_end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}
"""
"""As Kimi K2's: the marks of calls are special tokens, and calls have ids of the model's own."""

HARMONY = """
{%- set ns = namespace(tool=none) %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- if message.content and message.thinking %}
{{- raise_exception('content and thinking beside a call') }}
{%- endif %}
{%- set thoughts = message.content or message.thinking %}
{%- if thoughts %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + thoughts + '<|end|>' }}
{%- endif %}
{%- set call = message.tool_calls[0].function %}
{%- set ns.tool = call.name %}
{{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
{{- call.arguments | tojson }}{{- '<|call|>' }}
{%- elif message.role == 'assistant' %}
{%- if loop.last and not add_generation_prompt %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|return|>' }}
{%- else %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- elif message.role == 'tool' %}
{{- '<|start|>functions.' + (ns.tool or 'none') + ' to=assistant<|channel|>commentary<|message|>' }}
{{- (message.content | tojson) + '<|end|>' }}
{%- else %}{{- '<|start|>' + message.role + '<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}
"""
"""As gpt-oss': a turn is several messages; an answer's analysis is not shown again."""

TEMPLATES |= {
    "qwen_coder": QWEN_CODER,
    "glm": GLM,
    "minimax": MINIMAX,
    "kimi": KIMI,
    "harmony": HARMONY,
}

SPECIAL_OF: dict[str, list[str]] = {
    "glm": ["<|user|>", "<|assistant|>", "<|observation|>"],
    "kimi": list(KIMI_MARKS),
    "harmony": list(HARMONY_MARKS),
}
"""Special tokens of these templates' tokenizers, beside ``SPECIAL``."""

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
    "smollm2": "<|im_end|>",
    "qwen_coder": "<|im_end|>",
    "glm": "<|user|>",
    "minimax": "<|im_end|>",
    "kimi": "<|im_end|>",
    "harmony": "<|return|>",
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


def chat_tokenizer(special: Sequence[str] = SPECIAL) -> Tokenizer:
    """Make a tokenizer: a token per mark, printable character, line break and some letter pairs."""
    letters = [*map(chr, range(32, 127)), "\n"]
    merges = [("a", "b"), ("i", "n"), ("\n", "\n"), ("e", "r"), ("}", "\n"), (".", "\n")]
    words = [*special, *PLAIN_MARKS, *letters, *(a + b for a, b in merges)]
    model = models.BPE(vocab={word: n for n, word in enumerate(words)}, merges=merges)
    tokenizer = Tokenizer(model)
    tokenizer.add_special_tokens([AddedToken(word, normalized=False) for word in special])
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in PLAIN_MARKS])
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


STOPS = {"harmony": ("<|return|>", "<|call|>"), "glm": ("<|user|>", "<|observation|>")}
"""Tokens that end a turn, of models that have several."""


def stop_tokens(tokenizer: Tokenizer, name: str) -> list[int]:
    """Return the tokens that end a turn: id 0 and the template's own; or two of the model's."""
    if name in STOPS:
        return [tokenizer.token_to_id(mark) or 0 for mark in STOPS[name]]
    return [0, tokenizer.token_to_id(ENDS[name]) or 0]


def add_chat_template(path: Path, name: str) -> Path:
    """Write this tokenizer and template to a model directory."""
    own = [mark for mark in SPECIAL_OF.get(name, ()) if mark not in SPECIAL]
    tokenizer = chat_tokenizer([*SPECIAL, *own])
    path.mkdir(exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"chat_template": TEMPLATES[name], "bos_token": {"content": "<bos>"}}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    stops = stop_tokens(tokenizer, name)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return path
