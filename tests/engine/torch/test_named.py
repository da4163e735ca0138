"""Adapters in bfloat16, in which a CPU lays weights out in ways of its own."""

import torch
from peft import PeftModel

from tests.common.models.toy import config, model_folder
from tests.engine.test_conformance import make, plain_logprobs, prompt
from tests.engine.test_named_adapters import by_peft
from trinity.common.models import SamplingParams
from trinity.common.models.loading import load_causal_lm
from trinity.common.models.protocol import NamedAdapter
from trinity.synchronizer.channel import CheckpointChannel


async def mean_gap(engine, model, adapter):
    ids, params = prompt(40), SamplingParams(max_tokens=20, ignore_eos=True, seed=1)
    [sample] = await engine.sample(ids, params, adapter)
    wanted = plain_logprobs(model, [*ids, *sample.token_ids], len(ids), 1.0)
    return float((torch.tensor(sample.logprobs) - wanted).abs().mean())


async def test_an_update_in_bfloat16_reaches_what_is_below_an_adapter(tmp_path):
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 512,
        "head_dim": 64,
        "initializer_range": 0.05,
    }
    made = config(num_attention_heads=4, num_key_value_heads=2, **sizes)
    folder = model_folder(tmp_path / "model", model=made)
    base, _ = load_causal_lm(folder, "bfloat16", 0)
    base.save_pretrained(folder)
    one = by_peft(folder, tmp_path / "one", 1)
    engine = make(
        "torch", folder, None, dtype="bfloat16", named_adapters=(NamedAdapter("one", one),)
    )
    await engine.prepare()
    try:
        for parameter in base.parameters():
            parameter.data.mul_(1.3)
        ticket = CheckpointChannel(tmp_path).send(1, base.named_parameters())
        assert await engine.load_weights(ticket) == ticket.digest
        assert await mean_gap(engine, base, None) < 0.05
        assert await mean_gap(engine, PeftModel.from_pretrained(base, one).eval(), "one") < 0.1
    finally:
        await engine.close()
