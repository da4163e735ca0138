"""Two ranks on two GPUs compute what one process on the CPU does."""

import pytest
import torch

from tests.trainer.backends.process_ranks import rank_group
from tests.trainer.backends.steps import GRPO, rows
from tests.trainer.backends.test_torch_engine import settings
from tests.trainer.toy import model_folder
from trinity.common.models.adapters import AdapterSettings
from trinity.trainer.backends.torch.engine import TorchTrainEngine
from trinity.trainer.backends.torch.microbatch import MicroBatchRule

WAYS = {
    "fsdp2": {},  # so small that weights are put together once a call
    "each_pass": {"gathers_once": False},
    "ulysses": {"sequence_parallel": 2},
    "offloaded": {"param_offload": True, "optimizer_offload": True},
    "optimizer": {"optimizer_offload": True, "gradient_checkpointing": True},
    "adapter": {"adapter": AdapterSettings(rank=4)},
}


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are not here")
@pytest.mark.parametrize("way", list(WAYS))
async def test_two_gpus_compute_what_one_process_does(tmp_path, way):
    folder = model_folder(tmp_path / "model", hidden_size=64)
    rule = MicroBatchRule(max_tokens=80)
    adapter = WAYS[way].get("adapter")
    single = TorchTrainEngine(settings(folder, micro_batches=rule, adapter=adapter))
    await single.prepare()
    given = settings(folder, micro_batches=rule, device="cuda", **WAYS[way])
    with rank_group(given, 2) as group:
        await group.prepare()
        for seed in range(3):
            found = await group.forward_backward(rows(seed), GRPO) | await group.optim_step()
            wanted = await single.forward_backward(rows(seed), GRPO) | await single.optim_step()
            for name in ("actor/final_loss", "actor/grad_norm", "actor/lr"):
                assert found[name] == pytest.approx(wanted[name], rel=2e-3, abs=1e-5), name
        await group.save(tmp_path / "global_step_3", True)
        await group.wait_saved()
        logprob = (await group.forward(rows(7)))["logprob"]
        await group.close()
    again = TorchTrainEngine(settings(folder, adapter=adapter))
    await again.prepare()
    await again.load(tmp_path / "global_step_3")
    found = (await again.forward(rows(7)))["logprob"]
    torch.testing.assert_close(found, logprob, atol=5e-3, rtol=5e-3)
