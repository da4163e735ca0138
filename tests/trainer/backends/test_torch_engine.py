import pytest
import torch
from torch import Tensor

from tests.trainer.toy import groups, model_folder, multi_turn, plain_model
from trinity.common.experience import EID, Experience
from trinity.trainer.backends.torch import head
from trinity.trainer.backends.torch.engine import TorchTrainEngine
from trinity.trainer.backends.torch.microbatch import MicroBatchRule
from trinity.trainer.backends.torch.optimizer import OptimizerSettings
from trinity.trainer.backends.torch.settings import TorchEngineSettings
from trinity.trainer.batch import TrainBatch
from trinity.trainer.loss import Objective

GRPO = Objective.from_names("ppo", {"clip_range": 0.2}, entropy_loss_fn="default")


def settings(folder: str, **changes: object) -> TorchEngineSettings:
    optimizer = OptimizerSettings(lr=1e-3, clip_grad=1.0)
    return TorchEngineSettings(folder, **{"dtype": "float32", "optimizer": optimizer, **changes})


def plain_outputs(model: torch.nn.Module, batch: TrainBatch, temperature: float = 1.0):
    """logprob and entropy [B, T] row by row, with full logits, differentiable."""
    width = batch["action_mask"].shape[1]
    logprobs, entropies = [], []
    for b, tokens in enumerate(batch.row_tokens()):
        start = int(batch["prompt_length"][b])
        logits = model(tokens.long()[None]).logits[0, start - 1 : -1].float() / temperature
        log_p = logits.log_softmax(-1)
        picked = log_p.gather(1, tokens.long()[start:, None]).squeeze(1)
        pad = (0, width - len(picked))
        mask = batch["action_mask"][b]
        logprobs.append(torch.nn.functional.pad(picked, pad) * mask)
        entropies.append(torch.nn.functional.pad(-(log_p.exp() * log_p).sum(-1), pad) * mask)
    return {"logprob": torch.stack(logprobs), "entropy": torch.stack(entropies)}


def plain_gradient(folder: str, batch: TrainBatch, objective: Objective, temperature: float = 1.0):
    model = plain_model(folder)
    loss, _ = objective(plain_outputs(model, batch, temperature), batch)
    loss.backward()
    return float(loss), {n: p.grad for n, p in model.named_parameters()}


def gradients(engine: TorchTrainEngine) -> dict[str, Tensor]:
    return {n: m.grad for n, m in engine._trained("actor").optimizer.weights.masters.items()}


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-6):
    assert set(found) == set(wanted)
    for name in wanted:
        scale = max(float(wanted[name].abs().max()), 1e-3)
        assert float((found[name] - wanted[name]).abs().max()) < tolerance * scale * 5, name


ROWS = {
    "groups": groups,
    "multi_turn": multi_turn,
    "mixed": lambda: [*groups(2, 3), *[_in_task(e, 9) for e in multi_turn()]],
}


def _in_task(experience: Experience, task: int) -> Experience:
    experience.eid = EID(0, task, experience.eid.run)
    return experience


async def test_metrics_are_those_of_the_whole_batch(tmp_path):
    folder = model_folder(tmp_path / "model")
    batch = TrainBatch.from_experiences(groups())
    loss, wanted = GRPO(plain_outputs(plain_model(folder), batch), batch)
    engine = TorchTrainEngine(settings(folder, micro_batches=MicroBatchRule(max_rows=5)))
    await engine.prepare()
    found = await engine.forward_backward(batch, GRPO)
    assert found.pop(GRPO.loss_name) == pytest.approx(float(loss), rel=1e-4, abs=1e-6)
    expected = {name: float(value) for name, value in wanted.items()}
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(("place", "token"), [(-1, 10**6), (-1, 97), (3, 10**6), (-1, -5)])
async def test_tokens_that_the_model_does_not_have_are_told(tmp_path, place, token):
    """The last of a row is only looked up in the logits: a kernel would read past their end."""
    folder, rows = model_folder(tmp_path / "model", head_dim=16), groups()
    rows[1].tokens[place] = token
    batch = TrainBatch.from_experiences(rows)
    engine = TorchTrainEngine(settings(folder, dtype="bfloat16"))
    await engine.prepare()
    told = f"no token {token}: the ids of the model are 0 to 96. .* another tokenizer"
    with pytest.raises(ValueError, match=told):
        await engine.forward_backward(batch, GRPO)
    with pytest.raises(ValueError, match=told):
        await engine.forward(batch)


