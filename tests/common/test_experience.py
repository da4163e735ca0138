import pickle
import struct
import zlib

import msgpack
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save as save_tensors
from torch import Tensor

from trinity.common import wire
from trinity.common.experience import (
    EID,
    TENSOR_FIELDS,
    CustomField,
    Experience,
    deserialize_many,
    from_hf_datasets,
    group_by,
    serialize_many,
    split_dpo_experience_to_single_turn,
    to_hf_datasets,
)

INT32 = st.integers(-(2**31), 2**31 - 1)
PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
PLAIN_DICT = st.dictionaries(st.text(max_size=5), PLAIN, max_size=3)
MESSAGES = st.none() | st.lists(PLAIN_DICT, max_size=2)
TEXT = st.none() | st.text(max_size=20)
EIDS = st.builds(
    EID,
    batch=st.integers(0, 99) | st.text(max_size=5),
    task=st.integers(0, 99) | st.text(max_size=5),
    run=st.integers(0, 99),
    step=st.integers(0, 99),
)


def floats(size: int) -> st.SearchStrategy[Tensor | None]:
    values = st.lists(st.floats(width=32), min_size=size, max_size=size)
    return st.none() | values.map(lambda v: torch.tensor(v, dtype=torch.float32))


def numbers(elements: st.SearchStrategy, dtype: torch.dtype, size: int) -> st.SearchStrategy:
    values = st.lists(elements, min_size=size, max_size=size)
    return st.none() | values.map(lambda v: torch.tensor(v, dtype=dtype))


@st.composite
def experiences(draw: st.DrawFn) -> Experience:
    prompt, response = draw(st.integers(1, 4)), draw(st.integers(0, 4))
    tokens = draw(st.lists(INT32, min_size=prompt + response, max_size=prompt + response))
    is_pair = response == 0 and draw(st.booleans())
    answer = st.lists(INT32, max_size=3)
    return Experience(
        eid=draw(EIDS),
        tokens=tokens,
        prompt_length=prompt,
        reward=draw(st.none() | st.floats()),
        truncate_status=draw(st.sampled_from([None, "prompt_truncated", "response_truncated"])),
        info=draw(PLAIN_DICT),
        metrics=draw(st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False), max_size=2)),
        response_text=draw(TEXT),
        prompt_text=draw(TEXT),
        messages=draw(MESSAGES),
        tools=draw(MESSAGES),
        chosen=draw(answer) if is_pair else None,
        rejected=draw(answer) if is_pair else None,
        chosen_messages=draw(MESSAGES),
        rejected_messages=draw(MESSAGES),
        action_mask=draw(numbers(st.booleans(), torch.bool, response)),
        token_versions=draw(numbers(INT32, torch.int32, response)),
        multi_modal_inputs=draw(
            st.sampled_from(
                [None, {"pixel.values": torch.rand(2, 3).bfloat16(), "x": torch.eye(2)}]
            )
        ),
        routed_experts=draw(
            st.sampled_from([None, torch.arange(6).view(1, 3, 2).short()]).map(
                lambda routes: None if routes is None else routes.repeat(prompt + response, 1, 1)
            )
        ),
        custom_fields=draw(st.sampled_from([[], [CustomField("a", "b", torch.float64)]])),
        **{
            name: draw(floats(response))
            for name in (
                "logprobs",
                "token_level_reward",
                "advantages",
                "returns",
                "teacher_logprobs",
            )
        },
    )


