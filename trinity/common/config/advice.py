"""Settings that would run, but are probably not what is wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from trinity.common.config.arithmetic import rollouts_per_step
from trinity.common.config.buffer import GenerationConfig
from trinity.common.config.case import Case, cases_of
from trinity.common.config.check_adapters import models_of
from trinity.common.config.check_data import tasksets_of
from trinity.common.config.derive_data import EXPERIENCES, INPUT, ROLLOUT
from trinity.common.config.derive_trainer import sequence_shares
from trinity.common.config.inference_model import InferenceModelConfig
from trinity.common.config.model import ModelConfig
from trinity.common.config.names import table_of
from trinity.common.config.nearest import nearest
from trinity.common.config.root import Config
from trinity.common.config.shape import find_positions
from trinity.common.config.signatures import workflow_arguments
from trinity.common.config.verl.keys import ACTOR, leaves
from trinity.common.constants import EngineType


def find_advice(config: Config) -> list[str]:
    """One sentence for each doubtful setting; none with `ignore_validator_suggestions`.

    Of a model that is on this machine its `config.json` is read.
    """
    return advice_of(cases_of(config))


def advice_of(cases: Sequence[Case]) -> list[str]:
    """`find_advice` of what is filled in already."""
    found: dict[str, None] = {}
    for case in cases:
        if not case.config.ignore_validator_suggestions:
            for advise in _ALL:
                found.update(dict.fromkeys(advise(case)))
    return list(found)


def _batch(case: Case) -> Iterator[str]:
    config = case.config
    made = config.samples_per_step
    size, wanted = config.buffer.train_batch_size, rollouts_per_step(config)
    said = f"buffer.train_batch_size is {size}"
    if wanted != size:
        said += f", {wanted} of it rollouts"
    if config.mode.pairs and wanted > made:
        yield (
            f"{said}, but an explorer step makes {made} experiences, "
            f"so a training step waits for {-(-wanted // made)} of them."
        )
    elif config.mode.pairs and wanted and made % wanted:
        yield (
            f"{said}, and the {made} experiences of an explorer step "
            "are no multiple of it: some batches will be smaller."
        )


def _micro_batch(case: Case) -> Iterator[str]:
    trainer = case.config.trainer
    key = f"{ACTOR}.ppo_micro_batch_size_per_gpu"
    if trainer.use_dynamic_bsz and key in leaves(trainer.trainer_config):
        yield (
            f"trainer.trainer_config.{key} has no effect while trainer.use_dynamic_bsz is true: "
            f"micro-batches hold up to {trainer.max_token_len_per_gpu} tokens."
        )


def _long_rows(case: Case) -> Iterator[str]:
    trainer, longest = case.config.trainer, case.config.model.max_model_len or 0
    limit = trainer.max_token_len_per_gpu
    shares = sequence_shares(trainer)
    if case.config.mode.trains and limit and limit * shares < longest:
        yield (
            f"trainer.max_token_len_per_gpu is {limit}, but one experience can have {longest} "
            "tokens (model.max_model_len); such a one is a micro-batch by itself and may not fit."
        )


def _positions(case: Case) -> Iterator[str]:
    told: set[tuple[str, int]] = set()
    for key, model in _loaded(case).items():
        path, longest = model.model_path or "", model.max_model_len or 0
        positions = find_positions(path, model.rope_scaling)
        if positions is not None and longest > positions and (path, longest) not in told:
            told.add((path, longest))
            yield (
                f"{key}.max_model_len is {longest}, but {path} is a model for up to {positions} "
                f"tokens (max_position_embeddings of its config.json). Lower it, or set "
                f"{key}.rope_scaling as those who made the model say."
            )


def _loaded(case: Case) -> dict[str, ModelConfig | InferenceModelConfig]:
    """Key of each model that this run loads -> its section."""
    models: dict[str, ModelConfig | InferenceModelConfig] = {}
    if not (case.config.model.external_model.enable or case.config.model.tinker.enable):
        models["model"] = case.config.model
    outside = (EngineType.OPENAI, EngineType.TINKER)
    own = {key: model for key, model in models_of(case).items() if model.engine_type not in outside}
    return models | own


def _greedy(case: Case) -> Iterator[str]:
    if not case.feeds_a_trainer:
        return
    for index, taskset in enumerate(case.config.buffer.explorer_input.tasksets):
        if taskset.rollout_args.temperature == 0 and (taskset.repeat_times or 1) > 1:
            yield (
                f"{INPUT}.tasksets.{index} samples at temperature 0, so all samples of a task are "
                "the same and teach nothing."
            )


def _cut(case: Case) -> Iterator[str]:
    for key, args in _sampled_by(case).items():
        cuts = [f"top_p {args.top_p}"] if (args.top_p or 1.0) < 1.0 else []
        cuts += [f"top_k {args.top_k}"] if (args.top_k or -1) > 0 else []
        if cuts:
            yield (
                f"{key} samples from a part of the distribution "
                f"({' and '.join(cuts)}), while log-probabilities are those of the whole: samples "
                "do not quite follow the policy that is trained. Use `top_p: 1` and `top_k: -1`."
            )


def _sampled_by(case: Case) -> dict[str, GenerationConfig | InferenceModelConfig]:
    """Key -> sampling of all that a trainer learns from, this command's or another's."""
    config = case.config
    tasksets = config.buffer.explorer_input.tasksets
    if not case.feeds_a_trainer:
        return {}
    if not tasksets:
        return {ROLLOUT: config.explorer.rollout_model}
    return {f"{INPUT}.tasksets.{i}": taskset.rollout_args for i, taskset in enumerate(tasksets)}


def _penalty(case: Case) -> Iterator[str]:
    penalty = case.config.explorer.rollout_model.repetition_penalty
    if penalty not in (None, 1.0) and case.feeds_a_trainer:
        yield (
            f"{ROLLOUT}.repetition_penalty is {penalty}: log-probabilities of samples are those "
            "after the penalty, which the trainer does not know, so importance ratios are not 1 "
            "even on the same weights. Use 1."
        )


def _replay(case: Case) -> Iterator[str]:
    buffer = case.config.buffer.trainer_input.experience_buffer
    if buffer is None or not buffer.replay_buffer.enable:
        return
    if buffer.replay_buffer.reuse_cooldown_time is None:
        yield (
            f"{EXPERIENCES}.replay_buffer is enabled, but without reuse_cooldown_time nothing "
            "is used again."
        )


def _eval(case: Case) -> Iterator[str]:
    has_sets = bool(case.config.buffer.explorer_input.eval_tasksets)
    if case.is_set("explorer.eval_interval") and case.config.mode.pairs and not has_sets:
        yield "explorer.eval_interval is set, but there are no eval_tasksets."


def _critic_of_another(case: Case) -> Iterator[str]:
    algorithm = case.config.algorithm
    if algorithm.advantage_fn == "ppo" and not case.spec.use_critic and case.config.mode.trains:
        yield (
            f"algorithm.advantage_fn is 'ppo', which needs values: {algorithm.algorithm_type} will "
            "train a critic along."
        )


def _without_effect(case: Case) -> Iterator[str]:
    given = case.given.flatten()
    alternatives = [key for key, value in given.items() if key.endswith(".logprobs") and value]
    if alternatives:
        yield (
            f"{', '.join(alternatives)} has no effect: no engine reports alternatives. The "
            "log-probability of each sampled token is always there."
        )
    several = [k for k, v in given.items() if k.endswith(".rollout_args.n") and v not in (None, 1)]
    if several:
        yield f"{', '.join(several)} has no effect: repeat_times says how many samples there are."


def _unread_arguments(case: Case) -> Iterator[str]:
    """Not where rows name workflows of their own: they all get the same arguments."""
    for _, key, taskset in tasksets_of(case):
        name = taskset.default_workflow_type or ""
        if name not in table_of("WORKFLOWS") or taskset.format.workflow_key:
            continue
        known = workflow_arguments(name)
        for argument in [given for given in taskset.workflow_args if given not in known]:
            close = nearest(argument, known)
            reads = f"It reads: {', '.join(known) or 'none'}."
            meant = f"Did you mean {close}?" if close else reads
            yield f"{key}.workflow_args.{argument} has no effect on {name}. {meant}"


_ALL: tuple[Callable[[Case], Iterator[str]], ...] = (
    _batch,
    _micro_batch,
    _long_rows,
    _positions,
    _greedy,
    _cut,
    _penalty,
    _replay,
    _eval,
    _critic_of_another,
    _without_effect,
    _unread_arguments,
)
