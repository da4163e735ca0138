"""On-policy distillation: the advantage of a token is what a teacher thinks of it.

Student and teacher score the same sampled tokens (``old_logprob`` and ``teacher_logprobs``), so
both need the same tokenizer. arXiv:2306.13649.
"""

import math
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from trinity.algorithm.advantage_fn.base import AdvantageFn, Metrics
from trinity.algorithm.utils import masked_mean, masked_var, visible


class _DistillAdvantageFn(AdvantageFn):
    requires: ClassVar[tuple[str, ...]] = ("old_logprob", "teacher_logprobs")
    metric_name: ClassVar[str] = "kl"

    kl_coef: float

    def divergence(self, student_BT: Tensor, teacher_BT: Tensor) -> Tensor:
        raise NotImplementedError

    def __call__(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Metrics]:
        mask_BT = batch["action_mask"].bool()
        student_BT, teacher_BT = visible(
            mask_BT, batch["old_logprob"].float(), batch["teacher_logprobs"].float()
        )
        divergence_BT = self.divergence(student_BT, teacher_BT)
        advantage_BT = torch.where(mask_BT, -self.kl_coef * divergence_BT, 0.0)
        metrics = {
            f"{self.metric_name}/mean": float(masked_mean(divergence_BT, mask_BT)),
            f"{self.metric_name}/std": math.sqrt(float(masked_var(divergence_BT, mask_BT))),
            "advantages/mean": float(masked_mean(advantage_BT, mask_BT)),
        }
        return advantage_BT, advantage_BT.clone(), metrics


class OnPolicyDistillAdvantageFn(_DistillAdvantageFn):
    """``A = kl_coef (teacher_logprob - old_logprob)``: the reverse KL of each token as a penalty.

    Args:
        kl_coef: Scale of the advantage.
    """

    def __init__(self, kl_coef: float = 1.0) -> None:
        self.kl_coef = kl_coef

    def divergence(self, student_BT: Tensor, teacher_BT: Tensor) -> Tensor:
        return student_BT - teacher_BT


class JSDAdvantageFn(_DistillAdvantageFn):
    """``A = -kl_coef J``, with J a generalised Jensen-Shannon term of the sampled token.

    With s and t the student's and teacher's logprob, b = ``lambda_coef`` and
    ``m = log((1 - b) e^s + b e^t)``: ``J = b (t - m) + (1 - b)(s - m)``; at b = 0 ``s - t``, at
    b = 1 ``t - s``. As the tokens are the student's, this J is not an estimate of the divergence
    where b > 0: at b = 0.5 it is ``-log cosh((s - t) / 2)``, never positive. The policy gradient of
    the divergence itself is ``J = (1 - b)(s - m)``: ``exact_gradient: true`` is that.

    Args:
        lambda_coef: b, the weight of the teacher in the mixture, in [0, 1].
        kl_coef: Scale of the advantage.
        temperature: Divides both logprobs, which are not normalised again.
        chunk_size: Rows computed at a time, to bound memory; None for all at once.
        exact_gradient: Take the divergence's own policy gradient (b below 1).
    """

    metric_name: ClassVar[str] = "jsd"

    def __init__(
        self,
        lambda_coef: float = 0.5,
        kl_coef: float = 1.0,
        temperature: float = 1.0,
        chunk_size: int | None = None,
        exact_gradient: bool = False,
    ) -> None:
        if not 0 <= lambda_coef <= 1:
            raise ValueError(f"lambda_coef is {lambda_coef}; it must be in [0, 1].")
        if temperature <= 0:
            raise ValueError(f"temperature is {temperature}; it must be above 0.")
        if exact_gradient and lambda_coef == 1:
            raise ValueError("exact_gradient needs lambda_coef below 1: the gradient at 1 is 0.")
        self.lambda_coef, self.kl_coef = lambda_coef, kl_coef
        self.temperature, self.chunk_size = temperature, chunk_size
        self.exact_gradient = exact_gradient

    def divergence(self, student_BT: Tensor, teacher_BT: Tensor) -> Tensor:
        size = self.chunk_size or max(len(student_BT), 1)
        chunks = zip(student_BT.split(size), teacher_BT.split(size), strict=True)
        return torch.cat(
            [self._divergence(s / self.temperature, t / self.temperature) for s, t in chunks]
        )

    def _divergence(self, student: Tensor, teacher: Tensor) -> Tensor:
        b = self.lambda_coef
        if b == 0:
            return student - teacher
        if b == 1:
            return teacher - student
        middle = torch.logaddexp(student + math.log1p(-b), teacher + math.log(b))
        if self.exact_gradient:
            return (1 - b) * (student - middle)
        return b * (teacher - middle) + (1 - b) * (student - middle)
