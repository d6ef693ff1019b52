"""Errors whose messages are written for users."""

from motley.text import typed_command


class MotleyError(Exception):
    """An error that the user can correct.

    The message states the cause, then what was found, then the fix. Scripts print the message as
    one line without a traceback. Other exceptions are printed with a traceback.
    """

    def __init__(self, message: object = "") -> None:
        """Store the message, with its commands in the form that works in this installation."""
        super().__init__(typed_command(str(message)))


class NoMemoryError(MotleyError):
    """An error because not even the smallest micro-batch fits into memory."""


class NotFiniteError(MotleyError):
    """An error because a loss or a gradient is infinite or NaN, so that training must end."""


class DeviceError(MotleyError):
    """An error because a device computed two different results from the same input."""


class HostTrouble(MotleyError):  # noqa: N818 - a finding, as often as a fault
    """A fault that prevents one host from taking part.

    Attributes:
        kind: name of the fault in one to three words, for a table, such as ``no answer`` or
            ``host key changed``.
        found: sentence that describes what was found.
        fix: sentence that explains the fix.
    """

    def __init__(self, kind: str, found: str, fix: str) -> None:
        super().__init__(f"{found}; {fix}")
        self.kind = kind
        self.found, self.fix = typed_command(found), typed_command(fix)
