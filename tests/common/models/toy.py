"""Tokenizers, chat templates and tiny model folders, all made here."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PretrainedConfig, PreTrainedTokenizerFast

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
MERGED = ("th", "he", "in", "er", "an", "the", "call", "tool", '":', "{", "}}", "Ġa", "Ġthe", "ĊĊ")

CHATML = """
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Like CHATML with a default system turn.
SMOLLM = """
{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
{%- endif %}""" + CHATML.lstrip("\n").replace("{%- for", "{%- for", 1)

_TOOLS = """
{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}"""

_CALLS = """
{%- if message.tool_calls %}{%- for call in message.tool_calls %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
{%- endfor %}{%- endif %}"""

_TOOL_TURN = """
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content }}
{{- '\\n</tool_response><|im_end|>\\n' }}"""

_USER_TURN = """
{%- elif message.role == 'user' %}
{{- '<|im_start|>user\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}"""

QWEN25 = (
    _TOOLS
    + """
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + message.content }}"""
    + _CALLS
    + """
{{- '<|im_end|>\\n' }}"""
    + _TOOL_TURN
    + _USER_TURN
    + """
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
)

# Drops the reasoning of every turn that comes before the last question.
QWEN3 = (
    _TOOLS
    + """
{%- set ns = namespace(last=0) %}
{%- for message in messages %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}
{%- endif %}{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set parts = message.content.split('</think>') %}
{%- set answer = parts[-1].lstrip('\\n') %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last and parts | length > 1 %}
{{- '<think>\\n' + parts[0].split('<think>')[-1].strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif %}
{{- answer }}"""
    + _CALLS
    + """
{{- '<|im_end|>\\n' }}"""
    + _TOOL_TURN
    + _USER_TURN
    + """
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}{%- endif %}"""
)

LLAMA3 = """
{{- '<|begin_of_text|>' }}
{%- if tools %}{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- for tool in tools %}{{- (tool | tojson) + '\\n' }}{%- endfor %}{{- '<|eot_id|>' }}{%- endif %}
{%- for message in messages %}
{%- set role = 'ipython' if message.role == 'tool' else message.role %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
{%- if message.tool_calls %}
{%- set call = message.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
{%- else %}{{- message.content | trim }}{%- endif %}
{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}"""

TEMPLATES = {
    "chatml": (CHATML, "<|im_end|>"),
    "smollm": (SMOLLM, "<|im_end|>"),
    "qwen25": (QWEN25, "<|im_end|>"),
    "qwen3": (QWEN3, "<|im_end|>"),
    "llama3": (LLAMA3, "<|eot_id|>"),
}
"""Name -> template and the token that ends a turn."""


def tokenizer(template: str = "chatml") -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with some merges and the special tokens of all templates."""
    text, end = TEMPLATES[template]
    pieces = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges: list[tuple[str, str]] = []
    for word in MERGED:
        known = word[0]
        for letter in word[1:]:
            if (known, letter) not in merges:
                merges.append((known, letter))
            known += letter
            if known not in pieces:
                pieces.append(known)
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token=end,
        pad_token="<|endoftext|>",
        additional_special_tokens=[s for s in SPECIALS if s not in (end, "<|endoftext|>")],
        chat_template=text,
    )


def config(**changes: object) -> LlamaConfig:
    """A Llama of two layers for the vocabulary of `tokenizer`."""
    made = tokenizer()
    settings: dict[str, object] = {
        "vocab_size": len(made),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": made.convert_tokens_to_ids("<|im_end|>"),
        "pad_token_id": 0,
        "initializer_range": 0.2,
    }
    return LlamaConfig(**{**settings, **changes})


def model_folder(
    path: Path, template: str = "chatml", model: PretrainedConfig | None = None
) -> str:
    """A folder with config and tokenizer and no weights."""
    made = tokenizer(template)
    found = model or config(eos_token_id=made.convert_tokens_to_ids(TEMPLATES[template][1]))
    found.save_pretrained(path)
    made.save_pretrained(path)
    return str(path)
