"""Make the quickstart's model folder and tasks: a tiny Llama without weights, and digits to pick.

A task shows six different digits in some order; right is every four of them in rising order, so
each task has fifteen right answers. Tasks to learn from and tasks to be tested on share no set of
digits.

    python examples/quickstart/prepare.py [--seed 0]
"""

import argparse
import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, PreTrainedTokenizerFast

HERE = Path(__file__).parent
DIGITS, PICKED = 6, 4
NUM_TRAIN, NUM_EVAL, NUM_SFT = 20_000, 200, 1_000
SPECIAL = ["<pad>", "<s>", "<|end|>", "<|user|>", "<|assistant|>", "<unk>"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_model(folder: Path) -> None:
    """A config and a character tokenizer; trinity makes up the weights from its seed."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocabulary = {token: number for number, token in enumerate(SPECIAL + characters)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="<|end|>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=["<|user|>", "<|assistant|>"],
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=vocabulary["<s>"],
        eos_token_id=vocabulary["<|end|>"],
        pad_token_id=vocabulary["<pad>"],
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)


def tasks(sets: list[tuple[str, ...]], rng: random.Random) -> Iterator[dict[str, str]]:
    """Endless tasks over these sets of digits, each with one of its right answers."""
    while True:
        digits = list(rng.choice(sets))
        answer = "".join(sorted(rng.sample(digits, PICKED)))
        rng.shuffle(digits)
        yield {"question": "".join(digits), "answer": answer}


def write_rows(path: Path, rows: Iterator[dict[str, str]], count: int, is_unique: bool) -> None:
    """The first ``count`` tasks as JSON lines, without a question twice if ``is_unique``."""
    seen: set[str] = set()
    with path.open("w") as file:
        while len(seen) < count:
            row = next(rows)
            name = row["question"] if is_unique else f"{len(seen)}"
            if name not in seen:
                seen.add(name)
                file.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=HERE)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    sets = list(itertools.combinations("0123456789", DIGITS))
    rng.shuffle(sets)
    unseen, seen = sets[: len(sets) // 7], sets[len(sets) // 7 :]
    write_model(options.folder / "model")
    data = options.folder / "data"
    data.mkdir(parents=True, exist_ok=True)
    write_rows(data / "train.jsonl", tasks(seen, rng), NUM_TRAIN, is_unique=True)
    write_rows(data / "eval.jsonl", tasks(unseen, rng), NUM_EVAL, is_unique=True)
    write_rows(data / "sft.jsonl", tasks(seen, rng), NUM_SFT, is_unique=False)
    print(f"Model and {NUM_TRAIN} tasks are in {options.folder}.")


if __name__ == "__main__":
    main()