async def test_each_row_is_scored_at_the_temperature_it_was_sampled_at(tmp_path):
    """Expert rows tell none; those beside them keep theirs."""
    folder, rows = model_folder(tmp_path / "model"), groups()
    for place, heat in ((0, 0.5), (2, 1.5)):
        rows[place].info["temperature"] = heat
    batch = TrainBatch.from_experiences(rows)
    engine = TorchTrainEngine(settings(folder, temperature=0.8))
    await engine.prepare()
    found = (await engine.forward(batch))["logprob"]
    for place, heat in enumerate([0.5, 0.8, 1.5, *[0.8] * (len(rows) - 3)]):
        wanted = plain_outputs(plain_model(folder), batch, heat)["logprob"][place]
        torch.testing.assert_close(found[place], wanted.detach(), atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("rows", list(ROWS))
@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize(("temperature", "head_dim"), [(1.0, 8), (0.6, 16)])  # 16: compiled
async def test_gradient_equals_the_padded_computation(
    tmp_path, rows, shares, temperature, head_dim
):
    folder = model_folder(tmp_path / "model", head_dim=head_dim)
    batch = TrainBatch.from_experiences(ROWS[rows]())
    objective = Objective.from_names("ppo", None, "none", None, "default", {"entropy_coef": 0.01})
    loss, wanted = plain_gradient(folder, batch, objective, temperature)
    rule = MicroBatchRule(max_tokens=90)
    engine = TorchTrainEngine(
        settings(folder, shares_prefixes=shares, micro_batches=rule, temperature=temperature)
    )
    await engine.prepare()
    metrics = await engine.forward_backward(batch, objective)
    assert metrics["actor/final_loss"] == pytest.approx(loss, rel=1e-6, abs=2e-7)
    assert_close(gradients(engine), wanted)


async def test_logprobs_and_entropy_equal_plain_ones(tmp_path):
    folder = model_folder(tmp_path / "model", tie_word_embeddings=False)
    batch = TrainBatch.from_experiences(groups())
    engine = TorchTrainEngine(settings(folder))
    await engine.prepare()
    found = await engine.forward(batch, entropy=True)
    wanted = plain_outputs(plain_model(folder), batch)
    torch.testing.assert_close(found["logprob"], wanted["logprob"], rtol=1e-5, atol=2e-6)
    torch.testing.assert_close(found["entropy"], wanted["entropy"], rtol=1e-5, atol=2e-6)


async def test_the_reference_stays_the_model_as_it_was_at_first(tmp_path):
    folder = model_folder(tmp_path / "model")
    batch = TrainBatch.from_experiences(groups())
    engine = TorchTrainEngine(settings(folder))
    await engine.prepare()
    await engine.forward_backward(batch, GRPO)
    await engine.optim_step()
    found = (await engine.forward(batch, "ref"))["logprob"]
    wanted = plain_outputs(plain_model(folder), batch)["logprob"]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=2e-6)
    assert not torch.allclose((await engine.forward(batch))["logprob"], wanted, atol=1e-3)


async def test_an_output_layer_in_many_chunks_gives_the_gradient_of_the_whole(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(head, "_CHUNK_ELEMENTS", 97 * 7)  # 7 tokens; some rows have more
    folder = model_folder(tmp_path / "model")
    batch = TrainBatch.from_experiences(groups())
    loss, wanted = plain_gradient(folder, batch, GRPO)
    engine = TorchTrainEngine(settings(folder))
    await engine.prepare()
    metrics = await engine.forward_backward(batch, GRPO)
    assert metrics["actor/final_loss"] == pytest.approx(loss, rel=1e-6, abs=2e-7)
    assert_close(gradients(engine), wanted)


SPARING = {
    "checkpointing": {"gradient_checkpointing": True},
    "parameters": {"param_offload": True, "reference_offload": True},
    "optimizer": {"optimizer_offload": True},
    "rows": {"micro_batches": MicroBatchRule(max_rows=2)},
}


@pytest.mark.parametrize("way", list(SPARING))
async def test_what_saves_memory_changes_nothing(tmp_path, way):
    folder = model_folder(tmp_path / "model")
    plain = TorchTrainEngine(settings(folder))
    sparing = TorchTrainEngine(settings(folder, **SPARING[way]))
    found = []
    for engine in (plain, sparing):
        await engine.prepare()
        for seed in range(3):
            batch = TrainBatch.from_experiences(groups(seed=seed))
            metrics = await engine.forward_backward(batch, GRPO)
            found.append(metrics | await engine.optim_step())
        found.append({"ref": float((await engine.forward(batch, "ref"))["logprob"].sum())})
    for own, other in zip(found[4:], found[:4], strict=True):
        assert own == pytest.approx(other, rel=1e-5, abs=1e-6)
    masters = [e._trained("actor").optimizer.weights.masters for e in (plain, sparing)]
    for name, master in masters[0].items():
        torch.testing.assert_close(masters[1][name], master, atol=1e-6, rtol=1e-6)
