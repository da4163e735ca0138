"""The demo's reward: one whole sentence with the word that was asked for."""

from trinity.common.rewards import REWARD_FUNCTIONS, RewardFn


@REWARD_FUNCTIONS.register_module("one_sentence")
class OneSentence(RewardFn):
    """1 if the reply ended by itself, has the word, ends with a full stop and has no other."""

    def __call__(self, response: str, truth: str, truncation: str | None) -> dict[str, float]:
        text = response.strip()
        is_sentence = text.endswith(".") and text.count(".") == 1
        is_right = truncation is None and is_sentence and truth.lower() in text.lower()
        return {"accuracy": float(is_right)}
