"""Pairs for DPO: a model's own right answer and its own wrong one, to tasks where it gives both.

python examples/algorithms/make_pairs.py --model FOLDER
"""

import argparse
import importlib.util
import json
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

QUICKSTART = Path(__file__).parent.parent / "quickstart"
NUM_SAMPLES, BATCH_SIZE, NUM_TASKS = 16, 250, 4_000


def quickstart_reward() -> type:
    """The class in the quickstart's plugin file."""
    spec = importlib.util.spec_from_file_location("q", QUICKSTART / "plugins" / "rising_digits.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.RisingDigits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=QUICKSTART / "data" / "pairs.jsonl")
    options = parser.parse_args()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(options.model, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(options.model)
    judge = quickstart_reward()()
    rows = [json.loads(line) for line in (QUICKSTART / "data" / "train.jsonl").open()][:NUM_TASKS]
    pairs = []
    for start in range(0, len(rows), BATCH_SIZE):
        questions = [row["question"] for row in rows[start : start + BATCH_SIZE]]
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
            )
            for question in questions
        ]
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False).to(
            model.device
        )
        tokens = model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            do_sample=True,
            top_k=0,
            max_new_tokens=6,
            num_return_sequences=NUM_SAMPLES,
        )
        answers = tokenizer.batch_decode(
            tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        for i, question in enumerate(questions):
            own = answers[i * NUM_SAMPLES : (i + 1) * NUM_SAMPLES]
            right = [a for a in own if judge(a, question)["accuracy"] == 1]
            wrong = [a for a in own if a.strip() and judge(a, question)["accuracy"] == 0]
            for chosen, rejected in zip(right[:2], wrong[:2], strict=False):
                pairs.append({"question": question, "chosen": chosen, "rejected": rejected})
    options.out.write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    print(f"{len(pairs)} pairs are in {options.out}.")


if __name__ == "__main__":
    main()
