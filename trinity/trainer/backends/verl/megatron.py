"""`MegatronModel`: a model in veRL's Megatron engine, and its part of a checkpoint."""

import json
from pathlib import Path
from typing import Any

import torch

from trinity.checkpoint import layout
from trinity.checkpoint.megatron import random_state_grid
from trinity.trainer.backends.verl.model import VerlModel


class MegatronModel(VerlModel):
    """A model cut over ranks by matrices, by layers and along the sequence.

    Of the ranks that work on the same rows, those of the last stage have outputs.
    """

    def save(self, folder: Path) -> None:
        """Write weights, optimizer and random state; on all ranks at once."""
        manager = self.engine.checkpoint_mananager
        manager.use_dist_checkpointing = True  # unset, weights are written for Hugging Face alone
        self.engine.save_checkpoint(str(folder), global_step=self.num_steps)
        if torch.distributed.get_rank() == 0:
            (folder / layout.STEPS).write_text(json.dumps({"num_steps": self.num_steps}))

    def load(self, folder: Path, weights_only: bool) -> None:
        """Take up what any number of ranks saved; on all ranks at once.

        Random state is for as many stages and tensor parallel ranks as saved it.

        Raises:
            ValueError: The folder holds no checkpoint of Megatron.
        """
        if not layout.dist_checkpoint(folder).is_dir():
            raise ValueError(
                f"{folder} is no checkpoint of Megatron: convert it with `trinity convert`, and "
                "start from its Hugging Face folder by `model.model_path`."
            )
        manager = self.engine.checkpoint_mananager
        manager.use_dist_checkpointing = True
        rest = ["optimizer", "extra"] if self._knows_random_state(folder) else ["optimizer"]
        steps = [["model"]] if weights_only else [["model"], rest]
        for contents in steps:  # together, veRL looks for the optimizer's places among the weights
            manager.checkpoint_load_contents = contents
            self.engine.load_checkpoint(str(folder), del_local_after_load=False)
        if weights_only:
            self._masters().reload_model_params()
        else:
            self.num_steps = int(json.loads((folder / layout.STEPS).read_text())["num_steps"])

    def _knows_random_state(self, folder: Path) -> bool:
        sizes = self.engine.engine_config
        own = (sizes.pipeline_model_parallel_size, sizes.tensor_model_parallel_size)
        return random_state_grid(folder / "extra" / layout.DIST_CHECKPOINT) == own

    def _update(self) -> float:
        """Megatron would take up a gradient that is not finite, and spares norms from decay."""
        decay = self._optimizer.weight_decay
        for group in self.optimizer.param_groups:
            group["weight_decay"] = decay
        optimizer = self._masters()
        with self.engine.train_mode():
            optimizer.prepare_grads()
            norm = float(optimizer.get_grad_norm())
            if torch.isfinite(torch.tensor(norm)):
                self.engine.optimizer_step()
        return norm

    def _masters(self) -> Any:
        """Megatron's optimizer, which has methods beyond PyTorch's."""
        return self.engine.optimizer

    def _is_fused(self) -> bool:
        return bool(self.engine.engine_config.use_fused_kernels)
