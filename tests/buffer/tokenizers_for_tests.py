"""A tokenizer of single characters and some chat templates, made without files."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = """{% for m in messages %}<s>{{ m.role }}
{{ m.content }}{% if m.tool_calls %}{% for c in m.tool_calls %}[{{ c.function.name }} \
{{ c.function.arguments | tojson }}]{% endfor %}{% endif %}<e>
{% endfor %}{% if add_generation_prompt %}<s>assistant
{% endif %}"""

WITH_TOOLS = "{% if tools %}<s>tools\n{{ tools | tojson }}<e>\n{% endif %}" + CHATML

DROPS_REASONING = """{% set ns = namespace(last=0) %}{% for m in messages %}\
{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}\
{% for m in messages %}<s>{{ m.role }}
{% if m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1] }}\
{% else %}{{ m.content }}{% endif %}<e>
{% endfor %}{% if add_generation_prompt %}<s>assistant
{% endif %}"""

MARKED = """{% for m in messages %}{% if m.role == 'assistant' %}<s>assistant
{% generation %}{{ m.content }}<e>{% endgeneration %}
{% else %}<s>{{ m.role }}
{{ m.content }}<e>
{% endif %}{% endfor %}{% if add_generation_prompt %}<s>assistant
{% endif %}"""

THINKING = CHATML + "{% if add_generation_prompt and enable_thinking %}<think>{% endif %}"


def characters(template: str = CHATML) -> PreTrainedTokenizerFast:
    letters = [chr(code) for code in range(32, 127)] + ["\n", "ä", "é"]
    vocabulary = {token: i for i, token in enumerate(["<s>", "<e>", "<unk>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(["<s>", "<e>", "<unk>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<e>", unk_token="<unk>", chat_template=template
    )
