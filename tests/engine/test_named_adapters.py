"""Adapters that requests name, made by PEFT: each engine computes what PEFT does.

`make test-vllm` runs it in an environment that has vLLM.
"""

import asyncio
import shutil

import httpx
import openai
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model

from tests.engine.test_conformance import (
    ENGINES,
    TOLERANCE,
    make,
    model_in,
    plain_logprobs,
    prompt,
)
from tests.engine.torch.standstill import Standstill
from trinity.common.models import ModelSettings, SamplingParams
from trinity.common.models.adapters import AdapterSettings, adapter_parameters, add_adapter_inplace
from trinity.common.models.loading import load_causal_lm
from trinity.common.models.protocol import NamedAdapter
from trinity.engine.served import ServedEngine
from trinity.synchronizer.channel import CheckpointChannel

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.parametrize("kind", ENGINES[:2], scope="module", indirect=True),
]
TRAINED = AdapterSettings(name="mine", rank=4, alpha=8)


@pytest.fixture(scope="module")
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory, kind):
    path = model_in(tmp_path_factory.mktemp(kind))
    load_causal_lm(path, "float32", 0)[0].save_pretrained(path)
    return path


def by_peft(folder, path, seed, **settings):
    """An adapter of random values as PEFT writes it."""
    torch.manual_seed(seed)
    given = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    base, _ = load_causal_lm(folder, "float32", 0)
    model = get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", **(given | settings)))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(path)
    return str(path)


def peft_model(folder, path):
    """Read by PEFT itself."""
    return PeftModel.from_pretrained(load_causal_lm(folder, "float32", 0)[0], path).eval()


async def gap(engine, model, adapter):
    """Largest difference of logprobs, sampled and scored, from those of a direct forward pass."""
    ids = prompt(40)
    params = SamplingParams(n=2, max_tokens=20, ignore_eos=True, seed=1)
    samples = await engine.sample(ids, params, adapter)
    worst = 0.0
    for sample in samples:
        whole = [*ids, *sample.token_ids]
        wanted = plain_logprobs(model, whole, len(ids), 1.0)
        scored = torch.tensor(await engine.logprobs(whole, 1.0, adapter))[len(ids) - 1 :]
        for found in (torch.tensor(sample.logprobs), scored):
            worst = max(worst, float((found - wanted).abs().max()))
    return worst


async def test_named_adapters_beside_the_trained_one(kind, folder, tmp_path):
    one = by_peft(folder, tmp_path / "one", 1)
    two = by_peft(folder, tmp_path / "two", 2, r=16, target_modules="all-linear")
    models = {name: peft_model(folder, tmp_path / name) for name in ("one", "two")}
    engine = make(
        kind, folder, None, adapter=TRAINED, named_adapters=(NamedAdapter("one", one),),
        loads_adapters=True,
    )  # fmt: skip
    await engine.prepare()
    try:
        assert await gap(engine, models["one"], "one") < TOLERANCE[kind]
        assert await gap(engine, models["one"], None) > 0.05
        with pytest.raises(ValueError, match="no adapter 'two'"):
            await engine.sample([5], SamplingParams(max_tokens=1), "two")
        await engine.load_adapter(NamedAdapter("two", two, "toy"))
        assert [a.name for a in await engine.adapters()] == ["one", "two"]
        gaps = [gap(engine, models[name], name) for name in ("one", "two", "one", "two")]
        assert max(await asyncio.gather(*gaps)) < TOLERANCE[kind]
        # Updates of the trained adapter are its own.
        trained, _ = load_causal_lm(folder, "float32", 0)
        add_adapter_inplace(trained, TRAINED)
        for parameter in adapter_parameters(trained).values():
            torch.nn.init.normal_(parameter, std=0.2)
        ticket = CheckpointChannel(tmp_path).send(3, adapter_parameters(trained).items())
        assert await engine.load_weights(ticket) == ticket.digest
        assert await gap(engine, trained, None) < TOLERANCE[kind]
        assert await gap(engine, trained, "mine") < TOLERANCE[kind]
        assert await gap(engine, models["two"], "two") < TOLERANCE[kind]
        # Another adapter under a name that was there: nothing of the first is left.
        await engine.unload_adapter("one")
        with pytest.raises(ValueError, match="no adapter 'one'"):
            await engine.sample([5], SamplingParams(max_tokens=1), "one")
        with pytest.raises(LookupError):
            await engine.unload_adapter("one")
        await engine.load_adapter(NamedAdapter("one", two))
        assert await gap(engine, models["two"], "one") < TOLERANCE[kind]
        dora = by_peft(folder, tmp_path / "dora", 4, use_dora=True)
        head = by_peft(folder, tmp_path / "head", 5, target_modules=["q_proj", "lm_head"])
        for name, path, message in (
            ("four", dora, "use_dora: True"),
            ("five", head, "output layer"),
            ("one", one, "loaded already"),
            ("mine", one, "taken by the adapter that is trained"),
            ("three", str(tmp_path / "none"), "'three' can't be loaded"),
        ):
            with pytest.raises(ValueError, match=message):
                await engine.load_adapter(NamedAdapter(name, path))
        assert [a.name for a in await engine.adapters()] == ["two", "one"]
    finally:
        await engine.close()


