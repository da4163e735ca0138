"""One model over several ranks: who the ranks are, FSDP2 applied to a model, its weights' parts."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from trinity.common.config.memory import GRADIENT_BYTES, is_little
from trinity.trainer.backends.torch.gathering import Gathering
from trinity.trainer.backends.torch.packed_model import Backbone
from trinity.trainer.backends.torch.sequence_parallel import SequenceGroup
from trinity.trainer.backends.torch.settings import TorchEngineSettings
from trinity.trainer.backends.torch.weights import Weights


@dataclass(frozen=True)
class RankSettings:
    """Which rank a process is, and how it finds the others.

    Args:
        rank: Number of this process, from 0.
        world_size: Number of processes.
        timeout_s: How long a rank waits for the others.
        backend: Of `torch.distributed`. Unset: gloo for what is on CPUs, NCCL for what is on GPUs.
    """

    rank: int
    world_size: int
    timeout_s: float = 600
    backend: str | None = None


class Ranks:
    """The ranks that train one model, seen from one of them."""

    def __init__(
        self, settings: RankSettings, engine: TorchEngineSettings, store: dist.Store
    ) -> None:
        self.rank = settings.rank
        self.world_size = settings.world_size
        self.device = device = engine.device
        usual = "gloo" if device == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            settings.backend or usual,
            store=store,
            rank=settings.rank,
            world_size=settings.world_size,
            timeout=timedelta(seconds=settings.timeout_s),
        )
        self.mesh: DeviceMesh = init_device_mesh(device, (settings.world_size,))
        self.sequence = SequenceGroup.of(self.rank, self.world_size, engine.sequence_parallel)
        self.tells = engine.tells(self.rank, self.world_size)
        """Whether this rank counts, of those that work on the same rows."""

    def any(self, flag: bool) -> bool:
        """Whether ``flag`` holds on some rank. Nobody waits for what GPUs have to do."""
        found = torch.tensor([float(flag)])
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found)

    def have_room(self, size: int) -> bool:
        """Whether so many bytes are little of the GPU's memory on every rank."""
        is_much = self.device == "cpu" or not is_little(size, torch.cuda.mem_get_info()[1])
        return not self.any(is_much)

    def total(self, value: Tensor) -> Tensor:
        """Sum over the ranks."""
        whole = value.clone()
        dist.all_reduce(whole)
        return whole

    def close(self) -> None:
        """Leave the others."""
        if dist.is_initialized():
            dist.destroy_process_group()


def shard(
    backbone: Backbone,
    dtype: torch.dtype,
    ranks: Ranks,
    offloads_parameters: bool = False,
    gathers_once: bool | None = None,
) -> Gathering:
    """Cut a float32 model into the parts of the ranks, layer by layer.

    It computes in ``dtype`` and adds gradients up in float32. What is in no layer (embeddings, the
    output layer) stays whole from a forward pass until `Gathering.rest`. With ``gathers_once``, by
    default of models that are small beside the GPU's memory, all of it does, as one piece: then
    layers have no hooks of FSDP's, which take as long as launching the layer's own work.
    """
    whole_bytes = _whole_bytes(backbone, dtype)
    if gathers_once is None:
        gathers_once = not offloads_parameters and ranks.have_room(whole_bytes)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy() if offloads_parameters and ranks.device != "cpu" else None
    cut = partial(
        fully_shard, mesh=ranks.mesh, mp_policy=policy, offload_policy=offload or OffloadPolicy()
    )
    outside = _outside_layers(backbone)  # first: layers that are cut are of other classes
    for layer in () if gathers_once else layers_of(backbone.model):
        cut(layer)
    cut(backbone, reshard_after_forward=False)
    for module in backbone.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return Gathering(backbone, outside, whole_bytes, gathers_once)


