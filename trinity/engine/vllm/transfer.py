"""In vLLM's worker processes: take new weights from files, and tell what came.

vLLM finds this module by ``worker_extension_cls``; importing it registers the transfer.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save
from torch import Tensor
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import (
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from trinity.common.models.adapter_files import read_adapter
from trinity.engine.vllm.compat import repack_embeddings
from trinity.engine.vllm.direct import DirectLoader
from trinity.synchronizer.ipc import Handles, open_handles
from trinity.synchronizer.nccl import Meeting, NCCLReceiver
from trinity.utils.digest import WeightsDigest, weights_digest

BACKEND = "trinity"
EXTENSION = "trinity.engine.vllm.transfer.WorkerExtension"

Load = Callable[[Any], Any]


@dataclass(kw_only=True)
class NoInfo(WeightTransferInitInfo):
    """Files need no rendezvous."""


@dataclass(kw_only=True)
class FileInfo(WeightTransferUpdateInfo):
    """One file of weights by Hugging Face name; ``is_first``: it begins a new set."""

    path: str
    is_first: bool


class FileTransfer(WeightTransferEngine[NoInfo, FileInfo]):
    """Loads safetensors files, one or more an update, and keeps the digest of what they held."""

    init_info_cls = NoInfo
    update_info_cls = FileInfo
    digest: WeightsDigest
    loader: DirectLoader | None = None
    receiver: NCCLReceiver | None = None

    def init_transfer_engine(self, init_info: NoInfo) -> None:
        """Nothing to set up."""

    def start_weight_update(self) -> None:
        """Begin a layer-wise reload. vLLM 0.24 does that itself and does not call this."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def finish_weight_update(self) -> None:
        """End the reload; as with `start_weight_update`."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        repack_embeddings(self.model)

    def receive_weights(self, update_info: FileInfo, load_weights: Load | None = None) -> None:
        """Load one file. vLLM 0.24 brings ``load_weights``; later ones leave it to the model."""
        if update_info.is_first:
            self.digest = WeightsDigest()
        (load_weights or self.model.load_weights)(self._tensors(update_info.path))

    def _tensors(self, path: str) -> Iterator[tuple[str, Tensor]]:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # not a dict
                tensor = file.get_tensor(name)
                self.digest.add(name, tensor)
                yield name, tensor

    def shutdown(self) -> None:
        """Nothing is held."""

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """Asked for by vLLM 0.24; our trainers write files."""
        raise NotImplementedError("Weights are sent by trinity.synchronizer.channel.")


class WorkerExtension:
    """Methods that the engine may call in its workers."""

    def received_digest(self) -> str:
        """Digest of the weights of the last update."""
        return str(self.weight_transfer_engine.digest.hexdigest())  # type: ignore[attr-defined]  # of the worker

    def receive_by_nccl(
        self, meeting: dict[str, Any], request: str, group: str, num_workers: int, has_base: bool
    ) -> tuple[str, int, bool]:
        """Take the weights that ``request`` asked for, between two steps.

        Digest, version, and whether changes alone will do the next time.
        """
        transfer, loader = self._transfer()
        if transfer.receiver is None:
            rank, device = self.rank, self.device  # type: ignore[attr-defined]  # of the worker
            transfer.receiver = NCCLReceiver(rank, num_workers, device)
        patch = loader.patch if has_base else None
        with torch.no_grad():
            found = transfer.receiver.receive(
                Meeting(**meeting), request, group, loader.load, patch
            )
        loader.finish()
        return found.digest, found.version, loader.is_complete

    def receive_by_ipc(self, payload: Handles) -> str:
        """Take the weights that lie in the trainer's memory on this GPU; their digest."""
        _, loader = self._transfer()
        weights = list(open_handles(payload))
        with torch.no_grad():
            loader.load(weights)
            loader.finish()
        digest = weights_digest(weights)
        torch.cuda.synchronize()
        return digest

    def fetch_by_ipc(self, payload: Handles) -> bytes:
        """The weights that lie in the trainer's memory on this GPU, in the form of safetensors."""
        return save({name: tensor.cpu() for name, tensor in open_handles(payload)})

    def adapter_digest(self, folder: str, name: str) -> str:
        """Digest of the adapter ``name`` in ``folder``, as this process reads it."""
        return weights_digest(read_adapter(Path(folder), name))

    def _transfer(self) -> tuple[FileTransfer, DirectLoader]:
        transfer: FileTransfer = self.weight_transfer_engine  # type: ignore[attr-defined]  # of the worker
        if transfer.loader is None:
            transfer.loader = DirectLoader(transfer.model)
        return transfer, transfer.loader


WeightTransferEngineFactory.register_engine(BACKEND, FileTransfer)
