"""What a prompt must be for an engine to take it."""

from collections.abc import Sequence


def room_behind(prompt_ids: Sequence[int], max_model_len: int) -> int:
    """New tokens that fit behind a prompt; `ValueError` if it is empty or leaves no room."""
    room = max_model_len - len(prompt_ids)
    if not len(prompt_ids) or room < 1:
        raise ValueError(
            f"The prompt has {len(prompt_ids)} tokens; it must have at least 1 and at most "
            f"max_model_len - 1 = {max_model_len - 1}."
        )
    return room


def require_known(token_ids: Sequence[int], vocabulary_size: int) -> None:
    """`ValueError` for an id that the model has no token for: it would end what else is sampled."""
    if len(token_ids):
        require_bounds_known(min(token_ids), max(token_ids), vocabulary_size)


def require_bounds_known(least: int, most: int, vocabulary_size: int) -> None:
    """`require_known` of ids that are known to lie from ``least`` to ``most``, both among them."""
    if least < 0 or most >= vocabulary_size:
        wrong = least if least < 0 else most
        raise ValueError(
            f"There is no token {wrong}: the ids of the model are 0 to {vocabulary_size - 1}. "
            "Whatever made it has another tokenizer than the model."
        )
