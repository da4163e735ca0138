"""Make the example's model folder, pictures and tasks: a tiny LLaVA that is to name a colour.

python examples/vision/prepare.py
"""

import json
import random
from pathlib import Path

from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    PreTrainedTokenizerFast,
)

HERE = Path(__file__).parent
COLOURS = {"r": (220, 30, 30), "g": (30, 200, 30), "b": (30, 30, 220)}
SPECIAL = ["<pad>", "<|end|>", "<|user|>", "<|assistant|>", "<image>", "<unk>"]
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SIZE, PATCH = 24, 8


def write_model(folder: Path) -> None:
    """Config, tokenizer and image processor; trinity makes up the weights from its seed."""
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *"rgb?"])}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|end|>", pad_token="<pad>", unk_token="<unk>",
        additional_special_tokens=["<|user|>", "<|assistant|>", "<image>"],
    )  # fmt: skip
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            image_size=SIZE, patch_size=PATCH, projection_dim=64,
        ),
        text_config=LlamaConfig(
            vocab_size=len(vocabulary), hidden_size=64, intermediate_size=128,
            num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=64,
        ),
        image_token_index=vocabulary["<image>"],
        image_seq_length=(SIZE // PATCH) ** 2,
        eos_token_id=vocabulary["<|end|>"],
        pad_token_id=vocabulary["<pad>"],
    ).save_pretrained(folder)  # fmt: skip
    CLIPImageProcessorPil(
        size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE}
    ).save_pretrained(folder)


def write_tasks(folder: Path, name: str, count: int, rng: random.Random) -> None:
    """Pictures of a coloured spot on grey, and the rows that name them."""
    pictures = folder / name
    pictures.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        letter, colour = rng.choice(list(COLOURS.items()))
        image = Image.new("RGB", (SIZE, SIZE), (128, 128, 128))
        left, top = rng.randrange(SIZE // 3), rng.randrange(SIZE // 3)
        ImageDraw.Draw(image).ellipse((left, top, left + 14, top + 14), fill=colour)
        path = pictures / f"{number}.png"
        image.save(path)
        rows.append({"question": "?", "answer": letter, "picture": str(path)})
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    rng = random.Random(0)
    write_model(HERE / "model")
    write_tasks(HERE / "data", "train", 200, rng)
    write_tasks(HERE / "data", "eval", 60, rng)
    print(f"Model and tasks are in {HERE}.")


if __name__ == "__main__":
    main()