def _whole_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    """Of all weights in ``dtype``, and of the gradients of those that are trained."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(n * (dtype.itemsize + (GRADIENT_BYTES if trained else 0)) for n, trained in sizes)


def _outside_layers(backbone: Backbone) -> list[tuple[nn.Module, str]]:
    """Where the trained parameters are that are in no layer, each once."""
    known = {id(p) for layer in layers_of(backbone.model) for p in layer.parameters()}
    found = []
    for module in backbone.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in known:
                known.add(id(parameter))
                found.append((module, name))
    return found


def layers_of(model: PreTrainedModel) -> Iterator[nn.Module]:
    """The repeated blocks of a model, by the names the model itself gives."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    for module in model.modules():
        if type(module).__name__ in names:
            yield module


class ShardedWeights(Weights):
    """`Weights` of a sharded model: masters are this rank's parts, and the model's own.

    With ``is_offloaded`` they are copies in CPU memory, where the optimizer then works.
    """

    def __init__(
        self, model: PreTrainedModel, dtype: torch.dtype, ranks: Ranks, is_offloaded: bool = False
    ) -> None:
        self.model = model
        self.dtype = dtype
        self._ranks = ranks
        self._sharded: dict[str, DTensor] = {
            name: p
            for name, p in model.named_parameters()
            if p.requires_grad and isinstance(p, DTensor)
        }
        self._is_offloaded = is_offloaded
        self.masters = {
            name: nn.Parameter(_off(p._local_tensor) if is_offloaded else p._local_tensor.detach())
            for name, p in self._sharded.items()
        }

    def collect(self) -> None:
        for name, parameter in self._sharded.items():
            grad = parameter.grad
            local = grad._local_tensor if isinstance(grad, DTensor) else None
            master = self.masters[name]
            master.grad = torch.zeros_like(master) if local is None else local.to(master.device)

    def drop_gradients(self) -> None:
        super().drop_gradients()
        for parameter in self._sharded.values():
            parameter.grad = None

    def gradient_norm(self) -> Tensor:
        norms = torch._foreach_norm(self.gradients())
        return self._ranks.total(torch.stack(norms).square().sum()).sqrt()

    @torch.no_grad()
    def publish(self) -> None:
        """Bring masters from CPU memory. FSDP rounds weights each time it puts them together."""
        if self._is_offloaded:
            for name, parameter in self._sharded.items():
                parameter._local_tensor.copy_(self.masters[name])

    def state_dict(self) -> dict[str, Tensor]:
        whole = self.model.state_dict()
        names = self._sharded if self.is_partial else whole
        return {name: whole[name].detach() for name in names}

    @torch.no_grad()
    def export(self, trained_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.model.named_parameters():
            if trained_only and name not in self.masters:
                continue
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            yield name, whole.detach().to(self.dtype)

    @torch.no_grad()
    def load(self, read: Callable[[str], Tensor]) -> None:
        for name, parameter in self.saved_parameters().items():
            whole = read(name)
            if isinstance(parameter, DTensor):
                part = self._part(parameter, whole)
                parameter._local_tensor.copy_(part)
                if self._is_offloaded and name in self.masters:
                    self.masters[name].copy_(part)
            else:
                parameter.copy_(whole)

    def localize(self, name: str, whole: Tensor) -> Tensor:
        return self._part(self._sharded[name], whole).to(self.masters[name].device, copy=True)

    def globalize(self, name: str, part: Tensor) -> Tensor:
        # Not `from_local`, which takes what is offloaded to the GPU.
        return DTensor(part, self._sharded[name]._spec, requires_grad=False)

    def _part(self, parameter: DTensor, whole: Tensor) -> Tensor:
        [placement] = parameter.placements
        dim = placement.dim  # type: ignore[attr-defined]  # FSDP shards
        parts = whole.chunk(self._ranks.world_size, dim=dim)
        if self._ranks.rank < len(parts):
            return parts[self._ranks.rank].contiguous()
        return whole.narrow(dim, 0, 0)


def _off(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)
