"""RunPlan -> the benchmark of a job: its checkpoints as weights for the engines."""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from trinity.checkpoint import layout
from trinity.checkpoint.megatron import load_dist_checkpoint
from trinity.common.config.inference_model import InferenceModelConfig
from trinity.common.constants import EngineType
from trinity.common.models.loading import resolve_dtype
from trinity.common.models.protocol import WeightTicket
from trinity.common.models.utils import load_fsdp_state_dict_from_verl_checkpoint
from trinity.explorer.benchmark import Benchmark, Candidate
from trinity.explorer.explorer import Explorer
from trinity.launcher.check_bench import broken_of, config_of, folders_of
from trinity.launcher.plan import RunPlan
from trinity.launcher.tinker import checkpoint_ticket
from trinity.synchronizer.channel import MemoryChannel
from trinity.utils.log import get_logger

Read = Callable[[Path], Iterator[tuple[str, Tensor]]]


def build(plan: RunPlan, explorer: Explorer) -> Benchmark:
    """The benchmark of all whole checkpoints of a job, or of the newest. Nothing is read yet."""
    settings = plan.config.explorer
    for name, fault in broken_of(plan).items():
        get_logger("benchmark").warning("%s is not whole and is left out: %s.", name, fault)
    dtype = engine_dtype(settings.rollout_model)
    channel, read = MemoryChannel(), _adapter if plan.config.model.lora_configs else weights_of
    is_there = settings.rollout_model.engine_type is EngineType.TINKER
    candidates = [
        Candidate(
            layout.step_of(folder),
            partial(checkpoint_ticket, folder)
            if is_there
            else partial(_ticket, channel, folder, dtype, read),
        )
        for folder in folders_of(plan)
    ]
    return Benchmark(explorer, candidates, includes_start=settings.eval_on_startup)


def engine_dtype(model: InferenceModelConfig) -> torch.dtype:
    """In which number format the engines have their weights; `auto` is the starting model's own."""
    if model.dtype != "auto":
        return resolve_dtype(model.dtype, None)
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(
        model.model_path or "", trust_remote_code=model.trust_remote_code
    )
    return resolve_dtype("auto", config.dtype)


def _ticket(channel: MemoryChannel, folder: Path, dtype: torch.dtype, read: Read) -> WeightTicket:
    weights = ((name, tensor.to(dtype)) for name, tensor in read(folder / layout.ACTOR))
    return channel.send(layout.step_of(folder), weights)


def weights_of(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Weights by Hugging Face name: of the exported model if there is one, else of the shards."""
    files = sorted((folder / layout.HUGGING_FACE).glob("model*.safetensors"))
    of_megatron = layout.dist_checkpoint(folder)
    if not files and of_megatron.is_dir():
        yield from _untied(load_dist_checkpoint(of_megatron, config_of(folder))).items()
    elif not files:
        yield from _untied(load_fsdp_state_dict_from_verl_checkpoint(folder)).items()
    for path in files:
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # not a dict
                yield name, file.get_tensor(name)


def _adapter(folder: Path) -> Iterator[tuple[str, Tensor]]:
    yield from load_fsdp_state_dict_from_verl_checkpoint(folder).items()


def _untied(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the output layer if it is the embedding: engines know tied weights by one name."""
    head = weights.get("lm_head.weight")
    tied = [t for name, t in weights.items() if name.endswith("embed_tokens.weight")]
    if head is None or not any(torch.equal(head, tensor) for tensor in tied):
        return weights
    return {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}
