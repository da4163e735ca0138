"""What commands share: the error of arguments that don't fit."""

from trinity.common.errors import TrinityError


class UsageError(TrinityError):
    """The arguments don't fit."""

    exit_code = 2