async def test_updates_of_the_whole_model_reach_what_is_below_an_adapter(kind, folder, tmp_path):
    one = by_peft(folder, tmp_path / "one", 1)
    engine = make(kind, folder, None, named_adapters=(NamedAdapter("one", one),))
    await engine.prepare()
    try:
        base, _ = load_causal_lm(folder, "float32", 5)
        for parameter in base.parameters():
            parameter.data.add_(0.01)
        ticket = CheckpointChannel(tmp_path).send(1, base.named_parameters())
        assert await engine.load_weights(ticket) == ticket.digest
        assert await gap(engine, base, None) < TOLERANCE[kind]
        above = PeftModel.from_pretrained(base, one).eval()
        assert await gap(engine, above, "one") < TOLERANCE[kind]
        [found] = await engine.sample([5], SamplingParams(max_tokens=1, seed=0), "one")
        assert found.versions == [1]
    finally:
        await engine.close()


async def test_the_files_of_an_adapter_may_go_while_it_is_served(kind, folder, tmp_path):
    """vLLM's workers read them again once others pushed an adapter out, or it was unloaded."""
    few = {"lora_kwargs": {"max_loras": 1, "max_cpu_loras": 1}} if kind == "vllm" else {}
    engine = make(kind, folder, None, loads_adapters=True, **few)
    await engine.prepare()
    try:
        models = {}
        for seed, name in enumerate(("one", "two")):
            path = by_peft(folder, tmp_path / name, seed)
            models[name] = peft_model(folder, path)
            await engine.load_adapter(NamedAdapter(name, path))
            shutil.rmtree(path)
        for name in ("one", "two", "one"):
            assert await gap(engine, models[name], name) < TOLERANCE[kind]
        long = SamplingParams(n=2, max_tokens=600, ignore_eos=True, seed=1)
        standstill = Standstill(engine) if kind == "torch" else None
        running = asyncio.ensure_future(engine.sample(prompt(20), long, "one"))
        while not (running.done() or (await engine.health())["running"]):
            await asyncio.sleep(0.01)
        if standstill:
            await standstill.begun()
        unloading = asyncio.ensure_future(engine.unload_adapter("one"))
        if standstill:
            await standstill.asked()
            standstill.end()
        await unloading
        if kind == "vllm":
            assert running.done() and [len(s.token_ids) for s in await running] == [600, 600]
        else:
            with pytest.raises(ValueError, match="'one' was unloaded"):
                await asyncio.wait_for(running, 200)
        assert await gap(engine, models["two"], "two") < TOLERANCE[kind]
    finally:
        await engine.close()


async def test_clients_of_the_api_name_load_and_unload_adapters(kind, folder, tmp_path):
    paths = {n: by_peft(folder, tmp_path / n, i) for i, n in enumerate(("one", "two"), 1)}
    settings = ModelSettings(
        folder, name="toy", max_model_len=1024, has_named_adapters=True, loads_adapters=True
    )
    engine = ServedEngine(
        lambda: make(
            kind, folder, None, named_adapters=(NamedAdapter("one", paths["one"], "toy"),),
            loads_adapters=True,
        ),
        settings,
    )  # fmt: skip
    await engine.prepare()
    try:
        address, key = await engine.api()
        client = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)

        async def served():
            return [(card.id, card.parent) async for card in client.models.list()]

        async def post(what, **body):
            headers = {"Authorization": f"Bearer {key}"}
            async with httpx.AsyncClient(timeout=120, headers=headers) as http:
                return await http.post(f"{address}/v1/{what}_lora_adapter", json=body)

        async def replied(name):
            """Gap of a completion's logprobs to the adapter's own."""
            ids = prompt(30)
            found = await client.completions.create(
                model=name, prompt=ids, max_tokens=10, logprobs=1, seed=2,
                extra_body={"ignore_eos": True, "return_token_ids": True},
            )  # fmt: skip
            assert found.model == name
            [choice] = found.choices
            model = peft_model(folder, paths[name])
            wanted = plain_logprobs(model, [*ids, *choice.token_ids], len(ids), 1.0)
            return float((torch.tensor(choice.logprobs.token_logprobs) - wanted).abs().max())

        assert await served() == [("toy", None), ("one", "toy")]
        assert await replied("one") < TOLERANCE[kind]
        with pytest.raises(
            openai.NotFoundError, match="'two' is not served here, but 'toy', 'one'"
        ):
            await replied("two")
        answer = await post("load", lora_name="two", lora_path=paths["two"])
        assert answer.status_code == 200 and "'two' added" in answer.text
        assert await served() == [("toy", None), ("one", "toy"), ("two", "toy")]
        # From two loops at a time: the API's and this one's.
        asked = [
            replied("two"),
            replied("one"),
            gap(engine, peft_model(folder, paths["two"]), "two"),
        ]
        assert max(await asyncio.gather(*asked)) < TOLERANCE[kind]
        again = await post("load", lora_name="two", lora_path=paths["two"])
        assert again.status_code == 400 and "load_inplace" in again.text
        wrong = await post("load", lora_name="four", lora_path=str(tmp_path))
        assert wrong.status_code == 400 and "adapter_config.json" in wrong.text
        assert (await post("load", lora_name="toy", lora_path=paths["one"])).status_code == 400
        assert (await post("unload", lora_name="one")).status_code == 200
        assert (await post("unload", lora_name="one")).status_code == 404
        assert await served() == [("toy", None), ("two", "toy")]
    finally:
        await engine.close()
