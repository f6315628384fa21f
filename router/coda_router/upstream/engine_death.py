"""Recognises a reply in which vLLM's API process says that its engine process has died.

The API process outlives its engine by a moment, and ends what was in flight as if it were whole: a stream with
an error event and ``[DONE]``, any other reply with status 500. Neither is an answer to the request.
"""

_ERROR_FIELD = b'"error":'
_ENGINE_DEAD = b"EngineCore encountered an issue"


def tells_engine_death(body: bytes) -> bool:
    """Return whether a piece of a reply's body is vLLM's message of a dead engine.

    Generated text cannot look like it: within a JSON string the field's quotation marks are escaped.
    """
    return _ENGINE_DEAD in body and _ERROR_FIELD in body
