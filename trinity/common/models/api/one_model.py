"""`OneModel`: a model at the root of an API, which remembers conversations only so long."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trinity.common.models.wrapper import ModelWrapper

_MAX_REQUESTS = 2000  # whose tokens are known together; then a new run is begun


class OneModel(Mapping[str, "ModelWrapper"]):
    """What `ApiServer` is to serve where there is one model, and no run of it ever ends.

    After so many requests a new run is begun, which knows the tokens of no conversation: else they
    would fill the memory.

    Args:
        model: It is best without history, which nobody takes here.
        seed: Of the runs, by their number.
    """

    def __init__(self, model: "ModelWrapper", seed: int = 0) -> None:
        self._model, self._seed = model, seed
        self._num_requests = 0

    def __getitem__(self, path: str) -> "ModelWrapper":
        if path:
            raise KeyError(path)
        run, place = divmod(self._num_requests, _MAX_REQUESTS)
        self._num_requests += 1
        if run and place == 0:
            self._model = self._model.clone_with_isolated_history()
            self._model.begin_run(self._seed + run)
        return self._model

    def __iter__(self) -> Iterator[str]:
        return iter([""])

    def __len__(self) -> int:
        return 1
