"""Recognises a reply in which vLLM's API process says that its engine process has died.

The API process outlives its engine by a moment, and ends what was in flight as if it were whole: a stream with
an error event and ``[DONE]``, any other reply with status 500. Neither is an answer to the request.
"""

import re

_ENGINE_DEAD = b"EngineCore encountered an issue"
_ERROR = (
    rb'\{(?:"type": ?"error", ?)?"error": ?\{'  # Anthropic's has a type around it, and a type before its message
    rb'(?:"type": ?"\w+", ?)?"message": ?"' + _ENGINE_DEAD
)
_DOCUMENT = re.compile(_ERROR)
_EVENT = re.compile(rb"data: " + _ERROR)


def tells_engine_death(body: bytes, *, is_first: bool) -> bool:
    """Return whether a piece of a reply's body is vLLM's message of a dead engine.

    What a client wrote cannot look like it, although vLLM repeats some of it as plain JSON (metadata, tools): only
    the whole document is searched at its start, and within JSON nothing can read as an event's. There ``data: {``
    is in a string, and the quotation mark that follows is escaped, or ends the string before ``error``.

    Args:
        body: The piece.
        is_first: Whether the body begins with it.
    """
    if _ENGINE_DEAD not in body:
        return False
    return _EVENT.search(body) is not None or (is_first and _DOCUMENT.match(body) is not None)