def same(left: object, right: object) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        return left.flatten().view(torch.uint8).equal(right.flatten().view(torch.uint8))
    if isinstance(left, dict) and isinstance(right, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    return repr(left) == repr(right)  # NaN equals itself, True is not 1


def assert_same(before: Experience, after: Experience) -> None:
    assert vars(before).keys() == vars(after).keys()
    for name, value in vars(before).items():
        assert same(value, getattr(after, name)), (name, value, getattr(after, name))


@given(st.lists(experiences(), max_size=4))
@settings(max_examples=50, deadline=None)
def test_every_field_survives_the_bytes(batch: list[Experience]) -> None:
    restored = deserialize_many(serialize_many(batch))
    assert len(restored) == len(batch)
    for before, after in zip(batch, restored, strict=True):
        assert_same(before, after)


@given(st.lists(experiences(), max_size=4))
@settings(max_examples=50, deadline=None)
def test_every_field_survives_the_data_set(batch: list[Experience]) -> None:
    restored = from_hf_datasets(to_hf_datasets(batch))
    assert len(restored) == len(batch)
    for before, after in zip(batch, restored, strict=True):
        assert_same(before, after)


def test_rows_of_a_data_set_may_be_chosen_saved_and_joined(tmp_path) -> None:
    import datasets

    batch = [
        Experience(tokens=[1, 2, n], reward=n, info={"n": n, "list": [1, "a"]}) for n in range(4)
    ]
    made = to_hf_datasets(batch)
    assert made.column_names[0] == "tokens" and made[2]["tokens"] == [1, 2, 2]
    assert made["reward"][3] == 3.0
    made.add_column("note", ["a", "b", "c", "d"]).save_to_disk(tmp_path / "saved")
    loaded = datasets.load_from_disk(str(tmp_path / "saved"))
    found = from_hf_datasets(datasets.concatenate_datasets([loaded.select([3, 1]), made]))
    for before, after in zip([batch[3], batch[1], *batch], found, strict=True):
        assert_same(before, after)


def test_another_data_set_and_values_without_a_type_are_refused() -> None:
    import datasets

    with pytest.raises(ValueError, match="it has no column 'action_mask'"):
        from_hf_datasets(datasets.Dataset.from_dict({"tokens": [[1]]}))
    with pytest.raises(TypeError, match="is nothing that JSON knows"):
        to_hf_datasets([Experience(tokens=[1, 2], info={"x": torch.eye(2)})])


@given(experiences(), st.data())
@settings(max_examples=100, deadline=None)
def test_damaged_bytes_are_a_value_error(experience: Experience, data: st.DataObject) -> None:
    payload = bytearray(experience.serialize())
    damage = data.draw(st.sampled_from(["flip", "cut", "extend", "junk"]))
    place = data.draw(st.integers(0, len(payload) - 1))
    if damage == "flip":
        payload[place] ^= 1 << data.draw(st.integers(0, 7))
    elif damage == "cut":
        del payload[place:]
    elif damage == "extend":
        payload += data.draw(st.binary(min_size=1, max_size=9))
    else:
        payload = bytearray(data.draw(st.binary(max_size=40)))
    with pytest.raises(ValueError, match=r"experiences|format"):
        deserialize_many(bytes(payload))


def forged(header: object, blobs: dict[str, Tensor]) -> bytes:
    """Bytes with a right checksum around any content."""
    packed = msgpack.packb(header)
    body = packed + save_tensors(blobs)
    crc = zlib.crc32(body, zlib.crc32(struct.pack("<Q", len(packed))))
    return struct.pack("<4sBIQ", b"TRXP", wire.FORMAT_VERSION, crc, len(packed)) + body


def good_parts() -> tuple[dict, dict[str, Tensor]]:
    header = {
        "num_rows": 1,
        "lengths": {"tokens": [3], "logprobs": [2]},
        "values": {
            "eid": [[1, 2, 3, 4, "ab"]],
            "prompt_length": [1],
            "info": [{}],
            "metrics": [{}],
            "experience_type": ["single_turn"],
        },
    }
    blobs = {
        "column.tokens": torch.tensor([1, 2, 3], dtype=torch.int32),
        "column.logprobs": torch.zeros(2),
    }
    return header, blobs


def test_the_layout_is_the_documented_one() -> None:
    [experience] = deserialize_many(forged(*good_parts()))
    assert experience.tokens.tolist() == [1, 2, 3]
    assert experience.eid.uid == "1/2/3/4/ab"


@pytest.mark.parametrize(
    "change",
    [
        lambda h, b: h["values"].update(prompt_length=[5]),
        lambda h, b: h["values"].update(prompt_length=[0]),
        lambda h, b: h["values"].update(prompt_length=["1"]),
        lambda h, b: h["values"].update(prompt_length=[1, 1]),
        lambda h, b: h["values"].update(info=[3]),
        lambda h, b: h["values"].update(eid=[[1, 2]]),
        lambda h, b: h["values"].update(custom_fields=[[["a", "b", "load"]]]),
        lambda h, b: h["values"].update(custom_fields=[[["a", "b", "no_such_dtype"]]]),
        lambda h, b: h["values"].pop("eid"),
        lambda h, b: h["lengths"].update(tokens=[2]),
        lambda h, b: h["lengths"].update(tokens=[-1]),
        lambda h, b: h["lengths"].update(tokens=["x"]),
        lambda h, b: h["lengths"].update(logprobs=[1]),
        lambda h, b: h["lengths"].update(returns=[2]),
        lambda h, b: h["lengths"].pop("tokens"),
        lambda h, b: h.pop("values"),
        lambda h, b: h.update(num_rows=7),
        lambda h, b: h.update(num_rows=None),
        lambda h, b: b.update({"column.tokens": torch.zeros(3)}),
        lambda h, b: b.update({"column.tokens": torch.zeros(3, 1, dtype=torch.int32)}),
        lambda h, b: b.update({"named.x": torch.zeros(1)}),
        lambda h, b: b.update({"named.9.x": torch.zeros(1)}),
    ],
)
def test_made_up_bytes_are_a_value_error(change) -> None:
    header, blobs = good_parts()
    change(header, blobs)
    with pytest.raises(ValueError):
        deserialize_many(forged(header, blobs))


@pytest.mark.parametrize("header", [3, None, [], "x", {1: 2}])
def test_a_header_of_another_shape_is_a_value_error(header) -> None:
    with pytest.raises(ValueError):
        deserialize_many(forged(header, {}))


@pytest.mark.parametrize("dtype", wire._DTYPES, ids=str)
def test_the_body_is_what_safetensors_writes(dtype: torch.dtype) -> None:
    named = {
        "0.grid": torch.arange(6).reshape(3, 2).t().to(dtype),  # not contiguous
        "0.größe": torch.arange(3).to(dtype)[1:],
        "0.none": torch.empty(0, 4, dtype=dtype),
        "0.one": torch.tensor(1).to(dtype),
        "1.flag": torch.tensor([True]),
        "1.wide": torch.tensor([2.5], dtype=torch.float64),
    }
    columns = {"tokens": [torch.arange(3, dtype=torch.int32), None], "x": [torch.zeros(1)] * 2}
    payload = wire.pack(wire.Table(2, columns, named=named))
    joined = {"column.tokens": torch.arange(3, dtype=torch.int32), "column.x": torch.zeros(2)}
    blobs = {f"named.{name}": tensor.contiguous() for name, tensor in named.items()}
    assert payload.endswith(save_tensors(joined | blobs))


def test_bytes_of_another_version_name_it() -> None:
    payload = bytearray(Experience(tokens=[1, 2]).serialize())
    payload[4] = 1
    with pytest.raises(ValueError, match="format 1"):
        deserialize_many(bytes(payload))


def test_pickles_are_never_loaded() -> None:
    with pytest.raises(ValueError, match="TRXP"):
        deserialize_many(pickle.dumps([1]))


def test_one_row_of_many_is_an_error() -> None:
    payload = serialize_many([Experience(tokens=[1, 2])] * 2)
    with pytest.raises(ValueError, match="2 experiences"):
        Experience.deserialize(payload)


def test_views_of_a_large_tensor_are_stored_alone() -> None:
    large = torch.arange(100_000, dtype=torch.int32)
    payload = Experience(tokens=large[10:14]).serialize()
    assert len(payload) < 2_000
    assert Experience.deserialize(payload).tokens.tolist() == [10, 11, 12, 13]


def test_restored_rows_share_no_memory() -> None:
    first, second = deserialize_many(serialize_many([Experience(tokens=[1, 2])] * 2))
    first.tokens[0] = 9
    assert second.tokens.tolist() == [1, 2]
    assert first.tokens.untyped_storage().nbytes() == 8


def test_numpy_and_torch_numbers_become_plain_ones() -> None:
    experience = Experience(
        tokens=[1, 2], info={"a": np.int64(3), "b": torch.tensor(2.5), "c": (1, 2)}
    )
    assert Experience.deserialize(experience.serialize()).info == {"a": 3, "b": 2.5, "c": [1, 2]}


@pytest.mark.parametrize("value", [object(), {1, 2}, 2**70])
def test_what_cannot_be_stored_says_so(value: object) -> None:
    with pytest.raises(TypeError, match="can't be stored in an experience"):
        Experience(tokens=[1, 2], info={"x": value}).serialize()


def test_a_tensor_of_a_foreign_type_says_so() -> None:
    media = {"x": torch.zeros(1, dtype=torch.complex128)}
    with pytest.raises(TypeError, match=r"'named.0.x' is of torch.complex128"):
        Experience(tokens=[1, 2], multi_modal_inputs=media).serialize()


def test_half_a_character_survives() -> None:
    experience = Experience(tokens=[1, 2], response_text="\ud83d")
    assert Experience.deserialize(experience.serialize()).response_text == "\ud83d"


def test_defaults() -> None:
    experience = Experience(tokens=[1, 2, 3], logprobs=[-0.5, -0.25])
    assert experience.experience_type == "single_turn"
    assert experience.prompt_length == 1
    assert experience.response_length == 2
    assert experience.action_mask is not None and experience.action_mask.tolist() == [True, True]
    assert experience.tokens.dtype is torch.int32
    assert experience.logprobs is not None and experience.logprobs.dtype is torch.float32


def test_kinds() -> None:
    multi = Experience(tokens=[1, 2, 3], action_mask=[1, 0])
    pair = Experience(tokens=[1, 2], chosen=[3], rejected=[4, 5])
    cut = Experience(tokens=[1, 2], truncate_status="prompt_truncated")
    assert multi.experience_type == "multi_turn"
    assert (pair.experience_type, pair.prompt_length) == ("dpo", 2)
    assert cut.action_mask is not None and not cut.action_mask.any()


@pytest.mark.parametrize(
    "name", [n for n in TENSOR_FIELDS if n not in ("tokens", "chosen", "rejected")]
)
def test_a_length_that_does_not_fit_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} has 3 entries, but the response has 2"):
        Experience(tokens=[1, 2, 3], **{name: [1, 1, 1]})


