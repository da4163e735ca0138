"""The lean scheduler plans the steps that vLLM's own plans, and ends requests as it does."""

import pkgutil
import random
from collections import defaultdict

import numpy as np
import pytest

pytest.importorskip("vllm")

import torch
from transformers import LlamaConfig
from vllm import SamplingParams
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import RequestOutputKind
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from trinity.engine.vllm.compat import own_scheduler
from trinity.engine.vllm.scheduler import make_scheduler

BLOCK = 16
EOS = 7


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    LlamaConfig(**shape, architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    return str(folder)


def scheduler(model, kind, is_async, *, num_blocks=500, num_seqs=16, longest=200):
    config = VllmConfig(
        model_config=ModelConfig(
            model, skip_tokenizer_init=True, dtype="float32", max_model_len=longest
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=True),
        device_config=DeviceConfig("cpu"),
        scheduler_config=SchedulerConfig(
            max_num_seqs=num_seqs,
            max_num_batched_tokens=max(64, num_seqs),
            max_model_len=longest,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=is_async,
        ),
    )
    config.scheduler_config.async_scheduling = is_async  # which vLLM takes back on a CPU
    config.cache_config.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=16, dtype=torch.float32)
    made = {
        "vllm_config": config,
        "kv_cache_config": KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        "structured_output_manager": StructuredOutputManager(config),
        "block_size": BLOCK,
        "log_stats": False,
    }
    return kind(**made)


def request(name, prompt, **params):
    given = {
        "output_kind": RequestOutputKind.FINAL_ONLY,
        "detokenize": False,
        "logprobs": 0,
        "max_tokens": 40,
        **params,
    }
    asked = SamplingParams(**given)
    asked.update_from_generation_config({}, EOS)
    return Request(name, prompt, asked, None, block_hasher=get_request_block_hasher(BLOCK, sha256))


class Core:
    """vLLM's core around a scheduler, with a model that draws by request and place."""

    def __init__(self, scheduler, is_async, token):
        self.scheduler, self._is_async, self._token = scheduler, is_async, token
        self._under_way, self._computed = [], {}
        self.tokens, self.logprobs = defaultdict(list), defaultdict(list)
        self.reasons, self.steps, self.num_messages = {}, [], 0

    def step(self):
        planned = self.scheduler.schedule()
        self._look_at(planned)
        if planned.total_num_scheduled_tokens:
            self._under_way.append((planned, self._result(planned)))
        if self._under_way and (
            len(self._under_way) > self._is_async or not planned.total_num_scheduled_tokens
        ):
            self._take(*self._under_way.pop(0))

    def run(self, limit=1000):
        while self.scheduler.has_requests() or self._under_way:
            self.step()
            limit -= 1
            assert limit, "no end"

    def abort(self, name):
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def _look_at(self, planned):
        for new in planned.scheduled_new_reqs:
            self._computed[new.req_id] = new.num_computed_tokens
        cached = planned.scheduled_cached_reqs
        columns = (cached.new_block_ids, cached.num_computed_tokens, cached.num_output_tokens)
        facts = {}
        for name, blocks, computed, outputs in zip(cached.req_ids, *columns, strict=True):
            self._computed[name] = computed
            facts[name] = (len(blocks[0]) if blocks else 0, computed, outputs)
        self.steps.append(
            (
                dict(planned.num_scheduled_tokens),
                facts,
                set(planned.finished_req_ids),
                {name: list(ids) for name, ids in cached.all_token_ids.items()},
            )
        )
        assert planned.total_num_scheduled_tokens == sum(planned.num_scheduled_tokens.values())

    def _result(self, planned):
        """A token for each request whose prompt is computed then."""
        names, sampled = list(planned.num_scheduled_tokens), []
        random.Random(len(self.steps)).shuffle(names)
        for name in names:
            request = self.scheduler.requests[name]
            end = self._computed[name] + planned.num_scheduled_tokens[name]
            place = end - request.num_prompt_tokens
            sampled.append([self._token(name, place)] if place >= 0 else [])
        logprobs = [
            [float(name[1:]) + (new[0] if new else 0) / 64] for name, new in zip(names, sampled)
        ]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=sampled,
            logprobs=LogprobsLists(
                np.array([new or [0] for new in sampled], dtype=np.int32),
                np.array(logprobs, dtype=np.float32),
                np.ones(len(names), dtype=np.int32),
            ),
            prompt_logprobs_dict={},
            pooler_output=[],
        )

    def _take(self, planned, result):
        for message in self.scheduler.update_from_output(planned, result).values():
            for output in message.outputs:
                self.num_messages += 1
                self.tokens[output.request_id] += output.new_token_ids
                if output.new_logprobs is not None:
                    self.logprobs[output.request_id] += output.new_logprobs.logprobs[:, 0].tolist()
                if output.finish_reason is not None:
                    self.reasons[output.request_id] = output.finish_reason


