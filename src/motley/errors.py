"""The errors that a user is meant to read."""

from motley.text import typed_command


class MotleyError(Exception):
    """Something the user can put right.

    The message says the cause, what was found and the fix, in that order. Scripts
    print it as one line without a traceback; every other exception keeps its own.
    """

    def __init__(self, message: object = "") -> None:
        """Write the commands in a message as a user types them here."""
        super().__init__(typed_command(str(message)))


class NoMemoryError(MotleyError):
    """Not even the smallest piece of work fits in memory."""


class NotFiniteError(MotleyError):
    """A loss or a gradient is infinite or no number, and training cannot go on."""


class DeviceError(MotleyError):
    """A device has computed what it does not compute when it is asked again."""


class HostTrouble(MotleyError):  # noqa: N818 - a finding, as often as a fault
    """One host cannot take part.

    Attributes:
        kind: in one to three words, for a table: ``no answer``, ``host key changed``.
        found, fix: in a sentence each.
    """

    def __init__(self, kind: str, found: str, fix: str) -> None:
        super().__init__(f"{found}; {fix}")
        self.kind = kind
        self.found, self.fix = typed_command(found), typed_command(fix)
