"""Whether two mathematical answers mean the same: text, number, then `math_verify`.

Nothing here sets a signal or a timer, so it works in threads; a deadline is the caller's.
"""

import re
from fractions import Fraction

_MAX_LENGTH = 2000  # longer "answers" are no answers, and parsing them may take minutes
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d+)?")
_FINAL = re.compile(r"####\s*(.+)")


def is_equal(answer: str, truth: object) -> bool:
    """Whether ``answer`` (perhaps with words around it) is ``truth``."""
    right = final_answer(str(truth))
    given = answer.strip()
    if not given or not right:
        return False
    quick = quick_verdict(given, right)
    return is_equal_by_algebra(given, right) if quick is None else quick


def final_answer(truth: str) -> str:
    """What follows the last ``####`` of a worked solution (as in GSM8K), else all of it."""
    finals = _FINAL.findall(truth)
    return (finals[-1] if finals else truth).strip()


def quick_verdict(given: str, right: str) -> bool | None:
    """The verdict where it takes no algebra: same text, or both plain numbers; else None."""
    given, right = _bare(given), _bare(right)
    if given == right:
        return True
    numbers = _as_number(given), _as_number(right)
    if numbers[0] is not None and numbers[1] is not None:
        return numbers[0] == numbers[1]
    return None


def is_equal_by_algebra(given: str, right: str) -> bool:
    """The verdict of `math_verify`."""
    from math_verify import parse, verify

    if len(given) > _MAX_LENGTH:
        given = given[-_MAX_LENGTH:]
    gold = parse(_as_latex(right), parsing_timeout=None)
    if not gold:
        return False
    answers = parse(given, parsing_timeout=None) or parse(_as_latex(given), parsing_timeout=None)
    return bool(answers) and bool(verify(gold, answers, timeout_seconds=None))


def _as_latex(text: str) -> str:
    return text if "$" in text or "\\boxed" in text else f"${text}$"


def _bare(text: str) -> str:
    return " ".join(text.strip().strip("$").strip().rstrip(".").split())


def _as_number(text: str) -> Fraction | None:
    text = text.replace("\\$", "").replace("$", "").strip()
    if text and _NUMBER.fullmatch(text) and any(map(str.isdigit, text)) and len(text) < 100:
        return Fraction(text.replace(",", ""))
    return None
