"""Time to the first token of single requests on an otherwise idle engine."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

REQUEST_LIMIT_S = 120.0


@dataclass(frozen=True, slots=True)
class FirstToken:
    """One request's first token.

    Attributes:
        ms: Time from sending the request to its first token, milliseconds.
        cached_tokens: Prompt tokens that were not computed.
        token_ids: The whole reply.
    """

    ms: float
    cached_tokens: int
    token_ids: tuple[int, ...]


async def ask(client: aiohttp.ClientSession, model: str, prompt: Sequence[int], output_tokens: int = 1) -> FirstToken:
    """Send a request and return its first token.

    Raises:
        aiohttp.ClientError: The engine refused, or did not answer.
        TimeoutError: Not within REQUEST_LIMIT_S.
        ValueError: There was no token in the answer.
    """
    body = json.dumps(
        {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
    ).encode()
    first_ms: float | None = None
    cached, token_ids = 0, list[int]()
    started_s = time.perf_counter()
    timeout = aiohttp.ClientTimeout(total=REQUEST_LIMIT_S)
    headers = {"Content-Type": "application/json"}
    async with client.post("/v1/completions", data=body, headers=headers, timeout=timeout) as reply:
        reply.raise_for_status()
        async for line in reply.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            for choice in chunk.get("choices", ()):
                token_ids += choice.get("token_ids") or []
            if first_ms is None and token_ids:
                first_ms = (time.perf_counter() - started_s) * 1_000
            details = (chunk.get("usage") or {}).get("prompt_tokens_details") or {}
            cached = max(cached, int(details.get("cached_tokens") or 0))
    if first_ms is None:
        raise ValueError("the engine answered without a token")
    return FirstToken(first_ms, cached, tuple(token_ids))
