"""Faults of an engine during measurement, played by a scripted one on a real socket (real vLLM: cli/tests)."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from coda_engine.contract.errors import ProfileRefusedError
from coda_engine.contract.profile import FullKey, Profile, SpecKey
from coda_engine.contract.reasons import Reason
from coda_engine.contract.snapshot import EngineSnapshot, StepCounters
from coda_engine.profiling import EngineBusyError, EngineClient, EngineRequestError, measure_profile
from coda_engine.profiling import measure as measure_module

KEY = FullKey(
    spec=SpecKey(model="m"), model_digest="d", hardware="h", vllm_version="0.32.0", adapter_digest="a", block_size=32,
    attention_backend="CPU_ATTN", graph_mode="none", max_batched_tokens=512, max_context_tokens=2048,
)  # fmt: skip


@dataclass
class ScriptedEngine:
    """An engine whose prefill takes time in proportion to the prompt, and that can be disturbed."""

    ms_per_token: float = 0.02
    busy_requests: int = 0
    disturb_samples: set[int] = field(default_factory=set)
    vocabulary: int = 100_000
    put_status: int = 200
    token: str = ""
    prompts: list[list[int]] = field(default_factory=list)
    steps: StepCounters = field(default_factory=StepCounters)

    def answer(self, method: str, path: str, headers: Any, body: bytes) -> tuple[int, bytes]:
        if self.token and path.startswith("/coda/") and headers.get("Authorization") != f"Bearer {self.token}":
            return 401, b"{}"
        match method, path:
            case "GET", "/coda/keys":
                return 200, json.dumps({"spec_key_digest": "x", "full_key": KEY.model_dump()}).encode()
            case "GET", "/coda/snapshot":
                return 200, self._snapshot().to_json()
            case "GET", "/v1/models":
                return 200, b'{"data": [{"id": "m"}]}'
            case "POST", "/v1/completions":
                return self._complete(json.loads(body))
            case "PUT", "/coda/profile":
                return self.put_status, json.dumps(
                    {"digest": "p", "reason": "ProfileMismatch", "detail": "cpu"}
                ).encode()
        return 404, b"{}"

    def _snapshot(self) -> EngineSnapshot:
        return EngineSnapshot(
            instance_id="i", version=1, published_at_s=0, started_at_s=0, steps=self.steps,
            running_by_tier={0: self.busy_requests} if self.busy_requests else {},
        )  # fmt: skip

    def _complete(self, request: dict[str, Any]) -> tuple[int, bytes]:
        prompt = request["prompt"]
        if max(prompt) >= self.vocabulary:
            return 400, b"out of vocabulary"
        assert request["max_tokens"] == 1
        self.prompts.append(prompt)
        threading.Event().wait(len(prompt) * self.ms_per_token / 1_000)
        disturbed = len(self.prompts) in self.disturb_samples
        self.steps = StepCounters(
            prefill=self.steps.prefill + -(-len(prompt) // 512), pure_decode=self.steps.pure_decode + disturbed
        )
        return 200, b"{}"


@contextmanager
def served(engine: ScriptedEngine) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, data = engine.answer(self.command, self.path, self.headers, body)
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = handle_any

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def measured(engine: ScriptedEngine, token: str | None = None) -> Profile:
    with served(engine) as url:
        return measure_profile(EngineClient(url, token), quick=True, progress=lambda line: None)


def test_a_profile_carries_the_engines_key_and_predicts_its_held_out_points() -> None:
    profile = measured(ScriptedEngine())
    profile.require_match(KEY)
    assert profile.prefill.points[-1].ms > profile.prefill.points[0].ms
    assert profile.provenance.quick


def test_no_prompt_is_sent_twice_and_no_two_share_a_block() -> None:
    engine = ScriptedEngine()
    measured(engine)
    openings = [tuple(prompt[:16]) for prompt in engine.prompts]
    assert len(set(openings)) == len(openings)


def test_a_disturbed_sample_is_measured_again() -> None:
    quiet, disturbed = ScriptedEngine(), ScriptedEngine(disturb_samples={1, 2, 5, 9})
    measured(quiet)
    measured(disturbed)
    assert len(disturbed.prompts) >= len(quiet.prompts) + 4


def test_an_engine_that_is_disturbed_all_the_time_is_not_profiled() -> None:
    with pytest.raises(EngineBusyError, match="during each of 4 measurements"):
        measured(ScriptedEngine(disturb_samples=set(range(1_000))))


def test_a_busy_engine_is_waited_for_and_then_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "_IDLE_WAIT_S", 0.1)
    with pytest.raises(EngineBusyError, match="has 3 running and 0 waiting"):
        measured(ScriptedEngine(busy_requests=3))


def test_a_small_vocabulary_gets_prompts_of_its_own_tokens() -> None:
    engine = ScriptedEngine(vocabulary=256)
    measured(engine)
    assert max(max(prompt) for prompt in engine.prompts) < 256


def test_a_wrong_internal_token_is_named() -> None:
    with pytest.raises(EngineRequestError, match="internal-token-file"):
        measured(ScriptedEngine(token="right"), token="wrong")
    assert measured(ScriptedEngine(token="right"), token="right").full_key == KEY


def test_an_engine_that_is_not_there_is_named() -> None:
    with pytest.raises(EngineRequestError, match="cannot be reached"):
        measure_profile(EngineClient("http://127.0.0.1:9"), quick=True, progress=lambda line: None)


def test_a_refused_delivery_carries_the_engines_reason() -> None:
    engine = ScriptedEngine()
    with served(engine) as url:
        client = EngineClient(url)
        profile = measure_profile(client, quick=True, progress=lambda line: None)
        assert client.put_profile(profile) == "p"
        engine.put_status = 409
        with pytest.raises(ProfileRefusedError) as refused:
            client.put_profile(profile)
    assert refused.value.reason is Reason.PROFILE_MISMATCH
    assert refused.value.detail == "cpu"
