"""One loss, any split: every loss, in every aggregation mode, however the batch is cut up."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.algorithm.batches import Evaluation, evaluate, random_batch, with_masked_rows
from trinity.algorithm import ENTROPY_LOSS_FN, KL_FN, POLICY_LOSS_FN
from trinity.algorithm.additivity import adds_up, check_additive
from trinity.algorithm.aggregate import aggregate_loss
from trinity.algorithm.policy_loss_fn.base import PolicyLossFn
from trinity.algorithm.value_loss import value_loss
from trinity.common.config.algorithm import LOSS_AGG_MODES

SETTINGS = {
    "ppo": {"enable_sequence_masking": True, "clip_range_high": 0.28},
    "cispo": {"enable_mask_clip": True, "mask_clip_range_low": 0.2},
    "rec": {
        "clip_mode": "ring",
        "weight": "advantage",
        "regularizer": "k2",
        "regularizer_coef": 0.1,
    },
    "dpo": {"label_smoothing": 0.1},
    "mix": {"mu": 0.3},
    "mix_chord": {"mu_decay_steps": 7, "mu_peak": 0.5},
    "sft_phi": {"cutoff_prob": 0.6},
}


class ValueLoss(PolicyLossFn):
    """`value_loss` in the form of a policy loss, so that the same tests hold it."""

    def __init__(self, loss_agg_mode: str) -> None:
        self.mode = loss_agg_mode

    def __call__(self, values, old_values, returns, action_mask):
        return value_loss(values, old_values, returns, action_mask, 0.2, self.mode)


class KLLoss(PolicyLossFn):
    """The KL term of the loss in the form of a policy loss."""

    def __init__(self, name: str, loss_agg_mode: str) -> None:
        self.kl, self.mode = KL_FN.get(name)(), loss_agg_mode

    def __call__(self, logprob, ref_logprob, old_logprob, action_mask):
        return self.kl.calculate_kl_loss(logprob, ref_logprob, action_mask, self.mode, old_logprob)


class EntropyLoss(PolicyLossFn):
    """An entropy bonus with its aggregation mode bound."""

    def __init__(self, name: str, loss_agg_mode: str) -> None:
        self.bonus, self.mode = ENTROPY_LOSS_FN.get(name)(entropy_coef=0.1), loss_agg_mode

    def inputs(self) -> list[str]:  # type: ignore[override]
        return self.bonus.inputs()

    def __call__(self, **tensors):
        return self.bonus(**tensors, loss_agg_mode=self.mode)


def losses() -> dict[str, Callable[[], PolicyLossFn]]:
    """Every loss in every mode it has."""
    found: dict[str, Callable[[], PolicyLossFn]] = {}
    for name in POLICY_LOSS_FN.names():
        fn, args = POLICY_LOSS_FN.get(name), SETTINGS.get(name, {})
        if "loss_agg_mode" not in fn.default_args():
            found[name] = lambda fn=fn, args=args: fn(**args)
            continue
        for mode in LOSS_AGG_MODES:
            found[f"{name} {mode}"] = lambda fn=fn, args=args, mode=mode: fn(
                **args, loss_agg_mode=mode
            )
    found["rec by sequence"] = lambda: POLICY_LOSS_FN.get("rec")(
        clip_mode="gspo-one-side", weight="gspo_importance_sampling"
    )
    for mode in LOSS_AGG_MODES:
        found[f"value {mode}"] = lambda mode=mode: ValueLoss(mode)
        for name in KL_FN.names():
            if name != "none":
                found[f"kl {name} {mode}"] = lambda name=name, mode=mode: KLLoss(name, mode)
        for name in ("default", "mix"):
            found[f"entropy {name} {mode}"] = lambda name=name, mode=mode: EntropyLoss(name, mode)
    return found


LOSSES = losses()
pytestmark = pytest.mark.filterwarnings("ignore:GSPO is defined")


def assert_same(one: Evaluation, other: Evaluation, gradient: torch.Tensor) -> None:
    terms = float(one.gradient.abs().sum())  # of order of the summed terms: they may cancel
    size = max(one.size, other.size, terms)
    assert abs(float(one.loss) - float(other.loss)) <= 1e-6 * size
    scale = max(float(one.gradient.abs().max()), 1e-6)
    assert float((one.gradient - gradient).abs().max()) <= 1e-6 * scale
    for name, value in one.metrics.items():
        assert other.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name


@st.composite
def cuts(draw, num_pairs: int) -> list[list[int]]:
    """The rows of ``num_pairs`` pairs in any order, the two of a pair together, cut anywhere."""
    order = draw(st.permutations(range(num_pairs)))
    rows = [row for pair in order for row in (2 * pair, 2 * pair + 1)]
    pieces: list[list[int]] = [[]]
    for first, second in zip(rows[::2], rows[1::2]):
        if pieces[-1] and draw(st.booleans()):
            pieces.append([])
        pieces[-1] += draw(st.permutations([first, second]))
    return pieces


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=4, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    num_pairs=st.integers(1, 4),
    width=st.integers(1, 7),
    data=st.data(),
)
def test_split_order_and_masked_rows_change_nothing(name, seed, num_pairs, width, data):
    loss_fn = LOSSES[name]()
    batch = random_batch(seed, num_rows=2 * num_pairs, width=width)
    whole = evaluate(loss_fn, batch)
    pieces = data.draw(cuts(num_pairs))
    split = evaluate(loss_fn, batch, pieces)
    assert_same(whole, split, split.gradient)

    masked_pairs = data.draw(st.integers(0, 2))
    wide = with_masked_rows(batch, masked_pairs, extra_width=data.draw(st.integers(0, 3)))
    extra = [2 * num_pairs + row for row in range(2 * masked_pairs)]
    padded = evaluate(loss_fn, wide, [*pieces, extra] if extra else pieces)
    assert padded.gradient.isfinite().all()
    assert_same(whole, padded, padded.gradient[:, : 2 * num_pairs, :width])
    assert padded.gradient[:, 2 * num_pairs :].abs().sum() == 0


@pytest.mark.parametrize("name", POLICY_LOSS_FN.names())
def test_every_built_in_loss_is_additive(name):
    assert POLICY_LOSS_FN.get(name).additive
    assert check_additive(POLICY_LOSS_FN.get(name)(**SETTINGS.get(name, {})))


class MeanOfMicroBatch(PolicyLossFn):
    """A mistake people make: the mean of the micro-batch instead of the step."""

    def __call__(self, logprob, action_mask):
        return -(logprob * action_mask).sum() / action_mask.sum(), {}


class WithCustomField(PolicyLossFn):
    """A loss over a custom field."""

    def __call__(self, logprob, action_mask, weight):
        return aggregate_loss(-logprob * weight[:, None], action_mask), {}


class PlusConstant(PolicyLossFn):
    """A term that each micro-batch adds anew: the gradient adds up, the value does not."""

    def __call__(self, logprob, action_mask):
        return aggregate_loss(-logprob, action_mask) + 1.0, {}


class StraightThrough(MeanOfMicroBatch):
    """Its value is 0 however it is cut; its gradient is that of a mean of the micro-batch."""

    def __call__(self, logprob, action_mask):
        loss, metrics = super().__call__(logprob, action_mask)
        return loss - loss.detach(), metrics


def test_a_loss_that_divides_by_its_own_counts_is_not_additive():
    assert not check_additive(MeanOfMicroBatch())
    assert not check_additive(PlusConstant())
    assert not check_additive(StraightThrough())


def test_a_custom_field_has_to_be_given_to_the_check():
    assert check_additive(WithCustomField(), extra={"weight": torch.rand(8)})
    with pytest.raises(ValueError, match="'weight'"):
        check_additive(WithCustomField())


def test_the_trainer_believes_built_ins_and_checks_plugins():
    columns = {"logprob": torch.zeros(3, 9), "weight": torch.rand(3)}
    assert adds_up(POLICY_LOSS_FN.get("ppo")(), columns)
    assert adds_up(WithCustomField(), columns)
    assert not adds_up(MeanOfMicroBatch(), columns)


class OverTokens(PolicyLossFn):
    """A loss over a custom field per token."""

    def __call__(self, logprob, action_mask, bonus):
        return aggregate_loss(-logprob * bonus, action_mask), {}


class Declared(MeanOfMicroBatch):
    """A loss that says itself that it does not add up."""

    additive = False


def test_custom_fields_of_a_real_batch_fit_the_check():
    for width in (2, 9):
        assert adds_up(OverTokens(), {"bonus": torch.rand(3, width)})
    assert not adds_up(Declared(), {})
