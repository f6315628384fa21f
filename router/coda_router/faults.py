"""What can be wrong with an engine's reply: one value for the log and the metric label."""

from enum import StrEnum


class EngineFault(StrEnum):
    """Why a reply was not taken, or not to its end."""

    UNREACHABLE = "Unreachable"
    """No connection could be made."""

    CLOSED = "Closed"
    """The connection ended before the reply did."""

    NOT_HTTP = "NotHttp"
    """The bytes are not HTTP/1.1: wrong framing, both lengths, a wrong chunk size, NUL bytes in a header."""

    NO_BODY = "NoBody"
    """Heads, interim replies, trailers or framing without end, and no body between them."""

    STATUS = "Status"
    """A status that HTTP does not have."""

    CONTENT_TYPE = "ContentType"
    """A stream was asked for, and what came is neither events nor JSON."""

    HALF_EVENT = "HalfEvent"
    """A stream of events that ended in the middle of one."""

    TOO_MUCH = "TooMuch"
    """More than the reply that was announced; the reply itself is good."""

    ENGINE_DEAD = "EngineDead"
    """The API process says that its engine died."""

    SILENT = "Silent"
    """Nothing came for too long, and the engine did not move on either."""
