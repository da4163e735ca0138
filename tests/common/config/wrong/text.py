"""Text that is no YAML, and references that lead nowhere."""

import yaml

from tests.common.config.files import BASE
from tests.common.config.wrong.case import Wrong, at

BASE_TEXT = yaml.safe_dump(BASE, sort_keys=False)


def lines(*extra: str) -> str:
    return BASE_TEXT + "\n".join(extra) + "\n"


CASES = [
    Wrong(
        "tab",
        BASE_TEXT.replace("  batch_size", "\tbatch_size"),
        "batch_size",
        "Indent with spaces",
        BASE_TEXT,
    ),
    Wrong("duplicate key", lines("name: again"), "name", "Remove one of the two", BASE_TEXT),
    Wrong(
        "duplicate key inside",
        BASE_TEXT.replace("  batch_size: 4", "  batch_size: 4\n  batch_size: 5"),
        "buffer.batch_size",
        "Remove one of the two",
        BASE_TEXT,
    ),
    Wrong("colon in a value", lines("group: a: b"), "group", "quotes", lines("group: 'a: b'")),
    Wrong("open bracket", lines("group: [a"), "", "Close open quotes and brackets", BASE_TEXT),
    Wrong("list at the top", "- mode: both\n", "", "`mode: both`", BASE_TEXT),
    Wrong(
        "wrong indent",
        BASE_TEXT.replace("  batch_size", "   batch_size"),
        "explorer_input",
        "Align this key",
        BASE_TEXT,
    ),
    at(
        "unset variable",
        "model.model_path",
        "${oc.env:NO_SUCH_VARIABLE}",
        "export NO_SUCH_VARIABLE",
        "${oc.env:NO_SUCH_VARIABLE,/models/tiny}",
    ),
    at(
        "reference to nothing",
        "buffer.train_batch_size",
        "${buffer.batch_sise}",
        "${buffer.batch_size}",
        "${buffer.batch_size}",
    ),
    Wrong("circle", {"name": "${group}", "group": "${name}"}, "name", "plain value", {"name": "a"}),
    at("circle to itself", "project", "${project}", "plain value", "a"),
    at("unknown resolver", "checkpoint_root_dir", "${env:HOME}", "${oc.env:NAME", "${oc.env:HOME}"),
    at("open reference", "name", "${oc.env:HOME", "${oc.env:NAME,default}", "run"),
]
