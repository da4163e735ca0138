"""The built-in algorithms. Their settings are rows of `trinity.common.config.algorithm_table`."""

from trinity.algorithm.algorithm_type import AlgorithmType


class PPO(AlgorithmType, table="ppo"):
    """Clipped policy gradient with a critic."""

    family = "actor-critic"
    formula = "A = GAE(r, V), whitened; clipped ratio"
    paper = "arXiv:1707.06347"
    when = "Long episodes or dense rewards, where a learnt baseline pays for a second model."


class GRPO(AlgorithmType, table="grpo"):
    """Clipped policy gradient, with the group as baseline."""

    family = "group-relative"
    formula = "A = (r - mean) / std; clipped ratio"
    paper = "arXiv:2402.03300"
    when = "The default for verifiable rewards."


class SFT(AlgorithmType, table="sft"):
    """Maximum likelihood of given answers."""

    family = "supervised"
    formula = "-log p(response)"
    paper = ""
    when = "A warm-up on demonstrations."
