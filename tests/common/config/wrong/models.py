"""Models: lengths, images, number formats, and services where they can't be."""

from tests.common.config.files import DROP
from tests.common.config.wrong.case import EXPERIENCES, ROLLOUT, SFT, Wrong, at

CASES = [
    Wrong(
        "images in an engine that sees none",
        {f"{ROLLOUT}.enable_multimodal": True, f"{ROLLOUT}.engine_type": "vllm"},
        f"{ROLLOUT}.enable_multimodal",
        "`engine_type: torch`",
        {f"{ROLLOUT}.enable_multimodal": DROP},
    ),
    Wrong(
        "images for a critic",
        {
            f"{ROLLOUT}.enable_multimodal": True,
            "algorithm": {"algorithm_type": "ppo"},
            f"{ROLLOUT}.engine_type": "torch",
        },
        f"{ROLLOUT}.enable_multimodal",
        "without a critic",
        {f"{ROLLOUT}.enable_multimodal": DROP},
    ),
    Wrong(
        "images in a data set of dialogues",
        {
            **SFT,
            EXPERIENCES: {
                "path": "/data/sft",
                "format": {"image_key": "picture", "prompt_type": "messages"},
            },
        },
        f"{EXPERIENCES}.format.image_key",
        "`format.prompt_type: plaintext`",
        {f"{EXPERIENCES}.format.prompt_type": "plaintext"},
    ),
    Wrong(
        "images for a trainer that reads texts",
        {
            **SFT,
            EXPERIENCES: {
                "path": "/data/sft",
                "format": {"video_key": "film", "prompt_type": "plaintext"},
            },
            "trainer.trainer_type": "verl",
        },
        f"{EXPERIENCES}.format.video_key",
        "`trainer.trainer_type: torch`",
        {"trainer.trainer_type": "torch"},
    ),
    Wrong(
        "an engine of another number format than the trainer's",
        {f"{ROLLOUT}.dtype": "float32"},
        f"{ROLLOUT}.dtype",
        "`trainer.dtype: float32`",
        {"trainer.dtype": "float32"},
    ),
    Wrong(
        "no length",
        {"model.max_response_tokens": DROP},
        "model.max_model_len",
        "`max_response_tokens`",
        {"model.max_model_len": 128},
    ),
    at("parts longer than the whole", "model.max_model_len", 100, "128", 128),
    at("least above most", "model.min_response_tokens", 64, "63", 63),
    Wrong(
        "judge without length",
        {
            "cluster.gpu_per_node": 8,
            "explorer.auxiliary_models": [
                {
                    "model_path": "/j",
                    "max_prompt_tokens": 99,
                    "max_response_tokens": 9,
                    "max_model_len": 100,
                }
            ],
        },
        "explorer.auxiliary_models.0.max_model_len",
        "108",
        {"explorer.auxiliary_models.0.max_model_len": 108},
    ),
    at("no model", "model.model_path", "", "`model_path:", "/models/tiny"),
    at("service that trains", f"{ROLLOUT}.engine_type", "openai", "`vllm`", "vllm"),
    Wrong(
        "service without bench",
        {"model.external_model": {"enable": True, "model_name": "m"}, "mode": "explore"},
        "model.external_model.enable",
        "`mode: bench`",
        {"mode": "bench", "buffer.explorer_input.eval_tasksets": [{"path": "/e"}]},
    ),
    Wrong(
        "tool calls without a parser",
        {f"{ROLLOUT}.enable_auto_tool_choice": True},
        f"{ROLLOUT}.tool_call_parser",
        "`tool_call_parser: hermes`",
        {f"{ROLLOUT}.tool_call_parser": "hermes"},
    ),
    *(
        Wrong(
            f"{part} as long as the sequence",
            {
                "model.max_prompt_tokens": DROP,
                "model.max_response_tokens": DROP,
                "model.max_model_len": 50,
                f"model.max_{part}_tokens": 64,
            },
            "model.max_model_len",
            f"`max_{part}_tokens` below 50",
            {f"model.max_{part}_tokens": 49},
        )
        for part in ("prompt", "response")
    ),
]
