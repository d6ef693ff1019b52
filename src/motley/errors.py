"""Errors whose messages are written for users."""

from motley.text import typed_command


class MotleyError(Exception):
    """An error that the user can correct.

    The message has the cause, the finding and the fix, in this order. Scripts
    print it as one line without a traceback. Every other exception keeps its traceback.
    """

    def __init__(self, message: object = "") -> None:
        """Store the message, with its commands as a user types them here."""
        super().__init__(typed_command(str(message)))


class NoMemoryError(MotleyError):
    """Not even the smallest piece of work fits in memory."""


class NotFiniteError(MotleyError):
    """A loss or a gradient is infinite or NaN, and training cannot continue."""


class DeviceError(MotleyError):
    """A device has computed a result that it does not compute in a second attempt."""


class HostTrouble(MotleyError):  # noqa: N818 - a finding, as often as a fault
    """A fault of one host, because of which it cannot take part.

    Attributes:
        kind: name of the fault in one to three words, for a table: ``no answer``,
            ``host key changed``.
        found: a sentence on the finding.
        fix: a sentence on the fix.
    """

    def __init__(self, kind: str, found: str, fix: str) -> None:
        super().__init__(f"{found}; {fix}")
        self.kind = kind
        self.found, self.fix = typed_command(found), typed_command(fix)
