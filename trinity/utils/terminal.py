"""Text that others wrote, for a terminal: nothing in it can move the cursor or change a title."""

_KEPT = "\n\t"
_CONTROLS = [*range(0x20), 0x7F, *range(0x80, 0xA0)]
_SHOWN = {code: f"\\x{code:02x}" for code in _CONTROLS if chr(code) not in _KEPT}


def harmless(text: str) -> str:
    r"""``text`` with control characters written out, as in ``\x1b[2J``."""
    return text.translate(_SHOWN)
