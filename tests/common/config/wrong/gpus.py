"""GPUs and batches that do not divide."""

from tests.common.config.wrong.case import ROLLOUT, Wrong, at

CASES = [
    Wrong(
        "more engines than GPUs",
        {f"{ROLLOUT}.engine_num": 8},
        "cluster.gpu_per_node",
        "at least 9",
        {"cluster.gpu_per_node": 9, "trainer.trainer_type": "torch"},
    ),
    Wrong(
        "no GPU for the trainer",
        {f"{ROLLOUT}.tensor_parallel_size": 5},
        "cluster.gpu_per_node",
        "engine_num",
        {f"{ROLLOUT}.tensor_parallel_size": 1},
    ),
    Wrong(
        "engine over part of a machine",
        {"cluster": {"node_num": 4, "gpu_per_node": 4}, f"{ROLLOUT}.tensor_parallel_size": 6},
        f"{ROLLOUT}.tensor_parallel_size",
        "multiple of 4",
        {f"{ROLLOUT}.tensor_parallel_size": 4},
    ),
    at("sequence parallel", "trainer.ulysses_sequence_parallel_size", 3, "1, 2, 4", 2),
    Wrong(
        "batch that does not divide",
        {"trainer.trainer_type": "verl", "buffer.train_batch_size": 30},
        "buffer.train_batch_size",
        "32",
        {"buffer.train_batch_size": 32},
    ),
    Wrong(
        "embedded engine on two GPUs",
        {f"{ROLLOUT}.engine_type": "torch", f"{ROLLOUT}.tensor_parallel_size": 2},
        f"{ROLLOUT}.tensor_parallel_size",
        "`engine_num`",
        {f"{ROLLOUT}.tensor_parallel_size": 1},
    ),
    Wrong(
        "more engines than GPUs that the trainer shares",
        {"mode": "colocate", "cluster.gpu_per_node": 1, f"{ROLLOUT}.engine_num": 2},
        "cluster.gpu_per_node",
        "at least 2;",
        {"cluster.gpu_per_node": 2},
    ),
]
