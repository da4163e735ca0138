"""Data-Juicer within the experience pipeline: what its operators find out lands in `info`."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from trinity.buffer.operators import ExperienceOperatorV1
from trinity.common.config.data_processor import OperatorConfig
from trinity.common.config.service import DataJuicerServiceConfig
from trinity.common.experience import Experience
from trinity.service.data_juicer.processor import DataJuicerProcessor

_INDEX = "experience"


class DataJuicerOperator(ExperienceOperatorV1):
    """Sends the texts of experiences through Data-Juicer operators.

    A filter leaves experiences out; what filters and mappers compute stands in `info` afterwards
    (say, `llm_quality_score`). Texts that an operator changes are not taken over: the tokens are
    what was sampled.

    Operators see the columns `prompt_text`, `response_text`, `text` (the response), `messages`,
    `reward` and the numbers of `metrics` as `metric_<name>`.

    Args:
        operators: Name and args of each, in order.
        config_path: A Data-Juicer recipe in place of ``operators``.
        service_config: Section `service.data_juicer`.
        np: Processes the service may use.
    """

    def __init__(
        self,
        operators: Sequence[OperatorConfig | Mapping[str, Any]] = (),
        config_path: str | None = None,
        service_config: DataJuicerServiceConfig | Mapping[str, Any] | None = None,
        np: int = 4,
    ) -> None:
        self._processor = DataJuicerProcessor(
            operators,
            config_path,
            service_config=service_config,
            num_process=np,
            kind="experience",
        )

    async def prepare(self) -> None:
        await self._processor.prepare()

    async def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, Any]]:
        rows = [{_INDEX: index, **_row(experience)} for index, experience in enumerate(exps)]
        found, metrics = await self._processor.process_rows(rows)
        kept = []
        for row in found:
            experience = exps[int(str(row[_INDEX]))]
            experience.info |= cast(dict, row["stats"])
            kept.append(experience)
        metrics = {f"data_juicer/{name}": value for name, value in metrics.items()}
        return kept, {**metrics, "filtered_count": len(exps) - len(kept)}

    async def close(self) -> None:
        await self._processor.close()


def _row(experience: Experience) -> dict[str, Any]:
    return {
        "text": experience.response_text or "",
        "prompt_text": experience.prompt_text or "",
        "response_text": experience.response_text or "",
        "messages": experience.messages or [],
        "reward": experience.reward,
        **{f"metric_{name}": value for name, value in experience.metrics.items()},
    }
