"""The built-in algorithms. Their settings are rows of `trinity.common.config.algorithm_table`.

Attributes here are for people: they make the table in `docs/algorithms.md`. In the formulas ``r``
is the reward, ``mean`` and ``std`` are the group's, ``p`` is the ratio of new to old probability of
a token, ``lp`` its log-probability, and ``sg`` stops the gradient.
"""

from trinity.algorithm.algorithm_type import AlgorithmType


class PPO(AlgorithmType, table="ppo"):
    """Clipped policy gradient with a critic."""

    family = "actor-critic"
    formula = "A = whitened GAE(r, V); loss = max(-A p, -A clip(p))"
    paper = "arXiv:1707.06347"
    when = "Long episodes or rewards per token, where a learnt baseline pays for a second model."


class GRPO(AlgorithmType, table="grpo"):
    """Clipped policy gradient with the group as baseline."""

    family = "group-relative"
    formula = "A = (r - mean) / std; loss = max(-A p, -A clip(p))"
    paper = "arXiv:2402.03300"
    when = "The first choice for rewards that can be checked."


class DAPO(AlgorithmType, table="dapo"):
    """GRPO without KL, for large groups and an asymmetric clip.

    Its wider upper clip is set by ``policy_loss_fn_args.clip_range_high`` (the paper: 0.28), its
    dynamic sampling by the operator ``dapo_dynamic_sampling`` and its length penalty by the reward.
    """

    family = "group-relative"
    formula = "A = (r - mean) / std; loss = max(-A p, -A clip(p)); no KL"
    paper = "arXiv:2503.14476"
    when = "Long reasoning with many samples a task."


class ReinforcePlusPlus(AlgorithmType, table="reinforceplusplus"):
    """REINFORCE with PPO's clip and advantages normalised over the batch."""

    family = "policy gradient"
    formula = "A = whitened reward-to-go; loss = max(-A p, -A clip(p))"
    paper = "arXiv:2501.03262"
    when = "One sample a task, or groups too small for a mean of their own."


class RLOO(AlgorithmType, table="rloo"):
    """REINFORCE with the mean of the other samples as baseline."""

    family = "group-relative"
    formula = "A = n/(n-1) (r - mean); loss = max(-A p, -A clip(p))"
    paper = "arXiv:2402.14740"
    when = "An unbiased baseline; rewards whose scale means something."


class OPMD(AlgorithmType, table="opmd"):
    """Online policy mirror descent: a policy gradient that stays close to the last policy."""

    family = "off-policy"
    formula = "A = r - mean; loss = -A lp / (1 + tau)"
    paper = "arXiv:2509.24203"
    when = "Data that lags behind the policy, without a clip."


class AsymRE(AlgorithmType, table="asymre"):
    """REINFORCE with a baseline shifted below the mean."""

    family = "off-policy"
    formula = "A = r - (mean + shift), shift < 0; loss = -A lp / (1 + tau)"
    paper = "arXiv:2506.20520"
    when = "Very stale data: a low baseline learns more from successes than from failures."


class TOPR(AlgorithmType, table="topr"):
    """Tapered off-policy REINFORCE: only bad samples are weighted down by their ratio."""

    family = "off-policy"
    formula = "A = r; loss = -sg(alpha) A lp, alpha = 1 if A > 0 else min(p, 1)"
    paper = "arXiv:2503.14286"
    when = "Rewards of +1 and -1 on data of an older policy."


class CISPO(AlgorithmType, table="cispo"):
    """The ratio is clipped as a weight, so that every token keeps its gradient."""

    family = "group-relative"
    formula = "A = (r - mean) / std; loss = -A sg(clip(p)) lp"
    paper = "arXiv:2506.13585"
    when = "Several updates a batch, where PPO's clip would mute rare but decisive tokens."


class GSPO(AlgorithmType, table="gspo"):
    """One ratio per sequence."""

    family = "group-relative"
    formula = "A = (r - mean) / std; s = geometric mean of p; loss = max(-A s, -A clip(s))"
    paper = "arXiv:2507.18071"
    when = "Mixture-of-experts models and long responses, where token ratios are noisy."


class SAPO(AlgorithmType, table="sapo"):
    """A smooth gate in place of the clip."""

    family = "group-relative"
    formula = "A = (r - mean) / std; loss = -A sg(4/tau sigmoid(tau (p - 1))) lp"
    paper = "arXiv:2511.20347"
    when = "Where hard clipping makes learning jumpy."


