"""veRL's Megatron engine on GPUs computes what the torch trainer does, to the rounding of bf16.

Two ranks have a GPU each where there are two, and NCCL. On one GPU they share it, and what they
exchange goes through CPU memory (`staged_group`).
"""

from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from tests.trainer.backends import staged_group
from tests.trainer.backends.process_ranks import rank_group
from tests.trainer.backends.steps import GRPO, grpo, ppo, rows
from tests.trainer.backends.verl.engines import settings, torch_engine
from tests.trainer.toy import model_folder
from trinity.checkpoint.convert import convert, load_folder
from trinity.trainer.backends.torch.microbatch import MicroBatchRule
from trinity.trainer.backends.torch.optimizer import OptimizerSettings
from trinity.trainer.backends.torch.rank_group import RankGroup
from trinity.trainer.backends.torch.settings import CriticSettings, TorchEngineSettings
from trinity.trainer.backends.verl.megatron_rank import MegatronTrainRank
from trinity.trainer.backends.verl.settings import MegatronSizes, VerlEngineSettings

pytestmark = pytest.mark.skipif(find_spec("transformer_engine") is None, reason="no Megatron here")

WAYS = {
    "copies": MegatronSizes(),
    "tensor": MegatronSizes(tensor=2),
    "tensor without sequence_parallel": MegatronSizes(tensor=2, sequence_parallel=False),
    "stages": MegatronSizes(pipeline=2),
    "chunks of stages": MegatronSizes(pipeline=2, virtual_pipeline=2),
    "context": MegatronSizes(context=2),
}


def a_model(path: Path, tied: bool = True) -> str:
    """Heads of 64, as attention kernels want them, and a vocabulary that two ranks can share."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 128}
    sizes["num_hidden_layers"] = 4
    return model_folder(path, initializer_range=0.05, tie_word_embeddings=tied, **sizes)


def on_gpu(folder: str, **changes: object) -> TorchEngineSettings:
    slow = OptimizerSettings(lr=1e-4)
    return settings(folder, dtype="bfloat16", device="cuda", optimizer=slow, **changes)


def for_megatron(folder: str, **changes: object) -> VerlEngineSettings:
    return VerlEngineSettings.of(on_gpu(folder), strategy="megatron", **changes)


def megatron_ranks(given: VerlEngineSettings, num_ranks: int) -> AbstractContextManager[RankGroup]:
    """Megatron writes checkpoints by processes of its own."""
    backend = staged_group.NAME if num_ranks > torch.cuda.device_count() else None
    return rank_group(given, num_ranks, MegatronTrainRank, has_children=True, backend=backend)


async def compare(group, single, seeds: range) -> None:
    """Rows are the trainer's own: away from where a ratio is clipped, and rounding decides."""
    for seed in seeds:
        batch = rows(seed)
        own = (await single.forward(batch))["logprob"]
        batch = batch.with_columns(old_logprob=own)
        found = (await group.forward(batch, entropy=True)) | await group.forward(batch, "ref")
        wanted = (await single.forward(batch, entropy=True)) | await single.forward(batch, "ref")
        for name, values in wanted.items():
            torch.testing.assert_close(found[name], values, atol=0.1, rtol=0.02)
        found = await group.forward_backward(batch, GRPO) | await group.optim_step()
        wanted = await single.forward_backward(batch, GRPO) | await single.optim_step()
        print(seed, *((found[n], wanted[n]) for n in ("actor/final_loss", "actor/grad_norm")))
        assert found["actor/final_loss"] == pytest.approx(
            wanted["actor/final_loss"], abs=3e-3, rel=0.02
        )
        assert found["actor/grad_norm"] == pytest.approx(wanted["actor/grad_norm"], rel=0.03)
        assert found["actor/lr"] == wanted["actor/lr"]


def converted(folder: Path) -> bool:
    """Whether `convert` finds in Megatron's own files what the Hugging Face folder holds."""
    target = folder / "actor" / "huggingface"
    kinds = {"dtype": torch.bfloat16}
    own = AutoModelForCausalLM.from_pretrained(target, **kinds).state_dict()
    for path in target.glob("*.safetensors*"):
        path.unlink()
    outcome = convert(folder)
    assert (outcome.status, outcome.message) == ("converted", "from Megatron")
    found = AutoModelForCausalLM.from_pretrained(target, **kinds).state_dict()
    return own.keys() == found.keys() and all(torch.equal(own[n], found[n]) for n in own)


