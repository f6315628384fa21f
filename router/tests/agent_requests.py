"""Requests in the shapes that coding agents send, written by hand, with placeholders for their prompts."""

from typing import Any

BILLING = "x-anthropic-billing-header: cc_version=2.1.197.{build}; cc_entrypoint=sdk-cli;"
MARKER = "<total_tokens>{tokens} tokens left</total_tokens>"
IDENTITY = "You are an agent."
SYSTEM_PROMPT = "Work in /home/user/project.\nUse the tools."


def text(content: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **fields}


def cached(content: str) -> dict[str, Any]:
    return text(content, cache_control={"type": "ephemeral"})


def marker_message(tokens: int) -> dict[str, Any]:
    return {"role": "system", "content": MARKER.format(tokens=tokens)}


def claude_code(turns: int = 1, *, build: str = "df4", session: str = "1", counts_down: bool = False) -> dict[str, Any]:
    """Return the request of a Claude Code session at its n-th turn: marks move, a past block becomes a string."""
    environment = {"role": "system", "content": "Date: today"}
    messages: list[dict[str, Any]] = []
    for turn in range(turns):
        is_last = turn == turns - 1
        if turn == 0:
            asked: Any = [text("<system-reminder>notes</system-reminder>"), (cached if is_last else text)("say hi")]
        else:
            asked = [{"tool_use_id": f"toolu_{turn}", "type": "tool_result", "content": f"hi {turn}\n"}]
        messages.append({"role": "user", "content": asked})
        if turn == 0:
            messages.append(environment)
        if counts_down:
            messages.append(marker_message(15_000_000 - 411 * turn))
        if not is_last:
            call = {"type": "tool_use", "id": f"toolu_{turn + 1}", "name": "Bash", "input": {"command": "echo hi"}}
            messages.append({"role": "assistant", "content": [text("Running it."), call]})
    return {
        "model": "small",
        "messages": messages,
        "system": [text(BILLING.format(build=build)), cached(IDENTITY), cached(SYSTEM_PROMPT)],
        "tools": [{"name": "Bash", "description": "runs", "input_schema": {"type": "object"}}],
        "metadata": {"user_id": f'{{"session_id":"{session}"}}'},
        "max_tokens": 32_000,
        "stream": True,
    }


def through_a_gateway(turns: int, *, build: str = "df4") -> dict[str, Any]:
    """Return the same session as a gateway passes it on as chat that puts all system texts into the first message."""
    system = "\n\n".join([BILLING.format(build=build), IDENTITY, SYSTEM_PROMPT])
    messages: list[dict[str, Any]] = [{"role": "user", "content": "say hi"}]
    for turn in range(1, turns):
        call = {"id": f"call_{turn}", "type": "function", "function": {"name": "Bash", "arguments": "{}"}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": f"hi {turn}"})
    for turn in range(turns):
        system += "\n\n" + MARKER.format(tokens=15_000_000 - 411 * turn)
    return {"model": "small", "messages": [{"role": "system", "content": system}, *messages], "stream": True}