class REC(AlgorithmType, table="rec"):
    """Group-relative REINFORCE with a choice of clips, weights and regularisers."""

    family = "off-policy"
    formula = "A = r - mean; loss = -A lp on kept tokens"
    paper = "arXiv:2509.24203"
    when = "Studying what clipping and weighting do on off-policy data."


class SPPO(AlgorithmType, table="sppo"):
    """A first-order surrogate inside a trust region of ratios."""

    family = "off-policy"
    formula = "A = r - mean; loss = -A (lp - old lp) where 1/(1+eps) <= p <= 1+eps"
    paper = "arXiv:2108.05828"
    when = "A plain gradient inside a trust region, no gradient outside."


class Mix(AlgorithmType, table="mix"):
    """GRPO on rollouts together with SFT on expert data."""

    family = "mixed"
    formula = "(1 - mu) PPO(rollouts) + mu SFT(experts)"
    paper = "arXiv:2505.17826"
    when = "Demonstrations are at hand and the policy seldom succeeds by itself."


class MixCHORD(AlgorithmType, table="mix_chord"):
    """GRPO with SFT faded out over time and weighted by the token's uncertainty."""

    family = "mixed"
    formula = "(1 - mu_t) PPO(rollouts) + mu_t SFT-phi(experts)"
    paper = "arXiv:2508.11408"
    when = "Demonstrations of another model, whose style should not take over."


class RAFT(AlgorithmType, table="raft"):
    """Reward-ranked fine-tuning: maximum likelihood of the samples that were kept."""

    family = "supervised"
    formula = "-lp of every experience that the operators keep (reward_filter)"
    paper = "arXiv:2304.06767"
    when = "The simplest thing that learns from its own successes."


class MultiStepGRPO(AlgorithmType, table="multi_step_grpo"):
    """GRPO over trajectories: every step gets the advantage of its run."""

    family = "group-relative"
    formula = (
        "A = (R - mean) / std of the runs' rewards, on every step; loss = max(-A p, -A clip(p))"
    )
    paper = "arXiv:2402.03300"
    when = "Agents whose run is several experiences and whose reward comes at the end."


class GiGPO(AlgorithmType, table="gigpo"):
    """Two levels of groups: runs of a task, and steps from the same state."""

    family = "group-relative"
    formula = "A = A_run + omega A_step; loss = max(-A p, -A clip(p))"
    paper = "arXiv:2505.10978"
    when = "Agents that meet the same states again, which gives credit to single steps."


class OnPolicyDistill(AlgorithmType, table="on_policy_distill"):
    """The student's own samples, scored token by token by a teacher."""

    family = "distillation"
    formula = "A = c (teacher lp - lp); loss = max(-A p, -A clip(p))"
    paper = "arXiv:2306.13649"
    when = "A stronger model with the same tokenizer is there to be imitated."


class JSD(AlgorithmType, table="jsd"):
    """On-policy distillation by a generalised Jensen-Shannon divergence."""

    family = "distillation"
    formula = "A = -c JSD_beta(teacher, student) of the token; loss = max(-A p, -A clip(p))"
    paper = "arXiv:2306.13649"
    when = "As on_policy_distill, between covering the teacher's modes and seeking them."


class GRPOverl(AlgorithmType, table="grpo_verl"):
    """GRPO with advantages in the trainer, as clipb and clipv need them."""

    family = "group-relative"
    formula = "A = (r - mean) / std; loss = max(-A p, -A clip(p))"
    paper = "arXiv:2402.03300"
    when = "A KL penalty in the reward, or entropy kept up by clipb or clipv (arXiv:2602.03392)."


class SFT(AlgorithmType, table="sft"):
    """Maximum likelihood of given answers."""

    family = "supervised"
    formula = "-lp"
    paper = "arXiv:2203.02155"
    when = "A warm-up on demonstrations."


class CPT(AlgorithmType, table="cpt"):
    """Continued pre-training on plain text."""

    family = "supervised"
    formula = "-lp"
    paper = "arXiv:2004.10964"
    when = "Knowledge of a domain before fine-tuning."


class DPO(AlgorithmType, table="dpo"):
    """Direct preference optimisation."""

    family = "preference"
    formula = "-log sigmoid(beta (margin of chosen over rejected against the reference))"
    paper = "arXiv:2305.18290"
    when = "Pairs of a better and a worse answer, no rollouts."
