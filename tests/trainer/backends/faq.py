"""The script of the FAQ ("How to load the checkpoints outside of the framework?"), as printed."""

from pathlib import Path

from transformers import PreTrainedModel

SCRIPT = """
import os
from transformers import AutoTokenizer, AutoModelForCausalLM
from trinity.common.models.utils import load_fsdp_state_dict_from_verl_checkpoint

# Assume we need the checkpoint at step 780;
# model_path, checkpoint_root_dir, project, and name are already defined
model = AutoModelForCausalLM.from_pretrained(model_path)
ckp_path = os.path.join(checkpoint_root_dir, project, name, "global_step_780", "actor")
model.load_state_dict(load_fsdp_state_dict_from_verl_checkpoint(ckp_path))
"""


def loaded_by_the_script(model_path: str, root: Path) -> PreTrainedModel:
    """The model of step 780 of the job ``<root>/project/name``."""
    given = {"model_path": model_path, "checkpoint_root_dir": str(root)}
    names = {**given, "project": "project", "name": "name"}
    exec(compile(SCRIPT, "faq", "exec"), names)
    model = names["model"]
    assert isinstance(model, PreTrainedModel)
    return model
