"""Whether two mathematical answers mean the same: text, number, then `math_verify`.

Nothing here sets a signal or a timer, so it works in threads; a deadline is the caller's.
"""

import logging
import re
from fractions import Fraction
from functools import lru_cache

_MAX_LENGTH = 2000  # longer "answers" are no answers, and parsing them may take minutes
_MAX_EXPRESSION = 300
_MAX_DIGITS = 100
_NUMBER = re.compile(r"[-+]?(?=\.?\d)(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?(?:[eE][-+]?\d{1,3})?")
_MIXED = re.compile(r"(-?)(\d+)\s*\\[dt]?frac\{(\d+)\}\{(\d+)\}")
_FINAL = re.compile(r"####\s*(.+)")
_TAG = re.compile(r"</?[a-zA-Z]+>|\*\*")
_TEXT_COMMAND = re.compile(
    r"\\(?:text|mathrm|mbox|operatorname|begin|end)\s*\{[^{}]*\}|\\[a-zA-Z]+"
)
_WORD = re.compile(r"[^\W\d_]{3,}")
_WRAPPED = re.compile(r"\\(?:text|mathrm|mathbf|textbf|boxed)\s*\{([^{}\\]*)\}")
_SHORT_WORDS = re.compile(
    r"(?i)(?<![^\W\d_])(?:it|is|so|we|of|to|or|at|in|on|be|as|if|no)(?![^\W\d_])"
)
_SPACING = re.compile(r"\\[,!;: ]|~")


def is_equal(answer: str, truth: object) -> bool:
    """Whether ``answer`` (perhaps with words around it) is ``truth``."""
    right = final_answer(truth)
    quick = quick_verdict(answer, right)
    return is_equal_by_algebra(answer, right) if quick is None else quick


def final_answer(truth: object) -> str:
    """What follows the last ``####`` of a worked solution (as in GSM8K), else all of it."""
    text = str(truth)
    finals = _FINAL.findall(text)
    return (finals[-1] if finals else text).strip()


def quick_verdict(answer: str, right: str) -> bool | None:
    """The verdict where it takes no algebra: same text, or both plain numbers; else None."""
    given, wanted = _bare(answer), _bare(right)
    if not given or not wanted:
        return False
    if given == wanted or (given.isalpha() and given.casefold() == wanted.casefold()):
        return True
    numbers = _as_number(given), _as_number(wanted)
    if numbers[0] is not None and numbers[1] is not None:
        return numbers[0] == numbers[1]
    return None


def is_equal_by_algebra(answer: str, right: str) -> bool:
    """The verdict of `math_verify`."""
    load_algebra()
    from math_verify import parse, verify

    gold = parse(_as_latex(right), parsing_timeout=None)
    if not gold:
        return False
    answer = _TAG.sub(" ", answer[-_MAX_LENGTH:])
    given = parse(_as_latex(answer), parsing_timeout=None) if _is_expression(answer) else []
    given = given or parse(answer, parsing_timeout=None)
    return bool(given) and bool(verify(gold, given, timeout_seconds=None))


@lru_cache
def load_algebra() -> None:
    """Import `math_verify`, which takes most of a second."""
    import math_verify

    for part in ("parser", "grader"):  # each call would warn that deadlines are the caller's
        logging.getLogger(f"{math_verify.__name__}.{part}").setLevel(logging.ERROR)


def _is_expression(text: str) -> bool:
    """Whether the text is a formula alone: no sentence, no mark of where the answer stands."""
    has_marks = "$" in text or "\\boxed" in text or "\\(" in text or "\\[" in text
    plain = _TEXT_COMMAND.sub(" ", text)
    is_sentence = bool(_WORD.search(plain) or _SHORT_WORDS.search(plain))
    return not has_marks and not is_sentence and len(text) < _MAX_EXPRESSION


def _as_latex(text: str) -> str:
    return text if "$" in text or "\\boxed" in text else f"${_without_mixed(text)}$"


def _without_mixed(text: str) -> str:
    r"""``5\frac{1}{2}`` means a sum here; in LaTeX it reads as a product."""
    return _MIXED.sub(r"\1(\2+\\frac{\3}{\4})", text)


def _bare(text: str) -> str:
    text = _TAG.sub("", text[-_MAX_LENGTH:]).strip().replace("−", "-").replace("\\%", "%")
    text = _SPACING.sub("", text.replace("{,}", ","))
    text = text.strip("$").strip()
    if wrapped := _WRAPPED.fullmatch(text):
        text = wrapped[1].strip()
    return " ".join(text.rstrip(".").split())


def _as_number(text: str) -> Fraction | None:
    text = text.replace("\\$", "").replace("$", "").replace("- ", "-").strip()
    has_digits = any(map(str.isdigit, text))
    if has_digits and len(text) < _MAX_DIGITS and _NUMBER.fullmatch(text):
        return Fraction(text.replace(",", ""))
    return None