@pytest.mark.parametrize("shape", [(2, 3, 2), (3, 3)])
def test_routes_must_be_those_of_all_tokens(shape) -> None:
    with pytest.raises(ValueError, match=r"routed_experts has shape .* must be \[3, layers, k\]"):
        Experience(tokens=[1, 2, 3], routed_experts=torch.zeros(shape, dtype=torch.int16))


def test_another_truncate_status_is_named() -> None:
    with pytest.raises(ValueError, match=r"is 'truncated'; it may be None, 'prompt_truncated'"):
        Experience(tokens=[1, 2], truncate_status="truncated")


@pytest.mark.parametrize("prompt_length", [0, -1, 4])
def test_prompt_length_must_fit(prompt_length: int) -> None:
    with pytest.raises(ValueError, match="prompt_length"):
        Experience(tokens=[1, 2, 3], prompt_length=prompt_length)


def test_tokens_must_be_a_row() -> None:
    with pytest.raises(ValueError, match="1-D"):
        Experience(tokens=torch.zeros(2, 2))


def test_dicts_of_the_caller_are_not_shared() -> None:
    info: dict[str, object] = {}
    first, second = (Experience(tokens=[1, 2], info=info) for _ in range(2))
    first.info["x"] = 1
    assert second.info == {} and info == {}


