"""Faults on GPUs: too little memory, an engine or a peer that dies, and what is left behind."""

import asyncio
import json
import multiprocessing
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from tests.e2e.command import trinity_run
from tests.e2e.test_grpo_run import scalars
from tests.e2e.test_killed_parts import SLOW_REWARD
from tests.e2e.toy import Toy
from tests.synchronizer.test_nccl import fetch, is_same, weights
from tests.trainer.toy import groups
from trinity.synchronizer.nccl import NCCLChannel, NCCLReceiver, ask
from trinity.trainer.backends.torch.engine import TorchTrainEngine
from trinity.trainer.backends.torch.microbatch import MicroBatchRule
from trinity.trainer.backends.torch.out_of_memory import GPUOutOfMemoryError
from trinity.trainer.backends.torch.settings import TorchEngineSettings
from trinity.trainer.batch import TrainBatch
from trinity.trainer.loss import Objective

GIB = 2**30
PPO = Objective.from_names("ppo", {"clip_range": 0.2})
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two GPUs are not here")
VLLM = {
    "engine_type": "vllm",
    "dtype": "bfloat16",
    "enforce_eager": True,
    "enable_openai_api": False,
    "gpu_memory_utilization": 0.1,
    "extra_engine_args": {"kv_cache_memory_bytes": 2**28},
}


@pytest.fixture
def toy(tmp_path):
    """With heads as wide as kernels want them."""
    (tmp_path / "toy").mkdir()
    toy = Toy(tmp_path / "toy").write()
    path = toy.model / "config.json"
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
    path.write_text(json.dumps(json.loads(path.read_text()) | sizes))
    return toy


def used_gib(gpu: int = 0) -> float:
    free, total = torch.cuda.mem_get_info(gpu)
    return (total - free) / GIB


def wide_model(folder: Path) -> str:
    """Shallow, with activations that count."""
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=97, hidden_size=2048, intermediate_size=8192, num_hidden_layers=4,
        num_attention_heads=16, num_key_value_heads=16, max_position_embeddings=4096,
    ).save_pretrained(folder)  # fmt: skip
    return str(folder)


def in_a_process(work, *args):
    """What ``work`` gives in a process of its own, so that no memory of the GPU is kept here."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_tell, args=(theirs, work, args))
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(150) else "it did not end"
    except EOFError:
        return "it died"
    finally:
        process.kill()
        process.join()


def _tell(pipe, work, args):
    pipe.send(asyncio.run(work(*args)))
    os._exit(0)


async def one_step(folder, max_tokens, max_gib):
    """The message of an error of one step with so much memory; "" if all went well."""
    _, total = torch.cuda.mem_get_info()
    torch.cuda.set_per_process_memory_fraction(max_gib * GIB / total)
    batch = TrainBatch.from_experiences(groups(16, 4, prompt=100, response=900))
    rule = MicroBatchRule(max_tokens=max_tokens)
    engine = TorchTrainEngine(TorchEngineSettings(folder, device="cuda", micro_batches=rule))
    await engine.prepare()
    try:
        for _ in range(2):
            await engine.forward_backward(batch, PPO)
            await engine.optim_step()
    except GPUOutOfMemoryError as error:
        return str(error)
    return ""


def test_a_pass_that_is_too_large_names_the_tokens_that_fit(tmp_path):
    folder = wide_model(tmp_path / "model")
    text = in_a_process(one_step, folder, 65536, 12)
    assert "Out of GPU memory in the training pass of the actor" in text
    found = re.search(r"Lower trainer.max_token_len_per_gpu from 65536 to (\d+)", text)
    assert found, text
    assert in_a_process(one_step, folder, int(found[1]), 12) == "", text


async def engine_beside_others(folder):
    """The message of the error of an engine that wants all of the GPU."""
    from trinity.engine.vllm.engine import VLLMEngine
    from trinity.engine.vllm.memory import EngineMemoryError
    from trinity.engine.vllm.settings import VLLMEngineSettings

    held = torch.empty(8 * GIB, dtype=torch.uint8, device="cuda")
    engine = VLLMEngine(VLLMEngineSettings(folder, enforce_eager=True, gpu_memory_utilization=0.97))
    try:
        await engine.prepare()
    except EngineMemoryError as error:
        return str(error)
    finally:
        await engine.close()
        del held
    return ""


def test_an_engine_beside_others_names_the_share_that_is_free(toy):
    start = time.monotonic()
    text = in_a_process(engine_beside_others, str(toy.model))
    found = re.search(r"Lower it to (0\.\d+), or end what else runs", text)
    assert found and 0 <= float(found[1]) < 0.95, text
    assert time.monotonic() - start < 60


def _peer(meeting, pipe):
    """An engine's worker on the second GPU that takes weights once, and dies in the next."""
    torch.cuda.set_device(1)
    receiver = NCCLReceiver(0, 1, torch.device("cuda", 1))
    request = ask(meeting, "mortal", 1)
    found = {}
    take = lambda named: found.update({n: t.clone() for n, t in named})  # noqa: E731
    receiver.receive(meeting, request, "mortal", take)
    torch.cuda.synchronize()
    pipe.send({name: tensor.float().tolist() for name, tensor in found.items()})
    ask(meeting, "mortal", 1)
    os.kill(os.getpid(), signal.SIGKILL)


