"""Checkpoints go from one trainer to the other, and from and to veRL itself."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.trainer.backends.faq import loaded_by_the_script
from tests.trainer.backends.process_ranks import rank_group
from tests.trainer.backends.steps import assert_same, grpo, ppo, rows
from tests.trainer.backends.verl.engines import for_verl, settings, torch_engine, verl_engine
from tests.trainer.toy import model_folder, plain_model
from trinity.checkpoint.convert import convert
from trinity.common.models.utils import load_fsdp_state_dict_from_verl_checkpoint
from trinity.trainer.backends.verl.rank import VerlTrainRank

pytest.importorskip("verl")
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


class WithVerlsOwnFiles(VerlTrainRank):
    """Also saves and loads by veRL's own checkpoint manager."""

    async def save_by_verl(self, folder: Path) -> None:
        engine = self._model("actor").engine
        await self._run(lambda: engine.save_checkpoint(str(folder / "actor"), global_step=2))

    async def load_by_verl(self, folder: Path) -> int:
        model = self._model("actor")
        load = model.engine.load_checkpoint
        await self._run(lambda: load(str(folder / "actor"), del_local_after_load=False))
        model.num_steps = model.engine.lr_scheduler.last_epoch
        return model.num_steps


@pytest.mark.parametrize(("world_size", "tied"), [(1, True), (2, False)])
async def test_a_run_changes_its_trainer_type_and_back(tmp_path, world_size, tied):
    folder = model_folder(tmp_path / "model", tie_word_embeddings=tied)
    given = settings(folder, has_critic=True)
    async with torch_engine(given) as plain:
        wanted = await ppo(plain, range(2))
        await plain.save(tmp_path / "global_step_2")
        wanted = await ppo(plain, range(2, 6))
    async with verl_engine(given, world_size) as engine:
        await engine.load(tmp_path / "global_step_2")
        assert_same(await ppo(engine, range(2, 4)), wanted[:2])
        await engine.save(tmp_path / "global_step_4", True)
        await engine.wait_saved()
        logprob = (await engine.forward(rows(9)))["logprob"]
    async with torch_engine(given) as plain:
        await plain.load(tmp_path / "global_step_4")
        torch.testing.assert_close((await plain.forward(rows(9)))["logprob"], logprob)
        assert_same(await ppo(plain, range(4, 6)), wanted[2:])
    hf = AutoModelForCausalLM.from_pretrained(tmp_path / "global_step_4/actor/huggingface")
    weights = load_fsdp_state_dict_from_verl_checkpoint(tmp_path / "global_step_4/actor")
    for name, weight in hf.state_dict().items():
        torch.testing.assert_close(weight, weights[name])


async def test_ranks_of_verl_may_be_fewer_afterwards(tmp_path):
    given = settings(model_folder(tmp_path / "model"))
    async with verl_engine(given, 2) as engine:
        await grpo(engine, range(2))
        await engine.save(tmp_path / "global_step_2")
        await engine.wait_saved()
        wanted = await grpo(engine, range(2, 4))
    async with verl_engine(given, 1) as engine:
        await engine.load(tmp_path / "global_step_2")
        assert_same(await grpo(engine, range(2, 4)), wanted)


@pytest.mark.parametrize("world_size", [1, 2])
async def test_shards_that_verl_itself_wrote(tmp_path, world_size):
    given = settings(model_folder(tmp_path / "model"))
    plain_model(given.model_path).save_pretrained(given.model_path)
    path = tmp_path / "project" / "name" / "global_step_780"
    with rank_group(for_verl(given), world_size, WithVerlsOwnFiles) as group:
        await group.prepare()
        await grpo(group, range(2))
        await group._all("save_by_verl", path)
        wanted = await grpo(group, range(2, 4))
        logprob = (await group.forward(rows(9)))["logprob"]
        await group.save(tmp_path / "global_step_4")
        await group.wait_saved()
    model = loaded_by_the_script(given.model_path, tmp_path)
    assert convert(path).status == "converted"
    hf = AutoModelForCausalLM.from_pretrained(path / "actor" / "huggingface")
    tokens = torch.arange(3, 30)[None]
    torch.testing.assert_close(hf(tokens).logits, model(tokens).logits)
    async with torch_engine(given) as plain:
        await plain.load(path)
        assert_same(await grpo(plain, range(2, 4)), wanted)
    with rank_group(for_verl(given), world_size, WithVerlsOwnFiles) as group:
        await group.prepare()
        assert await group._all("load_by_verl", tmp_path / "global_step_4") == [4] * world_size
        found = (await group.forward(rows(9)))["logprob"]
        torch.testing.assert_close(found, logprob)
    async with verl_engine(given) as engine:
        await engine.load(path)
        assert_same(await grpo(engine, range(2, 4)), wanted)


async def test_a_checkpoint_of_another_architecture_is_refused(tmp_path):
    given = settings(model_folder(tmp_path / "model"))
    other = settings(model_folder(tmp_path / "other", num_hidden_layers=3))
    async with torch_engine(given) as plain:
        await plain.save(tmp_path / "global_step_1")
    async with verl_engine(other) as engine:
        with pytest.raises(ValueError, match=r"another architecture: there is no model.layers.2"):
            await engine.load(tmp_path / "global_step_1")
