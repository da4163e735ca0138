from trinity.buffer.schema.base import ExperienceFormatter
from trinity.buffer.schema.messages import RowFault
from trinity.utils.registry import Registry

_HOME = "trinity.buffer.schema"
FORMATTER: Registry[type[ExperienceFormatter]] = Registry(
    "formatter",
    {
        "experience": f"{_HOME}.experience.SavedExperienceFormatter",
        "sft": f"{_HOME}.sft.SFTFormatter",
        "cpt": f"{_HOME}.sft.CPTFormatter",
        "dpo": f"{_HOME}.dpo.DPOFormatter",
    },
)

__all__ = ["FORMATTER", "ExperienceFormatter", "RowFault"]
