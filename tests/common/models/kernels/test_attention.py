"""The compiled attention against softmax in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trinity.common.models.kernels.attention import (
    AttentionTasks,
    KeyLayout,
    attention,
    attention_backward,
    fits,
)

pytestmark = pytest.mark.skipif(
    not fits(*[torch.zeros(1, 1, 16)] * 3), reason="no C++ compiler is installed"
)


def tree_tasks(prompts, answers):
    """Prompts in a row, each followed by its answers; tasks, and for each token what it sees."""
    tasks = {name: [] for name in ("first", "count", "place", "ends", "spans", "lengths", "trees")}
    seen, start = [], 0

    def add(first, count, path):
        tasks["first"].append(first)
        tasks["count"].append(count)
        tasks["place"].append(sum(length for _, length in path[:-1]))
        tasks["spans"] += [s for s, _ in path]
        tasks["lengths"] += [length for _, length in path]
        tasks["ends"].append(len(tasks["spans"]))
        before = [t for s, length in path[:-1] for t in range(s, s + length)]
        seen.extend(before + list(range(first, first + i + 1)) for i in range(count))

    for prompt, own in zip(prompts, answers, strict=True):
        root = (start, prompt)
        add(start, prompt, [root])
        start += prompt
        for length in own:
            add(start, length, [root, (start, length)])
            start += length
        tasks["trees"].append(len(tasks["first"]))
    return AttentionTasks(*(torch.tensor(values) for values in tasks.values())), seen


def plain(query, key, value, seen, scale, window):
    repeats = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
    out = []
    for token, places in enumerate(seen):
        places = places[-window:] if window else places
        scores = torch.einsum("hd,lhd->hl", query[token], key[places]) * scale
        out.append(torch.einsum("hl,lhd->hd", scores.softmax(-1), value[places]))
    return torch.stack(out)


@settings(max_examples=25, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    answers=st.lists(st.integers(1, 40), max_size=3),
    heads=st.sampled_from([(1, 1), (6, 2), (9, 3), (8, 8)]),
    size=st.sampled_from([16, 32, 64, 96, 128]),
    window=st.sampled_from([None, 1, 7]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_values_and_gradients(prompts, answers, heads, size, window, dtype):
    torch.manual_seed(len(prompts) + size)
    tasks, seen = tree_tasks(prompts, [answers] * len(prompts))
    query, grad = (torch.randn(len(seen), heads[0], size).to(dtype) for _ in range(2))
    key, value = (torch.randn(len(seen), heads[1], size).to(dtype) for _ in range(2))
    scale = size**-0.5
    wide = [t.double().requires_grad_() for t in (query, key, value)]
    wanted = plain(*wide, seen, scale, window)
    wanted.backward(grad.double())
    layout = KeyLayout.of_tokens(key)
    out, norm = attention(query, key, value, tasks, layout, scale, window)
    found = attention_backward(grad, query, key, value, norm, tasks, scale, window)
    gap = 1e-5 if dtype == torch.float32 else 2e-2
    for ours, theirs in zip((out, *found), (wanted, *(t.grad for t in wide)), strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=gap, rtol=gap)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_query_has_the_same_bits_wherever_its_keys_lie(dtype):
    """Sampled token by token over rows, or trained as one task over a prompt and an answer."""
    torch.manual_seed(0)
    prompt, answer, heads, kv_heads, size = 37, 50, 6, 2, 64
    tasks, seen = tree_tasks([prompt], [[answer]])
    query = torch.randn(len(seen), heads, size).to(dtype)
    key, value = (torch.randn(len(seen), kv_heads, size).to(dtype) for _ in range(2))
    trained, _ = attention(query, key, value, tasks, KeyLayout.of_tokens(key), 0.125)
    rows = [t.transpose(0, 1)[None].repeat(3, 1, 1, 1) for t in (key, value)]
    rows = [torch.nn.functional.pad(t, (0, 0, 0, 20), value=9.0) for t in rows]
    one = torch.ones(1, dtype=torch.long)
    for token in (0, prompt - 1, prompt, len(seen) - 1):
        step = AttentionTasks(0 * one, one, token * one, one, 2 * one, (token + 1) * one)
        layout = KeyLayout.of_rows(rows[0])
        sampled, _ = attention(query[token : token + 1].clone(), *rows, step, layout, 0.125)
        assert torch.equal(sampled[0], trained[token])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("size", "window"), [(16, None), (64, 5), (128, 60)])
def test_samples_that_share_a_prompt_and_store_their_keys_have_the_same_bits(dtype, size, window):
    torch.manual_seed(0)
    prompts, counts, heads, kv_heads, length = [30, 30, 30, 7, 7], [1, 4, 20, 1, 17], 6, 2, 64
    query = torch.randn(5, heads, size).to(dtype)
    fresh = [torch.randn(5, kv_heads, size).to(dtype) for _ in range(2)]
    rows = [torch.randn(5, kv_heads, length, size).to(dtype) for _ in range(2)]
    for row, other in ((1, 0), (2, 0), (4, 3)):
        for store in rows:
            store[row, :, : prompts[row]] = store[other, :, : prompts[row]]
    layout, one = KeyLayout.of_rows(rows[0]), torch.ones(5, dtype=torch.long)
    end = torch.tensor(prompts) + torch.tensor(counts)
    places = torch.arange(5)
    whole = [store.clone() for store in rows]
    for store, new in zip(whole, fresh, strict=True):
        store[places, :, end - 1] = new
    alone = AttentionTasks(places, one, end - 1, places + 1, places, end)
    wanted, norm = attention(query, *whole, alone, layout, 0.2, window)
    shared = AttentionTasks(
        places,
        one,
        end - 1,
        2 * places + 2,
        span_first=torch.tensor([0, 0, 0, 1, 0, 2, 3, 3, 3, 4]),
        span_length=torch.stack([torch.tensor(prompts), torch.tensor(counts)], 1).flatten(),
        span_skip=torch.stack([0 * one, torch.tensor(prompts)], 1).flatten(),
    )
    found = attention(query, *rows, shared, layout, 0.2, window, fresh_NGD=tuple(fresh))
    assert torch.equal(found[0], wanted) and torch.equal(found[1], norm)
    assert all(torch.equal(a, b) for a, b in zip(rows, whole, strict=True))


def test_what_does_not_fit():
    query, key = torch.zeros(2, 2, 16), torch.zeros(2, 1, 16)
    assert fits(query, key, key)
    assert not fits(query.double(), key.double(), key.double())
    assert not fits(query.transpose(0, 1), key, key)
    odd = torch.zeros(2, 2, 20)
    assert not fits(odd, odd, odd)
    assert not fits(query, key, torch.zeros(2, 1, 32))