def test_group_by() -> None:
    ids = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    rows = [Experience(tokens=[1, 2], eid=EID("b", t, run=r, step=s)) for t, r, s in ids]
    assert {k: len(v) for k, v in group_by(rows, "task").items()} == {"b/0": 3, "b/1": 1}
    assert {k: len(v) for k, v in group_by(rows, "run").items()} == {
        "b/0/0": 2,
        "b/1/0": 1,
        "b/0/1": 1,
    }
    assert {k: len(v) for k, v in group_by(rows, "step").items()} == {
        "b/0/0": 2,
        "b/1/0": 1,
        "b/0/1": 1,
    }


def test_eid_may_be_a_dict() -> None:
    eid = EID(1, 2, 3, 4)
    assert Experience(tokens=[1, 2], eid=eid.to_dict()).eid == eid


def test_split_pairs() -> None:
    pair = Experience(tokens=[1, 2], chosen=[3], rejected=[4, 5], info={"a": 1})
    chosen, rejected = split_dpo_experience_to_single_turn([pair])
    assert chosen.tokens.tolist() == [1, 2, 3] and rejected.tokens.tolist() == [1, 2, 4, 5]
    assert chosen.prompt_length == rejected.prompt_length == 2
    assert chosen.info == {"a": 1, "pair_id": pair.eid.uid, "is_chosen": True}
    assert rejected.info["pair_id"] == pair.eid.uid and not rejected.info["is_chosen"]


def test_split_wants_pairs() -> None:
    with pytest.raises(ValueError, match="no chosen"):
        split_dpo_experience_to_single_turn([Experience(tokens=[1, 2])])


def test_to_dict_is_for_people() -> None:
    record = Experience(tokens=[1, 2], reward=0.5, response_text="b").to_dict()
    assert record["reward"] == 0.5 and record["response_text"] == "b"
    assert "prompt_text" not in record and "tokens" not in record
