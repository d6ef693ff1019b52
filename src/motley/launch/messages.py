"""What ranks say to each other over the supervisor: a JSON object a line."""

import json
from typing import Any

# Of one message. The longest are tracebacks, which motley.faults cuts to a tenth of it.
MOST_BYTES = 1 << 20
_BEGIN = (b"Fatal Python error", b"Timeout (")  # what the fault handler writes, of a crash or not
_MOST_WORDS = 16_384  # bytes; Python's fault handler says a tenth of it for each thread


def encode(message: dict[str, Any]) -> bytes:
    """One line."""
    return json.dumps(message).encode() + b"\n"


class Messages:
    """The messages of one connection, out of pieces of bytes.

    A line that is too long or no JSON object is dropped: it takes no memory, and ends nothing.

    Attributes:
        last_words: lines that are no JSON object, the first few of those that nothing followed;
            Python's fault handler writes some into the connection of a rank that crashes, or that
            is busy (see motley.launch.fault_handler).
    """

    def __init__(self) -> None:
        self.last_words = ""
        self._rest = b""
        self._dropping = False  # the rest of a line that was too long

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """What is complete now."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if lines and self._dropping:
            lines, self._dropping = lines[1:], False
        if len(self._rest) > MOST_BYTES:
            self._rest, self._dropping = b"", True
        found = [(line, _decode(line)) for line in lines if len(line) <= MOST_BYTES]
        for line, message in found:
            if isinstance(message, dict) or line.startswith(_BEGIN):
                self.last_words = ""
            if not isinstance(message, dict) and len(self.last_words) + len(line) < _MOST_WORDS:
                self.last_words += line.decode(errors="replace") + "\n"
        return [message for _, message in found if isinstance(message, dict)]


def _decode(line: bytes) -> Any:
    try:
        return json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
