"""A GRPO run from its command line to its files."""

import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.e2e.command import Command
from tests.e2e.conftest import Start
from tests.e2e.toy import Toy

ROLLOUT = [
    "rollout/accuracy/mean",
    "rollout/accuracy/max",
    "rollout/accuracy/min",
    "rollout/reward/mean",
    "rollout/time/run_execution/mean",
    "rollout/time/task_execution/mean",
    "rollout/model_version",
    "rollout/finished_task_count",
    "explorer/time/wait_explore_step",
    "experience_pipeline/experience_count",
    "experience_pipeline/filtered_count",
    "experience_pipeline/group_advantages/reward_mean/mean",
    "experience_pipeline/group_advantages/reward_std/mean",
    "experience_pipeline/time/total",
    "eval/unseen/accuracy/mean@1",
    "eval/unseen/accuracy/std@1",
    "eval/unseen/finished_task_count",
    "time/eval",
]
TRAINING = [
    "time/read_experience",
    "time/train_step",
    "time/sync_weight",
    "time/save_checkpoint",
    "time/step",
    "time/adv",
    "time/update_actor",
    "sample/task_count",
    "sample/model_version/mean",
    "sample/model_version_drift/mean",
    "actor/pg_loss",
    "actor/pg_clipfrac",
    "actor/ppo_kl",
    "actor/final_loss",
    "actor/grad_norm",
    "actor/lr",
    "critic/score/mean",
    "critic/advantages/max",
    "response_length/mean",
    "response_length/max",
    "response_length/min",
    "response_length/clip_ratio",
    "prompt_length/mean",
    "prompt_length/max",
    "prompt_length/min",
    "prompt_length/clip_ratio",
]


def scalars(job: Path, role: str) -> dict[str, list[float]]:
    events = EventAccumulator(str(job / "monitor" / "tensorboard" / role))
    events.Reload()
    return {tag: [e.value for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_summary_tells_what_the_run_amounted_to(finished: Command) -> None:
    summary = finished.summary
    assert (summary["status"], summary["error"]) == ("finished", None)
    assert 0 < summary["seconds"] < 600 and 100 < summary["peak_memory_mb"] < 20_000
    [stage] = summary["stages"]
    assert (stage["steps"], stage["algorithm"], stage["samples"]) == (4, "grpo", 4 * 16)
    assert len(stage["step_seconds"]) == len(stage["rewards"]) == len(stage["losses"]) == 4
    assert stage["tokens"] > 64 and stage["tokens_per_second"] > 0
    assert stage["samples_per_second"] == pytest.approx(64 / stage["seconds_training"])
    before, after = stage["eval_before"], stage["eval_after"]
    assert (
        before["eval/unseen/finished_task_count"] == 4 == after["eval/unseen/finished_task_count"]
    )
    assert before["eval/unseen/accuracy/mean@1"] != after["eval/unseen/accuracy/mean@1"]
    assert stage["reward_last_5"] > 0 and stage["failed_tasks"] == 0
    assert stage["huggingface"].endswith("global_step_4/actor/huggingface")


def test_the_first_importance_ratio_is_one(finished: Command) -> None:
    assert finished.summary["stages"][0]["max_ratio_deviation"] <= 1e-5


def test_the_screen_ends_with_the_table(finished: Command) -> None:
    assert "toy/job: finished" in finished.screen
    assert "Traceback" not in finished.screen
    assert finished.remaining() == []


@pytest.mark.parametrize(("role", "names"), [("explorer", ROLLOUT), ("trainer", TRAINING)])
def test_the_monitor_has_the_documented_metrics(
    finished: Command, role: str, names: list[str]
) -> None:
    found = scalars(finished.job, role)
    assert [name for name in names if name not in found] == []
    assert all(math.isfinite(value) for values in found.values() for value in values)


def test_each_part_has_its_log(finished: Command) -> None:
    logs = {path.name for path in (finished.job / "log").iterdir()}
    assert {"explorer.log", "trainer.log", "explorer_runner_0.log", "engine.log"} <= logs
    assert {"synchronizer.log", "checkpoint_monitor.log"} <= logs
    assert "explorer_experience_pipeline.log" in logs
    assert any(name.startswith("queue_") for name in logs)
    for part, metric in (("explorer", "rollout/reward/mean"), ("trainer", "actor/final_loss")):
        steps = [line for line in finished.log(part).splitlines() if "Step 4: " in line]
        assert any(metric in line for line in steps), part


def test_the_folder_is_laid_out_as_documented(finished: Command) -> None:
    job = finished.job
    for step in (2, 4):
        actor = job / f"global_step_{step}" / "actor"
        names = {path.name for path in actor.iterdir()}
        assert names == {
            "huggingface",
            "fsdp_config.json",
            *(f"{kind}_world_size_1_rank_0.pt" for kind in ("model", "optim", "extra_state")),
        }
        found = {path.name for path in (actor / "huggingface").iterdir()}
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= found
    for name in ("latest_checkpointed_iteration.txt", "latest_state_dict_iteration.txt"):
        assert (job / name).read_text().strip() == "4"
    for name in ("explorer_meta.json", "trainer_meta.json", "config.yaml"):
        assert (job / name).is_file()
    assert (job / "buffer" / "explorer_output.db").is_file()


def test_the_model_loads_with_transformers(finished: Command, toy: Toy) -> None:
    folder = finished.job / "global_step_4" / "actor" / "huggingface"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "sort 312"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|user|>sort 312<|end|><|assistant|>"
    model = AutoModelForCausalLM.from_pretrained(folder)
    out = model.generate(**tokenizer(text, return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert out.shape[1] > 4


def test_in_bf16_the_first_ratio_stays_near_one(toy: Toy, start: Start, tmp_path: Path) -> None:
    config = toy.config(
        tmp_path,
        explorer__name="scout",
        trainer__name="coach",
        buffer__total_steps=2,
        trainer__dtype="bfloat16",
        explorer__rollout_model__dtype="bfloat16",
    )
    run = start(config, env={"RAY_DEDUP_LOGS": "0"}).succeed()
    assert run.summary["stages"][0]["max_ratio_deviation"] <= 0.05
    assert "scout: INFO" in run.screen and "coach: INFO" in run.screen
    logs = {path.name for path in (run.job / "log").iterdir()}
    assert {"scout.log", "scout_runner_0.log", "coach.log"} <= logs
    assert not [name for name in logs if name.startswith(("explorer", "trainer"))]
