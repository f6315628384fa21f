"""Completion requests of exactly known size: prompts are token ids, and generation never stops early."""

import json
from collections.abc import Sequence

import aiohttp


def completion_body(model: str, prompt: Sequence[int], output_tokens: int) -> bytes:
    """Return a completion request of exactly these prompt tokens and output length."""
    return json.dumps(
        {"model": model, "prompt": prompt, "max_tokens": output_tokens, "ignore_eos": True, "temperature": 0}
    ).encode()


async def complete(client: aiohttp.ClientSession, body: bytes) -> int:
    """Send a completion request and return how many tokens were generated.

    Raises:
        aiohttp.ClientError: The engine did not answer, or refused.
    """
    async with client.post("/v1/completions", data=body, headers={"Content-Type": "application/json"}) as reply:
        reply.raise_for_status()
        return int((await reply.json())["usage"]["completion_tokens"])