async def test_ten_steps_of_one_gpu_are_those_of_the_torch_trainer(tmp_path):
    folder = a_model(tmp_path / "model")
    with megatron_ranks(for_megatron(folder), 1) as group:
        await group.prepare()
        async with torch_engine(on_gpu(folder)) as single:
            await compare(group, single, range(10))
        await group.save(tmp_path / "global_step_10", True)
        await group.wait_saved()
        wanted = []
        for _ in range(2):
            logprob = (await group.forward(rows(7)))["logprob"]
            await group.forward_backward(rows(8), GRPO)
            wanted.append((logprob, await group.optim_step()))
            await group.load(tmp_path / "global_step_10")
        assert torch.equal(wanted[0][0], wanted[1][0]) and wanted[0][1] == wanted[1][1]
        await group.close()
    assert converted(tmp_path / "global_step_10")


async def test_two_ranks_share_experts(tmp_path):
    experts = Qwen3MoeConfig(
        hidden_size=256, intermediate_size=512, vocab_size=128, num_hidden_layers=2, head_dim=64,
        num_attention_heads=4, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=128, initializer_range=0.05, architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    experts.save_pretrained(tmp_path / "model")
    told = []
    for num_ranks in (1, 2):
        given = for_megatron(str(tmp_path / "model"), megatron=MegatronSizes(expert=num_ranks))
        with megatron_ranks(given, num_ranks) as group:
            await group.prepare()
            logprob = (await group.forward(rows(0)))["logprob"]
            told.append((logprob, await grpo(group, range(2))))
            await group.save(tmp_path / "global_step_2", True)
            await group.wait_saved()
            await group.close()
        weights = load_folder(tmp_path / "global_step_2" / "actor" / "huggingface")
        assert sum(".mlp.experts." in name for name in weights) == 2 * 4 * 3
    (logprob, wanted), (found, steps) = told
    torch.testing.assert_close(found, logprob, atol=0.1, rtol=0.02)
    for step, other in zip(steps, wanted, strict=True):
        print(*((step[n], other[n]) for n in ("actor/final_loss", "actor/grad_norm")))
        assert step["actor/final_loss"] == pytest.approx(other["actor/final_loss"], abs=5e-3)
        assert step["actor/grad_norm"] == pytest.approx(other["actor/grad_norm"], rel=0.05)


async def test_rows_may_be_padded(tmp_path):
    folder = a_model(tmp_path / "model")
    with megatron_ranks(for_megatron(folder, packs=False), 1) as group:
        await group.prepare()
        async with torch_engine(on_gpu(folder)) as single:
            await compare(group, single, range(3))
        await group.close()


async def test_a_critic_learns_and_a_gradient_that_is_not_finite_changes_nothing(tmp_path):
    folder = a_model(tmp_path / "model")
    critic = CriticSettings(folder, OptimizerSettings(lr=3e-4), MicroBatchRule(max_tokens=90))
    own = VerlEngineSettings.of(on_gpu(folder, critic=critic), strategy="megatron")
    with megatron_ranks(own, 1) as group:
        await group.prepare()
        found = await ppo(group, [0] * 8)
        losses = [step["critic/vf_loss"] for step in found]
        print(losses, [step["critic/grad_norm"] for step in found])
        assert losses[-1] < losses[0]
        before = (await group.forward(rows(7)))["logprob"]
        broken = rows(1).with_columns(advantages=rows(1)["advantages"] * float("inf"))
        await group.forward_backward(broken, GRPO)
        metrics = await group.optim_step()
        assert metrics["actor/skipped_updates"] == 1.0
        assert torch.equal((await group.forward(rows(7)))["logprob"], before)
        await group.close()


@pytest.mark.parametrize("way", list(WAYS))
async def test_two_ranks_compute_what_one_does(tmp_path, way):
    folder = a_model(tmp_path / "model", tied=WAYS[way].virtual_pipeline is None)
    with megatron_ranks(for_megatron(folder, megatron=WAYS[way]), 2) as group:
        await group.prepare()
        async with torch_engine(on_gpu(folder)) as single:
            await compare(group, single, range(3))
        await group.save(tmp_path / "global_step_3", True)
        await group.wait_saved()
        logprob = (await group.forward(rows(7)))["logprob"]
        await group.close()
    assert converted(tmp_path / "global_step_3")
    with megatron_ranks(for_megatron(folder), 1) as group:
        await group.prepare()
        await group.load(tmp_path / "global_step_3")
        found = (await group.forward(rows(7)))["logprob"]
        torch.testing.assert_close(found, logprob, atol=0.1, rtol=0.02)
        await group.forward_backward(rows(8), GRPO)
        assert (await group.optim_step())["actor/lr"] > 0
        await group.close()
