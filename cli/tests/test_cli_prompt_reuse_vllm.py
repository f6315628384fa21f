"""What clients are told about reused prompts, and which differences between requests reach a prompt, on real vLLM."""

import json
import os
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from coda_cli.model.catalog import default_model_dir
from coda_cli.up.machine import free_ports

pytestmark = pytest.mark.vllm

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "smollm2-cpu.yaml"
START_LIMIT_S = 600.0
MODEL = "smollm2-135m-instruct"
BILLING = "x-anthropic-billing-header: cc_version=2.1.197.{build}; cc_entrypoint=cli;"


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One engine and one router, as ``coda up`` starts them."""
    folder = tmp_path_factory.mktemp("reuse")
    document = yaml.safe_load(EXAMPLE.read_text())
    (port,) = free_ports(23_300, 1)
    document["spec"]["router"]["port"] = port
    document["spec"]["profiling"] = {"mode": "Disabled"}
    del document["spec"]["kvShadow"]
    # Another name: its state is not that of another test's stack.
    document["metadata"]["name"] = "reuse"
    (folder / "cluster.yaml").write_text(yaml.safe_dump(document))
    own = {name: value for name, value in os.environ.items() if not name.startswith(("CODA_", "VLLM_", "OMP_"))}
    environment = own | {
        "CODA_MODEL_DIR": str(default_model_dir(os.environ)),
        "XDG_STATE_HOME": str(folder / "state"),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    output = folder / "up.log"
    with output.open("wb") as log:
        command = [sys.executable, "-m", "coda_cli", "up", "-f", str(folder / "cluster.yaml")]
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        deadline_s = time.monotonic() + START_LIMIT_S
        while "serves at" not in output.read_text():
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < deadline_s, output.read_text()
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(30)


def unique_prompt() -> str:
    """Return some hundred tokens, of which no other prompt has the first."""
    name = uuid.uuid4().hex
    return " ".join(f"{name}: line {line} of the notes says that file {line * 7} was read." for line in range(20))


def chat(prompt: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": 4}


def completions(prompt: str) -> dict[str, Any]:
    return {"prompt": prompt, "max_tokens": 4}


def responses(prompt: str, item_id: str = "msg_1") -> dict[str, Any]:
    content = [{"type": "input_text", "text": prompt}]
    item = {"type": "message", "id": item_id, "role": "user", "content": content}
    return {"input": [item], "max_output_tokens": 16, "store": False}


def messages(content: Any, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], "max_tokens": 4, **fields}


def marked(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}


def plain(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


BODIES: dict[str, Callable[[str], dict[str, Any]]] = {
    "/v1/chat/completions": chat,
    "/v1/completions": completions,
    "/v1/responses": responses,
    "/v1/messages": messages,
}


def ask(url: str, path: str, body: dict[str, Any], *, stream: bool = False) -> dict[str, Any]:
    """Return the usage that the reply, or the last event of it that has one, reports."""
    body = {"model": MODEL, "temperature": 0, **body, "stream": stream}
    if stream and path.endswith("completions"):
        body["stream_options"] = {"include_usage": True}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), {"content-type": "application/json"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=300) as reply:  # noqa: S310
        text = reply.read().decode()
    if not stream:
        usage: dict[str, Any] = json.loads(text)["usage"]
        return usage
    data = [line.removeprefix("data:").strip() for line in text.splitlines() if line.startswith("data:")]
    events = [json.loads(event) for event in data if event != "[DONE]"]
    usages: list[dict[str, Any]] = [event.get("usage") or event.get("response", {}).get("usage") for event in events]
    return [usage for usage in usages if usage][-1]


def cached_tokens(path: str, usage: dict[str, Any]) -> int:
    """Return the prompt tokens that were not computed again; fails where the protocol's field is absent."""
    if path == "/v1/messages":
        return int(usage["cache_read_input_tokens"])
    details = "input_tokens_details" if path == "/v1/responses" else "prompt_tokens_details"
    return int(usage[details]["cached_tokens"])


def prompt_tokens(path: str, usage: dict[str, Any]) -> int:
    """Return all prompt tokens; Anthropic's ``input_tokens`` leaves out those read from the cache or written to it."""
    if path == "/v1/messages":
        cached = usage["cache_read_input_tokens"] + usage.get("cache_creation_input_tokens", 0)
        return int(usage["input_tokens"] + cached)
    return int(usage["input_tokens" if path == "/v1/responses" else "prompt_tokens"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", BODIES)
def test_every_protocol_says_how_much_of_a_prompt_was_reused(url: str, path: str, stream: bool) -> None:
    body = BODIES[path](unique_prompt())
    first, second = ask(url, path, body, stream=stream), ask(url, path, body, stream=stream)
    assert cached_tokens(path, first) < cached_tokens(path, second) < prompt_tokens(path, second)
    assert cached_tokens(path, second) > prompt_tokens(path, second) // 2
    assert prompt_tokens(path, first) == prompt_tokens(path, second)


@pytest.mark.parametrize(
    ("path", "make_first", "make_second"),
    [
        pytest.param("/v1/chat/completions", chat, lambda p: chat([marked(p)]), id="chat block and mark"),
        pytest.param("/v1/messages", lambda p: messages([marked(p)]), messages, id="block becomes string"),
        pytest.param(
            "/v1/messages",
            lambda p: messages([plain(p), marked("go")]),
            lambda p: messages([marked(p), plain("go")]),
            id="mark moves",
        ),
        pytest.param(
            "/v1/messages",
            lambda p: messages("go", system=[plain(BILLING.format(build="df4")), marked(p)]),
            lambda p: messages("go", system=[plain(BILLING.format(build="c16")), marked(p)]),
            id="billing block",
        ),
        pytest.param(
            "/v1/messages",
            lambda p: messages("go", system=[plain(f"{BILLING.format(build='df4')}\n{p}")]),
            lambda p: messages("go", system=p),
            id="billing line before the prompt",
        ),
        pytest.param("/v1/responses", responses, lambda p: responses(p, "msg_other"), id="item id"),
    ],
)
def test_a_difference_that_is_no_part_of_the_prompt_costs_no_reuse(
    url: str, path: str, make_first: Any, make_second: Any
) -> None:
    prompt = unique_prompt()
    first = ask(url, path, make_first(prompt))
    again = ask(url, path, make_first(prompt))
    second = ask(url, path, make_second(prompt))
    assert prompt_tokens(path, first) == prompt_tokens(path, again) == prompt_tokens(path, second)
    assert cached_tokens(path, first) < cached_tokens(path, again) == cached_tokens(path, second)
