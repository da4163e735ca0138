from typing import TYPE_CHECKING

from trinity.utils.registry import Registry

if TYPE_CHECKING:
    from trinity.buffer.schema.base import ExperienceFormatter

_HOME = "trinity.buffer.schema"
FORMATTER: "Registry[type[ExperienceFormatter]]" = Registry(
    "formatter",
    {
        "experience": f"{_HOME}.experience.SavedExperienceFormatter",
        "sft": f"{_HOME}.sft.SFTFormatter",
        "cpt": f"{_HOME}.sft.CPTFormatter",
        "dpo": f"{_HOME}.dpo.DPOFormatter",
    },
)

__all__ = ["FORMATTER"]