def token(name, place):
    return random.Random(f"{name} {place}").randrange(8, 30000)


def ends_early(name, place):
    return random.Random(f"{name} {place}").choice([EOS, 9, *range(10, 50)])


def both(model, is_async, draw, **settings):
    init_none_hash(sha256)
    own = Scheduler if not is_async else AsyncScheduler
    return [
        Core(scheduler(model, kind, is_async, **settings), is_async, draw)
        for kind in (own, make_scheduler)
    ]


def assert_same(theirs, ours):
    assert dict(ours.tokens) == dict(theirs.tokens)
    assert dict(ours.logprobs) == dict(theirs.logprobs)
    assert ours.reasons == theirs.reasons
    pools = [core.scheduler.kv_cache_manager.block_pool for core in (theirs, ours)]
    assert len({pool.get_num_free_blocks() for pool in pools}) == 1
    hashes = [set(pool.cached_block_hash_to_block._cache) for pool in pools]
    assert hashes[0] == hashes[1]


@pytest.mark.parametrize("is_async", [False, True])
def test_steps_are_those_of_vllm(model, is_async):
    cores = both(model, is_async, token)
    for core in cores:
        for n in range(12):
            prompt = list(range(5 + 7 * n))
            core.scheduler.add_request(request(f"r{n}", prompt, max_tokens=20 + 9 * n))
        core.run()
    theirs, ours = cores
    assert ours.scheduler._rows == {} and ours.scheduler._lumps._held == {}
    assert ours.steps == theirs.steps
    assert_same(theirs, ours)
    assert ours.num_messages < theirs.num_messages / 10


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("num_blocks", [500, 40])
def test_requests_come_and_go_at_any_time(model, is_async, num_blocks):
    """Ends of all kinds, requests that are followed, aborts, too few blocks for all."""
    cores = both(model, is_async, ends_early, num_blocks=num_blocks, num_seqs=8, longest=90)
    kinds = [
        {},
        {"stop_token_ids": [9]},
        {"min_tokens": 12},
        {"output_kind": RequestOutputKind.DELTA},
        {"logprobs": None},
        {"max_tokens": 1},
        {"max_tokens": 500},
    ]
    for core in cores:
        draw = random.Random(0)
        for n in range(40):
            prompt = [n % 3] * draw.randrange(1, 50)
            core.scheduler.add_request(request(f"r{n}", prompt, **kinds[n % len(kinds)]))
            for _ in range(draw.randrange(6)):
                core.step()
            if n % 11 == 10:
                core.abort(f"r{n - 3}")
        core.run()
    theirs, ours = cores
    assert len(ours.reasons) >= 36
    aborted = [f"r{n - 3}" for n in range(40) if n % 11 == 10]
    for core in cores:
        for name in aborted:
            for found in (core.tokens, core.logprobs, core.reasons):
                found.pop(name, None)
    if num_blocks == 500:
        assert_same(theirs, ours)
    else:  # who is put off for lack of blocks may differ
        assert dict(ours.tokens) == dict(theirs.tokens) and ours.reasons == theirs.reasons
    pool = ours.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == num_blocks - 1


def test_a_pause_stops_steady_requests_too(model):
    from vllm.v1.core.sched.interface import PauseState

    _, core = both(model, True, token)
    core.scheduler.add_request(request("r0", [1, 2, 3]))
    for _ in range(10):
        core.step()
    core.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    for _ in range(5):
        core.step()
    assert not any(step[0] for step in core.steps[-4:])
    core.scheduler.set_pause_state(PauseState.UNPAUSED)
    core.run()
    assert core.tokens["r0"] == [token("r0", place) for place in range(40)]


def test_versions_that_it_does_not_know_keep_their_own():
    path = own_scheduler("0.24.1")["scheduler_cls"]
    assert pkgutil.resolve_name(path) is make_scheduler
    assert own_scheduler("0.33.0") == {}
