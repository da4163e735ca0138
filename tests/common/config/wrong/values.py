"""Values of another type or size than their key takes."""

from tests.common.config.files import BASE
from tests.common.config.wrong.case import ROLLOUT, TASKSET, Wrong, at

CASES = [
    at("text for a number", "buffer.batch_size", "many", "such as `8`", 8),
    at("fraction for a count", "algorithm.repeat_times", 2.5, "such as `8`", 2),
    at("number for a section", "model", 7, "Write its keys below it", BASE["model"]),
    Wrong(
        "mapping for a list",
        {"explorer.auxiliary_models": {"model_path": "/m"}},
        "explorer.auxiliary_models",
        "after `- `",
        {"explorer.auxiliary_models": [{"model_path": "/m"}], "cluster.gpu_per_node": 8},
    ),
    at("word for a switch", "explorer.eval_on_startup", "maybe", "`true` or `false`", True),
    at("temperature near 0", "model.temperature", 1e-6, "Set 0 for the most likely token", 0.01),
    at("temperature near 0 of a taskset", f"{TASKSET}.rollout_args.temperature", 1e-6, "0.01", 0),
    at("negative", "trainer.save_interval", -1, "at least 0", 0),
    at("share above one", f"{ROLLOUT}.gpu_memory_utilization", 1.5, "at most 1", 1),
    at("port", "explorer.proxy_port", 99999, "at most 65535", 8010),
    Wrong(
        "stage without a name",
        {"stages": [{"mode": "both"}]},
        "stages.0.stage_name",
        "Add `stage_name",
        {"stages.0.stage_name": "first"},
    ),
    Wrong(
        "beta",
        {"algorithm.optimizer.betas": [0.9, 1.5]},
        "algorithm.optimizer.betas.1",
        "`betas: [0.9, 0.999]`",
        {"algorithm.optimizer.betas": [0.9, 0.999]},
    ),
    *(
        Wrong(
            f"{len(betas)} betas",
            {"algorithm.optimizer.betas": betas},
            "algorithm.optimizer.betas",
            "`betas: [0.9, 0.999]`",
            {"algorithm.optimizer.betas": [0.9, 0.999]},
        )
        for betas in ([0.9], [0.9, 0.99, 0.999])
    ),
]
