"""Log records of one line each, whatever text of clients or engines is in them."""

import logging
import re
from typing import Any

_CONTROLS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def one_line(text: str) -> str:
    """Return ``text`` with every character escaped that ends a line or commands a terminal."""
    return _CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


class OneLineFormatter(logging.Formatter):
    """Escapes control characters in messages; only a traceback takes further lines, each of them indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the record's line."""
        return one_line(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        """Return the traceback, no line of which can look like a record."""
        text = super().formatException(ei)
        return "\n".join(f"  {one_line(line)}" for line in text.split("\n"))


def set_up_logging(level: str) -> None:
    """Log to standard error from ``level`` on."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLineFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level, handlers=[handler])