@TWO_GPUS
def test_a_peer_that_dies_is_given_up_on_and_the_next_one_is_served():
    torch.cuda.set_device(0)
    sent = {name: tensor.cuda() for name, tensor in weights(1).items()}
    channel = NCCLChannel(2, is_live=True, timeout_s=10, bucket_bytes=1000)
    meeting = channel.send(1, sent.items()).payload
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    peer = multiprocessing.get_context("spawn").Process(target=_peer, args=(meeting, theirs))
    peer.start()
    assert ours.poll(90), "the first transfer did not end"
    assert ours.recv() == {name: tensor.float().tolist() for name, tensor in weights(1).items()}
    peer.join(60)
    start = time.monotonic()
    receiver = NCCLReceiver(0, 1, torch.device("cuda", 1))
    [(delivery, found)] = fetch(replace(meeting, timeout_s=60), [receiver], "alive")
    assert time.monotonic() - start < 45
    assert delivery.version == 1
    assert is_same({name: tensor.cpu() for name, tensor in found.items()}, weights(1))
    channel.close()


def _nccl_config(toy, folder, **changes):
    return toy.config(
        folder,
        cluster__gpu_per_node=2,
        explorer__rollout_model=VLLM,
        trainer__dtype="bfloat16",
        trainer__use_torch_compile=False,
        algorithm__optimizer={"lr": 1e-3, "lr_scheduler_type": "constant"},
        synchronizer={
            "sync_method": "nccl",
            "sync_interval": 1,
            "sync_timeout": 120,
            "delta": True,
        },
        **changes,
    )


def _kill_the_engine_and_see_it_back(run) -> None:
    """To the end of the run, after which nothing of the engine is left."""
    actor = run.pid_of("engine")
    inner = [child.pid for child in psutil.Process(actor).children(recursive=True)]
    os.kill(actor, signal.SIGKILL)
    run.wait_for(lambda: "Engine 0 died" in run.log("explorer"), "the death", timeout_s=20)
    run.succeed(400)
    assert "Engine 0 is ready again" in run.log("explorer")
    assert run.remaining(grace_s=10) == []
    assert not any(psutil.pid_exists(pid) for pid in inner)


def _assert_sampled_by_the_weights_of_every_step(run, num_steps) -> None:
    assert scalars(run.job, "explorer")["rollout/model_version"] == list(range(num_steps))
    kept = scalars(run.job, "trainer")
    assert kept["sample/model_version/mean"] == list(range(num_steps))
    assert max(map(abs, kept["actor/ppo_kl"])) < 0.02, kept["actor/ppo_kl"]


@TWO_GPUS
def test_a_killed_engine_comes_back_with_the_right_weights(toy, tmp_path):
    config = _nccl_config(
        toy, tmp_path, buffer__total_steps=12, buffer__explorer_input__taskset=SLOW_REWARD
    )
    with trinity_run(config, plugins=toy.plugins, env=_kept_environment()) as run:
        run.wait_for(lambda: "Step 3:" in run.log("explorer"), "step 3", 400)
        _kill_the_engine_and_see_it_back(run)
    _assert_sampled_by_the_weights_of_every_step(run, 12)


def test_a_killed_engine_that_shares_its_gpu_comes_back_with_the_right_weights(toy, tmp_path):
    config = toy.config(
        tmp_path,
        mode="colocate",
        buffer__total_steps=6,
        buffer__explorer_input__taskset=SLOW_REWARD,
        cluster__gpu_per_node=1,
        explorer__rollout_model=VLLM,
        trainer__dtype="bfloat16",
        trainer__use_torch_compile=False,
        algorithm__optimizer={"lr": 1e-3, "lr_scheduler_type": "constant"},
    )
    with trinity_run(config, plugins=toy.plugins, env=_kept_environment()) as run:
        run.wait_for(lambda: "Weights of version 3" in run.log("explorer"), "version 3", 400)
        _kill_the_engine_and_see_it_back(run)
    _assert_sampled_by_the_weights_of_every_step(run, 6)


@TWO_GPUS
def test_engines_and_trainer_take_turns_on_two_gpus(toy, tmp_path):
    config = toy.config(
        tmp_path,
        mode="colocate",
        cluster__gpu_per_node=2,
        explorer__rollout_model={**VLLM, "engine_num": 2},
        trainer__dtype="bfloat16",
        algorithm__optimizer={"lr": 1e-3, "lr_scheduler_type": "constant"},
    )
    with trinity_run(config, plugins=toy.plugins, env=_kept_environment()) as run:
        run.succeed()
        assert run.remaining(grace_s=10) == []
    assert scalars(run.job, "explorer")["rollout/model_version"] == [0, 1, 2]
    kept = scalars(run.job, "trainer")
    assert max(map(abs, kept["actor/ppo_kl"])) < 0.02, kept["actor/ppo_kl"]
    assert min(kept["actor/grad_norm"]) > 0


@TWO_GPUS
def test_nothing_is_left_of_a_run_that_fails(toy, tmp_path):
    before = [used_gib(gpu) for gpu in range(2)]
    broken = {
        "default_reward_fn_type": "toy_reward",
        "reward_fn_args": {"raises_on": "sort", "on_error": "raise"},
    }
    config = _nccl_config(toy, tmp_path, buffer__explorer_input__taskset=broken)
    with trinity_run(config, plugins=toy.plugins, env=_kept_environment()) as run:
        assert run.wait() == 1
        assert "this prompt has no score" in run.last_lines
        assert run.remaining(grace_s=10) == []
    deadline = time.monotonic() + 10
    while any(used_gib(gpu) > before[gpu] + 0.3 for gpu in range(2)):
        assert time.monotonic() < deadline, "memory of a GPU is not free again"
        time.sleep(0.2)


def _kept_environment() -> dict[str, str]:
    """Settings of vLLM and Ray that this machine needs."""
    return {k: v for k, v in os.environ.items() if k.startswith(("VLLM_", "RAY_AUTH"))}
