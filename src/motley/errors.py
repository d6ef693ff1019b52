"""The one error that a user is meant to read."""


class MotleyError(Exception):
    """Something the user can put right.

    The message says the cause, what was found and the fix, in that order. Scripts
    print it as one line without a traceback; every other exception keeps its own.
    """
