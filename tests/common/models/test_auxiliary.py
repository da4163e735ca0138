"""Clients of auxiliary models: by name and position, made when they are asked for."""

import pytest

from tests.common.models.toy import tokenizer
from trinity.common.models import ModelSettings, ModelWrapper
from trinity.common.models.auxiliary import AuxiliaryClients
from trinity.common.models.fake import FakeEngine


def saying(text: str, name: str, enable_openai_api: bool = True) -> ModelWrapper:
    made = tokenizer("qwen25")
    engine = FakeEngine([[*made.encode(text), made.eos_token_id]], end_ids=[made.eos_token_id])
    settings = ModelSettings("/models/toy", name=name, enable_openai_api=enable_openai_api)
    return ModelWrapper(engine, settings, made)


async def test_clients_by_name_and_by_position() -> None:
    models = [saying("the sum", "judge"), saying("no", "teacher"), saying("no", "judge")]
    clients = AuxiliaryClients(models)
    assert set(clients) == {0, 1, 2, "judge", "teacher"}
    [judge] = clients["judge"]
    said = [{"role": "user", "content": "Hi"}]
    reply = await judge.chat.completions.create(model="judge", messages=said)
    assert reply.choices[0].message.content == "the sum"
    assert clients["judge"][0] is judge
    with pytest.raises(KeyError, match=r"has no 'critic'.*'judge'"):
        clients["critic"]


def test_who_asks_for_no_client_needs_none() -> None:
    assert len(AuxiliaryClients([saying("no", "mute", enable_openai_api=False)])) == 2
