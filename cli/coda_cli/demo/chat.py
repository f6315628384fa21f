"""A small chat client: streams a reply and measures it as its user would."""

import http.client
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from coda_cli.errors import StackError

_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model asks for: the tool's name and its arguments as JSON text."""

    call_id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Reply:
    """One answer.

    Attributes:
        request_id: The id sent with the request; the engine's decisions carry it.
        text: What the model said; "" when it only calls tools.
        tool_calls: What it wants to be run.
        prompt_tokens: Tokens of the prompt.
        cached_tokens: Of them those whose KV was still there (prefix reuse).
        output_tokens: Tokens generated.
        ttft_ms: Time to the first token, milliseconds.
        total_ms: Time to the end of the answer, milliseconds.
    """

    request_id: str
    text: str
    tool_calls: tuple[ToolCall, ...]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_ms: float
    total_ms: float


@dataclass
class _Stream:
    """What has arrived of an answer."""

    text: list[str] = field(default_factory=list)
    calls: dict[int, dict[str, str]] = field(default_factory=dict)
    usage: Mapping[str, Any] = field(default_factory=dict)
    first_token_s: float | None = None

    def take(self, event: Mapping[str, Any], now_s: float) -> None:
        """Add one event of the stream."""
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            if delta.get("content") or delta.get("tool_calls"):
                self.first_token_s = self.first_token_s or now_s
            self.text.append(delta.get("content") or "")
            for part in delta.get("tool_calls") or ():
                call = self.calls.setdefault(part.get("index", 0), {"id": "", "name": "", "arguments": ""})
                call["id"] = part.get("id") or call["id"]
                function = part.get("function") or {}
                call["name"] = function.get("name") or call["name"]
                call["arguments"] += function.get("arguments") or ""


@dataclass(frozen=True, slots=True)
class ChatClient:
    """One session with a model behind the router.

    Attributes:
        url: The router's base URL.
        model: Name of the model.
        session: The session's id; requests that carry it are placed where their prefix is.
        api_key: Key that the router asks for; None where it asks for none.
    """

    url: str
    model: str
    session: str
    api_key: str | None = None

    def chat(self, request_id: str, messages: Sequence[Mapping[str, Any]], max_tokens: int, **options: Any) -> Reply:
        """Return the streamed answer to ``messages``; ``options`` are further fields of the request.

        Raises:
            StackError: The router answered with an error, or not at all.
        """
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **options,
        }
        started_s = time.perf_counter()
        stream = _Stream()
        for event in self._events(request_id, json.dumps(body).encode()):
            stream.take(event, time.perf_counter())
        ended_s = time.perf_counter()
        details = stream.usage.get("prompt_tokens_details") or {}
        calls = (ToolCall(call["id"], call["name"], call["arguments"]) for call in stream.calls.values())
        return Reply(
            request_id=request_id,
            text="".join(stream.text),
            tool_calls=tuple(calls),
            prompt_tokens=int(stream.usage.get("prompt_tokens", 0)),
            cached_tokens=int(details.get("cached_tokens") or 0),
            output_tokens=int(stream.usage.get("completion_tokens", 0)),
            ttft_ms=((stream.first_token_s or ended_s) - started_s) * 1_000,
            total_ms=(ended_s - started_s) * 1_000,
        )

    def _events(self, request_id: str, body: bytes) -> Iterator[Mapping[str, Any]]:
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port or 80, timeout=_TIMEOUT_S)
        headers = {"Content-Type": "application/json", "X-Coda-Session": self.session, "X-Request-Id": request_id}
        if self.api_key is not None:
            headers["Authorization"] = f"Bearer {self.api_key}"
        try:
            connection.request("POST", "/v1/chat/completions", body, headers)
            response = connection.getresponse()
            if response.status != 200:
                raise StackError(
                    f"{self.url} answered {response.status}: {response.read(500).decode(errors='replace')}"
                )
            for line in response:
                data = line.removeprefix(b"data:").strip()
                if line.startswith(b"data:") and data != b"[DONE]":
                    yield json.loads(data)
        except (OSError, http.client.HTTPException) as error:
            raise StackError(f"{self.url} cannot be reached: {error or type(error).__name__}") from error
        finally:
            connection.close()
