"""`verifiers_workflow`: one episode of an environment of the `verifiers` package (its v1)."""

import itertools
import os
import sys
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from trinity.common.experience import Experience
from trinity.common.extras import needed
from trinity.common.models.sampling import request_seed
from trinity.common.workflows import Workflow
from trinity.workflows.agent.merge import merge_turns

if TYPE_CHECKING:
    from trinity.common.models import ModelWrapper

_HARNESS = "trinity_chat"
_KEY_VARIABLE = "TRINITY_MODEL_API_KEY"


class VerifiersWorkflow(Workflow):
    """An episode of a `verifiers` environment; rewards and metrics are the environment's own.

    Tasks come from ``storage_type: verifiers``, whose path is the id of a taskset. Every role of
    the environment that names no model of its own is played by the model that is trained; one
    that the environment marks as not trainable leaves no experiences.

    `workflow_args.env` is the environment's config, over defaults that need no container: each
    role has ``runtime: {type: subprocess}`` and talks from this process, unless the taskset brings
    a harness; what else the environment starts, such as tool servers, is up to the package (it uses
    `uv`). `workflow_args.merge_turns` (True): turns of one conversation are one row.
    Needs `enable_history: true` and `enable_openai_api: true` in `explorer.rollout_model`.
    """

    argument_types: ClassVar[Mapping[str, Any]] = {"env": Mapping[str, Any], "merge_turns": bool}
    is_async: ClassVar[bool] = True
    needs_history: ClassVar[bool] = True

    async def run_async(self) -> list[Experience]:
        package = _verifiers()
        row = self.task.raw_task
        given = self.task.workflow_args.get("env", {})
        config, roles = _config(package, dict(row["taskset"]), given)
        players = {role: self._player(place) for place, role in enumerate(roles)}
        for role, player in players.items():
            _play_by(package, getattr(config, role), player)
        environment = package.load_environment(config)
        context = package.ModelContext(
            model=self.model.model_name,
            client=_client(package, self.model),
            sampling=package.Sampling(**self.rollout_args),
        )
        task = _task(environment, str(sorted(row["taskset"].items())), int(row["idx"]))
        async with environment.serving():
            episode = await environment.run_episode(task, context)
        _refuse_failure(episode)
        return self._experiences(episode, players)

    def _player(self, place: int) -> "ModelWrapper":
        """The model for one role, with a record of its own."""
        if place == 0:
            return self.model
        player = self.model.clone_with_isolated_history()
        player.begin_run(request_seed(self.model.run_seed, -place))
        return player

    def _experiences(self, episode: Any, players: "Mapping[str, ModelWrapper]") -> list[Experience]:
        """The replies of the trainable roles, with the reward of their part in the episode."""
        traces: dict[str, list[Any]] = {}
        for trace in episode.traces:
            traces.setdefault(trace.agent.name if trace.agent else "", []).append(trace)
        rows: list[Experience] = []
        for role, player in players.items():
            replies = player.extract_experience_from_history()
            played = traces.get(role) or (traces.get("", []) if len(players) == 1 else [])
            if not replies or not played:
                continue
            if len(played) > 1:
                raise ValueError(
                    f"{role!r} plays {len(played)} times in an episode, so its replies can't be "
                    "told apart. Set the environment so that each role plays once."
                )
            if played[0].agent is None or played[0].agent.trainable:
                rows += self._rewarded(replies, played[0])
        return rows

    def _rewarded(self, replies: list[Experience], trace: Any) -> list[Experience]:
        for step, reply in enumerate(replies):
            reply.eid.step = step
            reply.reward = float(trace.reward)
        num_turns = float(len(replies))
        rows = merge_turns(replies) if self.task.workflow_args.get("merge_turns", True) else replies
        parts = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        numbers = {name: value for name, value in trace.metrics.items() if value is not None}
        for row in rows:
            row.metrics |= {**parts, **numbers, "turns": num_turns}
        return rows


def _config(
    package: Any, taskset: dict[str, Any], given: Mapping[str, Any]
) -> tuple[Any, list[str]]:
    """The environment's config, and the roles in it that the trained model plays."""
    data = {**given, "taskset": {**taskset, **given.get("taskset", {})}}
    kind = package.env_config_type(str(data["taskset"]["id"]), str(data.get("id", "")))
    roles = [
        name
        for name, field in kind.model_fields.items()
        if isinstance(field.default, package.AgentConfig)
        and field.default.model is None
        and not dict(given.get(name, {})).get("model")
    ]
    brings_harness = package.default_harness_id(str(data["taskset"]["id"])) != "bash"
    for role in roles:
        wanted = {"runtime": {"type": "subprocess"}, **dict(given.get(role, {}))}
        if not brings_harness:
            wanted.setdefault("harness", {"id": _HARNESS})
        data[role] = wanted
    return package.resolve_env_config(data), roles


def _play_by(package: Any, agent: Any, player: "ModelWrapper") -> None:
    agent.model = player.model_name
    agent.client = _client(package, player)


def _client(package: Any, model: "ModelWrapper") -> Any:
    """Where the replies come from. The key travels by environment, since configs are recorded."""
    os.environ[_KEY_VARIABLE] = model.api_key
    return package.EvalClientConfig(base_url=f"{model.api_address}/v1", api_key_var=_KEY_VARIABLE)


_streams: dict[str, tuple[Any, list[Any]]] = {}


def _task(environment: Any, key: str, index: int) -> Any:
    """Task ``index`` of the environment's taskset, which is read once a process."""
    stream, known = _streams.setdefault(key, (iter(environment.taskset), []))
    known += itertools.islice(stream, max(0, index + 1 - len(known)))
    if index >= len(known):
        raise ValueError(f"The taskset has {len(known)} tasks; there is no task {index}.")
    return known[index]


def _refuse_failure(episode: Any) -> None:
    errors = [*episode.errors, *(e for trace in episode.traces for e in trace.errors)]
    if not episode.ok:
        texts = [f"{error.type}: {error.message}" for error in errors] or ["no cause given"]
        raise RuntimeError("The episode failed. " + " | ".join(texts))


@cache
def _verifiers() -> Any:
    """The package, with our program for agents among its harnesses."""
    package = needed("verifiers.v1", "verifiers", "verifiers_workflow")
    # verifiers finds a harness as a module of the top level that has its id.
    sys.modules[_HARNESS] = import_module("trinity.workflows.envs.verifiers.chat")
    return package
