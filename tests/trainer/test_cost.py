"""Numbers of a training step's cost, worked out by hand."""

import pytest
import torch

from trinity.common.config.shape import ModelShape, shape_of
from trinity.common.experience import EID, Experience
from trinity.trainer.batch import TrainBatch
from trinity.trainer.cost import StepCost
from trinity.trainer.figures import figures_of_process, figures_of_ranks, peak_flops_of

SHAPE = ModelShape(
    parameters=0, layers=2, hidden=4, mlp=8, kv=2, query=4, vocabulary=10
)  # a layer's matrices: 4 * (2*4 + 2*2 + 3*8) = 144 weights


def batch(*lengths: int, prompt: int = 2) -> TrainBatch:
    """Rows of different tasks, all response tokens trained on."""
    return TrainBatch.from_experiences(
        [
            Experience(
                eid=EID(batch=0, task=task, run=0),
                tokens=torch.arange(length),
                prompt_length=prompt,
                logprobs=torch.zeros(length - prompt),
                reward=0.0,
            )
            for task, length in enumerate(lengths)
        ]
    )


def test_flops_of_a_forward_pass():
    # 3 + 5 tokens in 2 layers: 2 * 8 * 144 for the matrices; (6 + 15) pairs * 4 * width 4
    layers = 2 * (2 * 8 * 144 + 4 * 21 * 4)
    assert SHAPE.forward_flops([3, 5], num_logits=0) == layers == 5280
    assert SHAPE.forward_flops([3, 5], num_logits=4) == layers + 2 * 4 * 10 * 4


def test_flops_count_active_experts_only():
    config = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 10}
    dense = shape_of({**config, "intermediate_size": 16})
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    mixture = shape_of({**config, **experts})
    assert dense is not None and mixture is not None
    assert mixture.parameters > dense.parameters
    assert mixture.forward_flops([7], 1) == dense.forward_flops([7], 1)


def test_utilisation_of_actor_and_critic():
    cost = StepCost(actor=SHAPE, critic=SHAPE, epochs=2)
    times = {"time/update_actor": 2.0, "time/old_log_prob": 0.5, "time/update_critic": 4.0}
    found = cost.metrics(batch(3, 5), times, {"peak_flops": 10_000.0})
    # 4 response tokens have logits; an update is 3 forward passes, twice
    assert found["perf/mfu/actor"] == pytest.approx(6 * 5600 / 2.0 / 10_000)
    assert found["perf/mfu/actor_infer"] == pytest.approx(5600 / 0.5 / 10_000)
    assert found["perf/mfu/critic"] == pytest.approx(6 * 5280 / 4.0 / 10_000)


def test_no_utilisation_without_a_known_peak_a_known_model_or_the_time():
    times = {"time/update_actor": 2.0}
    for cost, figures in (
        (StepCost(actor=SHAPE), {}),
        (StepCost(), {"peak_flops": 10_000.0}),
    ):
        assert not [name for name in cost.metrics(batch(3), times, figures) if "mfu" in name]
    both = StepCost(actor=SHAPE, critic=SHAPE).metrics(batch(3), times, {"peak_flops": 1.0})
    assert [name for name in both if "mfu" in name] == ["perf/mfu/actor"]


def test_time_a_token():
    times = {"time/update_actor": 2.0, "time/ref": 0.4, "time/train_step": 9.0}
    found = StepCost().metrics(batch(3, 5), times, {})
    timed = {name: value for name, value in found.items() if name.startswith("timing")}
    assert timed == {
        "timing_per_token_ms/update_actor": pytest.approx(250.0),
        "timing_per_token_ms/ref": pytest.approx(50.0),
    }


def test_tokens_of_each_rank_in_order_and_balanced():
    found = StepCost(num_parts=2).metrics(batch(10, 8, 4, 3), {}, {})
    sizes = {n.removeprefix("global_seqlen/"): v for n, v in found.items() if "seqlen" in n}
    assert sizes == {
        "min": 7.0,  # 4 + 3
        "max": 18.0,  # 10 + 8
        "minmax_diff": 11.0,
        "balanced_min": 12.0,  # 8 + 4
        "balanced_max": 13.0,  # 10 + 3
        "mean": 12.5,
    }


def test_memory_in_gb():
    figures = {
        "peak_gpu_memory_mb": 2048.0, "peak_reserved_gpu_memory_mb": 3072.0,
        "used_memory_mb": 512.0,
    }  # fmt: skip
    found = StepCost().metrics(batch(3), {}, figures)
    assert found["perf/max_memory_allocated_gb"] == 2.0
    assert found["perf/max_memory_reserved_gb"] == 3.0
    assert found["perf/cpu_memory_used_gb"] == 0.5
    assert "perf/max_memory_allocated_gb" not in StepCost().metrics(batch(3), {}, {})


def test_ranks_have_the_most_memory_of_any_and_the_flops_of_all():
    ranks = [{"peak_memory_mb": 3.0, "peak_flops": 5.0}, {"peak_memory_mb": 4.0, "peak_flops": 5.0}]
    assert figures_of_ranks(ranks) == {"peak_memory_mb": 4.0, "peak_flops": 10.0}


@pytest.mark.parametrize(
    ("gpu", "tflops"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.0),
        ("NVIDIA L4", 121.0),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("Some GPU of tomorrow", None),
    ],
)
def test_peak_of_known_gpus_only(gpu: str, tflops: float | None):
    assert peak_flops_of(gpu) == (None if tflops is None else tflops * 1e12)


def test_a_process_on_a_cpu_has_no_peak():
    figures = figures_of_process()
    assert figures["used_memory_mb"] > 0 and figures["peak_memory_mb"] > 0
    if not torch.cuda.is_initialized():
        assert "peak_flops" not in figures and "peak_gpu_memory_mb" not in figures
