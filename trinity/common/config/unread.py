"""Keys that no part of this version reads yet. A run that sets one is refused, not run without it.

A test keeps the table exact: a key that nothing reads has to be here, and one that something reads
must not be.
"""

from __future__ import annotations

from fnmatch import fnmatch

from trinity.common.config.root import Config
from trinity.common.errors import Problem

UNREAD: dict[str, tuple[object, str]] = {
    "explorer.*.nnodes": (1, "An engine stays on one machine."),
    "explorer.*.weight_sync_buffer_size": (1024, "Buckets have a fixed size."),
    "explorer.max_inflight_batches": (2, "One batch is under way at a time."),
    "synchronizer.wait_for_checkpoint": (False, "The explorer starts with the weights it has."),
}
"""Key, with ``*`` for any part -> the value that changes nothing, and what is so."""


def find_unread(config: Config) -> list[Problem]:
    """The settings of ``config`` that nothing would act on."""
    found: dict[str, Problem] = {}
    for key, value in config.flatten().items():
        for pattern, (harmless, why) in UNREAD.items():
            if fnmatch(key, pattern) and value not in (harmless, [], {}):
                whole = ".".join(key.split(".")[: pattern.count(".") + 1])
                shown = whole if pattern.endswith("*") else key
                line = config.source.line(shown)
                found.setdefault(
                    shown,
                    Problem(shown, f"Nothing reads this yet. {why}", "Remove it.", value, line),
                )
    return list(found.values())
