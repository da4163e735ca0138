"""Images from a row to the gradient, with a tiny LLaVA made here."""

import base64
import io

import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoConfig, CLIPImageProcessorPil, CLIPVisionConfig, LlavaConfig

from tests.common.models import toy
from trinity.buffer.rows.check import RowFault
from trinity.buffer.schema import FORMATTER
from trinity.common.config.buffer import FormatConfig
from trinity.common.experience import deserialize_many, serialize_many
from trinity.common.models import ModelSettings, ModelWrapper, SamplingParams
from trinity.common.models.fake import FakeModel
from trinity.common.models.loading import load_causal_lm, load_tokenizer
from trinity.common.models.vision import PIXELS, load_image
from trinity.common.workflows import Task
from trinity.engine.torch import TorchEngine, TorchEngineSettings
from trinity.explorer.runner import WorkflowRunner
from trinity.explorer.units import Unit
from trinity.trainer.backends.torch.policy import Policy
from trinity.trainer.batch import TrainBatch

Image = pytest.importorskip("PIL.Image")

NUM_PIECES = 4
FORMAT = {"prompt_key": "q", "response_key": "a", "image_key": "picture"}


def picture(color: str) -> bytes:
    """A PNG with a white corner, so that two of them differ beyond their brightness."""
    made = Image.new("RGB", (16, 16), color)
    made.paste("white", (0, 0, 8, 8))
    out = io.BytesIO()
    made.save(out, "PNG")
    return out.getvalue()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Config, tokenizer and image processor of a LLaVA; no weights."""
    path = tmp_path_factory.mktemp("llava")
    tokenizer = toy.tokenizer()
    tokenizer.add_tokens(AddedToken("<image>", special=True))
    mark = tokenizer.convert_tokens_to_ids("<image>")
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        image_size=16, patch_size=8, projection_dim=32,
    )  # fmt: skip
    LlavaConfig(
        vision_config=vision,
        text_config=toy.config(vocab_size=len(tokenizer)),
        image_token_index=mark,
        image_seq_length=NUM_PIECES,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
        initializer_range=0.2,
    ).save_pretrained(path)
    tokenizer.save_pretrained(path)
    size = {"height": 16, "width": 16}
    CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size=size).save_pretrained(path)
    return str(path)


@pytest.fixture
async def model(folder):
    engine = TorchEngine(TorchEngineSettings(folder, dtype="float32", num_threads=1))
    await engine.prepare()
    settings = ModelSettings(
        folder, name="toy", enable_multimodal=True, max_model_len=256, max_response_tokens=12,
        enable_history=True,
    )  # fmt: skip
    yield ModelWrapper(engine, settings)
    await engine.close()


async def rows_of(model, *pictures, repeat_times=2, prompt="What is it?"):
    """The experiences of one group for each picture."""
    found = []
    for place, image in enumerate(pictures):
        task = Task(
            workflow="simple_mm_workflow",
            reward_fn="exact_match_reward",
            raw_task={"q": prompt, "a": "x", "picture": image},
            format_args=FORMAT,
            repeat_times=repeat_times,
            batch_id=1,
            task_id=place,
        )
        runner = WorkflowRunner(0, model)
        await runner.prepare()
        result = await runner.run_unit(Unit(place, task, tuple(range(repeat_times)), 7, 60.0))
        await runner.close()
        assert not result.runs[0].error, result.runs[0].error
        found += deserialize_many(result.payload)
    return found


async def test_samples_see_the_image(model, folder):
    rows = await rows_of(model, picture("red"), picture("blue"))
    mark = model.tokenizer.convert_tokens_to_ids("<image>")
    whole, _ = load_causal_lm(folder, "float32", 0)
    for row in rows:
        prompt = row.tokens[: row.prompt_length]
        assert (prompt == mark).sum() == NUM_PIECES and row.reward == 0
        pixels = row.multi_modal_inputs[PIXELS]
        assert pixels.shape == (1, 3, 16, 16)
        with torch.no_grad():
            logits = whole(input_ids=row.tokens[None].long(), pixel_values=pixels).logits[0]
        wanted = logits.log_softmax(-1)[row.prompt_length - 1 : -1].gather(
            1, row.tokens[row.prompt_length :, None].long()
        )
        torch.testing.assert_close(row.logprobs, wanted[:, 0], atol=1e-5, rtol=0)
    assert not torch.allclose(rows[0].logprobs[:1], rows[2].logprobs[:1])


async def test_the_trainer_sees_the_same_and_learns_from_it(model, folder):
    rows = await rows_of(model, picture("red"), picture("blue"), repeat_times=3)
    rows = deserialize_many(serialize_many(rows))
    batch = TrainBatch.from_bytes(TrainBatch.from_experiences(rows).to_bytes())
    network, _ = load_causal_lm(folder, "float32", 0)
    policy = Policy(network)
    outputs = policy.token_outputs(batch)
    found = outputs.by_row(batch)["logprob"]
    torch.testing.assert_close(found, batch["old_logprob"], atol=1e-5, rtol=0)
    apart = Policy(network, shares_prefixes=False).token_outputs(batch).by_row(batch)["logprob"]
    torch.testing.assert_close(found, apart, atol=1e-5, rtol=0)
    found.sum().backward()
    seen = network.model.vision_tower.embeddings.patch_embedding.weight.grad
    assert seen is not None and seen.abs().sum() > 0


async def test_forms_of_images(model, tmp_path):
    raw = picture("green")
    (tmp_path / "g.png").write_bytes(raw)
    address = "data:image/png;base64," + base64.b64encode(raw).decode()
    forms = [raw, str(tmp_path / "g.png"), {"bytes": raw, "path": None}, address, load_image(raw)]
    found = await rows_of(model, *forms, repeat_times=1)
    assert len({tuple(row.tokens.tolist()) for row in found}) == 1
    two = await rows_of(
        model, [raw, picture("red")], repeat_times=1, prompt="<image> or <image>, which?"
    )
    assert two[0].multi_modal_inputs[PIXELS].shape[0] == 2
    client = model.get_openai_async_client()
    part = {"type": "image_url", "image_url": {"url": address}}
    asked = [{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}]
    await client.chat.completions.create(model="toy", messages=asked, max_tokens=3)
    assert model.extract_experience_from_history()[-1].multi_modal_inputs is not None


async def test_mistakes_are_named(model, folder):
    asked = [{"role": "user", "content": [{"type": "image", "image": "http://a/b.png"}]}]
    with pytest.raises(ValueError, match="network"):
        await model.chat_async(asked)
    asked = [{"role": "user", "content": [{"type": "image", "image": b"no picture"}]}]
    with pytest.raises(ValueError, match="can't be read"):
        await model.chat_async(asked)
    with pytest.raises(ValueError, match="0 images, but marks"):
        await model.chat_async([{"role": "user", "content": "an <image> in the text"}])
    blind = ModelWrapper(model.endpoint.group.engines, ModelSettings(folder, name="toy"))
    with pytest.raises(ValueError, match="enable_multimodal"):
        await blind.chat_async(asked)
    with pytest.raises(ValueError, match="same number of images"):
        rows = await rows_of(model, picture("red"), repeat_times=1)
        rows += await model.chat_async([{"role": "user", "content": "hi"}])
        for row in rows:
            row.reward = 0.0
        TrainBatch.from_experiences(rows)


async def test_equal_tokens_of_other_images_are_not_taken_from_the_prefix_cache(folder):
    engine = TorchEngine(TorchEngineSettings(folder, dtype="float32", num_threads=1))
    await engine.prepare()
    ids = [5, *[AutoConfig.from_pretrained(folder).image_token_id] * NUM_PIECES, *range(6, 90)]
    params = SamplingParams(n=1, max_tokens=4, temperature=1.0, seed=1)
    red, blue = torch.zeros(1, 3, 16, 16), torch.ones(1, 3, 16, 16)
    first = await engine.sample_with_images(ids, red, params)
    other = await engine.sample_with_images(ids, blue, params)
    again = await engine.sample_with_images(ids, red, params)
    assert first[0].logprobs == again[0].logprobs != other[0].logprobs
    await engine.close()


async def test_a_row_without_an_image_is_told():
    task = Task(
        workflow="simple_mm_workflow", reward_fn="exact_match_reward",
        raw_task={"q": "?", "a": "x"}, format_args=FORMAT,
    )  # fmt: skip
    with pytest.raises(ValueError, match="no image in the column"):
        await task.to_workflow(FakeModel(["x"])).run_async()


def answers(folder, rows, **keys):
    """What SFT makes of rows with the columns `q`, `a` and `picture`."""
    config = FormatConfig(prompt_type="plaintext", **{**FORMAT, **keys})
    made = FORMATTER.get("sft")(config, load_tokenizer(folder), 256)
    return [made.format(row) for row in rows]


async def test_answers_about_images_are_rows_like_sampled_ones(model, folder):
    [sampled, *_] = await rows_of(model, picture("red"))
    row = {"q": "What is it?", "a": "the sum", "picture": picture("red")}
    [found, two] = answers(
        folder,
        [row, {**row, "q": "<image> or <image>?", "picture": [picture("red"), picture("blue")]}],
    )
    length = sampled.prompt_length
    assert found.prompt_length == length
    assert found.tokens[:length].tolist() == sampled.tokens[:length].tolist()
    torch.testing.assert_close(found.multi_modal_inputs[PIXELS], sampled.multi_modal_inputs[PIXELS])
    assert found.response_text.startswith("the sum") and found.action_mask.all()
    assert found.prompt_text.count("<image>") == 1
    assert two.multi_modal_inputs[PIXELS].shape[0] == 2
    [again] = deserialize_many(serialize_many([found]))
    batch = TrainBatch.from_experiences([found, again])
    network, _ = load_causal_lm(folder, "float32", 0)
    loss = -Policy(network).token_outputs(batch).by_row(batch)["logprob"].sum()
    loss.backward()
    seen = network.model.vision_tower.embeddings.patch_embedding.weight.grad
    assert seen is not None and seen.abs().sum() > 0


def test_a_video_of_an_answer_is_its_pictures(folder):
    row = {"q": "What is in <video>?", "a": "x", "film": [picture("red")] * 20}
    [found] = answers(folder, [row], image_key=None, video_key="film")
    assert found.multi_modal_inputs[PIXELS].shape[0] == 8


@pytest.mark.parametrize(
    ("change", "key", "reason"),
    [
        ({"q": "<image> or <image>?"}, "q", "2 <image> marks, the row 1 images"),
        ({"picture": None}, "picture", "no image and no video"),
        ({"picture": b"no picture"}, "q", "can't be read"),
    ],
)
def test_rows_whose_images_do_not_fit_are_bad(folder, change, key, reason):
    row = {"q": "?", "a": "x", "picture": picture("red"), **change}
    with pytest.raises(RowFault, match=reason) as fault:
        answers(folder, [row])
    assert fault.value.key == key
    check = FORMATTER.get("sft").check
    if reason != "can't be read":  # pictures are decoded when the row is read
        with pytest.raises(RowFault, match=reason):
            check(row, FormatConfig(prompt_type="plaintext", **FORMAT))
