"""What vLLM's own request models read from a hostile body that passed the router, and that no control is unknown."""

import json
import re

import pytest
from pydantic import BaseModel, TypeAdapter
from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest, AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.pooling.embed.protocol import EmbeddingChatRequest, EmbeddingCompletionRequest
from vllm.entrypoints.serve.tokenize.protocol import TokenizeChatRequest, TokenizeCompletionRequest

from coda_router.envelope import ENGINE_CONTROL_FIELDS, read_envelope, without_engine_controls

MESSAGES = {"messages": [{"role": "user", "content": "hi"}]}
REQUESTS: dict[type[BaseModel], dict[str, object]] = {
    ChatCompletionRequest: MESSAGES,
    CompletionRequest: {"prompt": "hi"},
    ResponsesRequest: {"input": "hi"},
    AnthropicMessagesRequest: {**MESSAGES, "max_tokens": 1},
    AnthropicCountTokensRequest: MESSAGES,
    EmbeddingChatRequest: MESSAGES,
    EmbeddingCompletionRequest: {"input": "hi"},
    TokenizeChatRequest: MESSAGES,
    TokenizeCompletionRequest: {"prompt": "hi"},
}
VALUES = {
    "session_id": "another's",
    "priority": -1,
    "cache_salt": "another's",
    "kv_transfer_params": {"do_remote_prefill": True},
    "ec_transfer_params": {"remote": "x"},
    "vllm_xargs": {"session_id": "another's"},
    "request_id": "another's",
}
SUSPICIOUS = re.compile(
    "session|priority|salt|transfer|xargs|extra_args|request_id|tenant|tier|rank|parallel_(size|host)"
)
SAFE = {"service_tier"}
"""``service_tier``: vLLM repeats it in the response and does nothing else with it."""


@pytest.mark.parametrize("model", REQUESTS, ids=lambda model: model.__name__)
def test_vllm_reads_no_control_from_a_body_that_passed_the_router(model: type[BaseModel]):
    controls = "".join(
        f',"{name}":null,"\\u{ord(name[0]):04x}{name[1:]}":{json.dumps(VALUES[name])}' for name in VALUES
    )
    body = (json.dumps({"model": "small", **REQUESTS[model]})[:-1] + controls + "}").encode()
    plain = TypeAdapter(model).validate_python(json.loads(json.dumps({"model": "small", **REQUESTS[model]})))
    passed = without_engine_controls(body, read_envelope(body))
    read = TypeAdapter(model).validate_python(json.loads(passed))
    for name in VALUES.keys() & model.model_fields.keys() - {"request_id"}:
        assert getattr(read, name) == getattr(plain, name)
    assert "another's" not in read.model_dump_json()
    # The same body would have told vLLM something, had it not passed the router.
    if VALUES.keys() & model.model_fields.keys():
        assert "another's" in TypeAdapter(model).validate_python(json.loads(body)).model_dump_json()


@pytest.mark.parametrize("model", REQUESTS, ids=lambda model: model.__name__)
def test_vllm_has_no_field_that_looks_like_a_control_and_is_none(model: type[BaseModel]):
    looks_like_one = {name for name in model.model_fields if SUSPICIOUS.search(name)}
    assert looks_like_one - SAFE <= set(ENGINE_CONTROL_FIELDS)
