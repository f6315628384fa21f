"""Sees replies as vLLM's own parsers have parsed them: nothing is parsed twice, nothing of the reply changes.

All of vLLM's protocols make one parser for each reply and ask it for tool calls, whole (``parse``) or piece by
piece (``parse_delta``). The serving objects' two methods through which that goes are shadowed on the instance:
the one that makes the parser and the one that finds a request's session id.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from coda_engine.policy.tool_use import MAX_ARGUMENT_CHARS, ToolUse
from coda_engine.vllm_adapter.log import logger

PARSER_MAKERS = ("_make_parser", "_make_response_parser")
"""Methods by which chat (with messages) and responses make a reply's parser."""

_SESSION_FINDER = "_get_session_id"
_MAX_CALLS = 16

TurnEnded = Callable[[str, Sequence[ToolUse]], None]
"""Told a session id, as the engine gets it, and what the session's reply calls; nothing: a final answer."""


class ReplyWatch:
    """Watches the replies of one serving object.

    A reply is told of when it has been parsed to its end, if its request has a session id and offered tools:
    without any a final answer says nothing about what comes next.
    """

    def __init__(self, told: TurnEnded) -> None:
        self._told = told
        self._sessions = _Sessions()
        self._failed = False

    def install(self, serving: Any) -> bool:
        """Shadow the methods of ``serving``; return False, and change nothing, if it has no such methods."""
        maker = next((name for name in PARSER_MAKERS if hasattr(serving, name)), None)
        if maker is None or not hasattr(serving, _SESSION_FINDER):
            return False
        make, find = getattr(serving, maker), getattr(serving, _SESSION_FINDER)

        def find_and_note(request: Any, raw_request: Any) -> str | None:
            session_id: str | None = find(request, raw_request)
            self._guarded(self._sessions.put, request, session_id)
            return session_id

        def make_and_watch(request: Any, *args: Any, **kwargs: Any) -> Any:
            parser = make(request, *args, **kwargs)
            if parser is not None and getattr(request, "tools", None):
                self._guarded(self._watch, parser)
            return parser

        setattr(serving, _SESSION_FINDER, find_and_note)
        setattr(serving, maker, make_and_watch)
        return True

    def _watch(self, parser: Any) -> None:
        parse, parse_delta = parser.parse, parser.parse_delta
        calls = _Calls()

        def parse_and_tell(model_output: str, request: Any, *args: Any, **kwargs: Any) -> Any:
            result = parse(model_output, request, *args, **kwargs)
            self._guarded(self._tell_whole, request, result)
            return result

        def parse_delta_and_tell(*args: Any, **kwargs: Any) -> Any:
            delta = parse_delta(*args, **kwargs)
            self._guarded(self._tell_delta, calls, delta, args, kwargs)
            return delta

        parser.parse, parser.parse_delta = parse_and_tell, parse_delta_and_tell

    def _tell_whole(self, request: Any, result: tuple[Any, Any, Any]) -> None:
        calls = result[2] or []
        self._tell(request, [ToolUse.of(call.name, call.arguments or "") for call in calls[:_MAX_CALLS]])

    def _tell_delta(self, calls: "_Calls", delta: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if delta is not None and delta.tool_calls:
            calls.add(delta.tool_calls)
        if kwargs.get("finished"):
            self._tell(kwargs["request"] if "request" in kwargs else args[2], calls.uses())

    def _tell(self, request: Any, uses: list[ToolUse]) -> None:
        session_id = self._sessions.get(request)
        if session_id:
            self._told(session_id, uses)

    def _guarded(self, act: Callable[..., None], *args: Any) -> None:
        """Run ``act``; a reply must not suffer from an error in it."""
        try:
            act(*args)
        except Exception:
            if not self._failed:
                logger.exception("coda: a reply's tool calls could not be seen; further such errors are not logged")
            self._failed = True


class _Calls:
    """Tool calls of a streamed reply, put together from their pieces as far as needed."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._arguments: dict[int, str] = {}

    def add(self, pieces: Sequence[Any]) -> None:
        for piece in pieces:
            number, function = piece.index, piece.function
            if function is None or (number not in self._names and len(self._names) >= _MAX_CALLS):
                continue
            self._names[number] = self._names.get(number, "") or function.name or ""
            collected = self._arguments.get(number, "")
            if function.arguments and len(collected) < MAX_ARGUMENT_CHARS:
                self._arguments[number] = (collected + function.arguments)[:MAX_ARGUMENT_CHARS]

    def uses(self) -> list[ToolUse]:
        return [ToolUse.of(name, self._arguments.get(number, "")) for number, name in self._names.items()]


class _Sessions:
    """Session ids of requests in progress, by the request object; entries go with their requests."""

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Any], str]] = {}

    def put(self, request: Any, session_id: str | None) -> None:
        if not session_id:
            return
        key = id(request)
        self._entries[key] = (weakref.ref(request, lambda _: self._entries.pop(key, None)), session_id)

    def get(self, request: Any) -> str:
        entry = self._entries.get(id(request))
        return entry[1] if entry is not None and entry[0]() is request else ""
