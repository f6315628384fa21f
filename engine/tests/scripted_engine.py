"""A scripted engine on a real socket, with an HBM cache and a shadow, that plays what may happen to a measurement."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from coda_engine.contract.profile import FullKey
from coda_engine.contract.reasons import Feature, Reason
from coda_engine.contract.snapshot import Capability, EngineSnapshot, StepCounters
from coda_engine.profiling import EngineClient
from coda_engine.profiling.assumed import assumed_key

KEY = assumed_key(max_context_tokens=2_048, kv_block_bytes=32_000, shadow_layout="pages")
BLOCK = KEY.block_size


@dataclass
class ScriptedEngine:
    """An engine with an HBM cache and perhaps a shadow, whose prefills and restores take time in proportion.

    The time is its own (``clock``), so that a busy machine disturbs nothing.
    Faults: other requests run, samples are disturbed, the first small prompts are slow, larger
    restores take less, the shadow loses what it took, it dies.
    """

    ms_per_token: float = 0.05
    restore_ms_per_token: float = 0.01
    shadow_bytes: int = 10**9
    driver: str = KEY.driver
    shadow_loses: bool = False
    says_cached: bool = True
    busy_requests: int = 0
    disturb_samples: set[int] = field(default_factory=set)
    slow_small_prompts: int = 0
    senseless_restores: bool = False
    dies_after: int = 10**9
    vocabulary: int = 100_000
    put_status: int = 200
    token: str = ""
    prompts: list[list[int]] = field(default_factory=list)
    new_tokens: list[int] = field(default_factory=list)
    steps: StepCounters = field(default_factory=StepCounters)
    hbm: set[tuple[int, ...]] = field(default_factory=set)
    shadow: set[tuple[int, ...]] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)
    now_s: float = 0.0

    def clock(self) -> float:
        return self.now_s

    def client(self, url: str, token: str | None = None) -> EngineClient:
        return EngineClient(url, token, self.clock)

    @property
    def key(self) -> FullKey:
        """The engine's own key."""
        layout = KEY.shadow_layout if self.shadow_bytes else ""
        return KEY.model_copy(update={"driver": self.driver, "shadow_layout": layout})

    def answer(self, method: str, path: str, headers: Any, body: bytes) -> tuple[int, bytes]:
        if self.token and path.startswith("/coda/") and headers.get("Authorization") != f"Bearer {self.token}":
            return 401, b"{}"
        match method, path:
            case "GET", "/coda/keys":
                return 200, json.dumps({"spec_key_digest": "x", "full_key": self.key.model_dump()}).encode()
            case "GET", "/coda/snapshot":
                return 200, self._snapshot().to_json()
            case "GET", "/v1/models":
                return 200, b'{"data": [{"id": "m"}]}'
            case "POST", "/coda/hbm/forget":
                self.hbm.clear()
                return 200, b'{"forgotten": true}'
            case "POST", "/v1/completions":
                with self.lock:
                    return self._complete(json.loads(body))
            case "PUT", "/coda/profile":
                return self.put_status, json.dumps(
                    {"digest": "p", "reason": "ProfileMismatch", "detail": "cpu"}
                ).encode()
        return 404, b"{}"

    def _snapshot(self) -> EngineSnapshot:
        shadow = Capability(enabled=self.shadow_bytes > 0, reason=Reason.ENABLED)
        return EngineSnapshot(
            instance_id="i", version=1, published_at_s=0, started_at_s=0, steps=self.steps,
            running_by_tier={0: self.busy_requests} if self.busy_requests else {},
            capabilities={Feature.KV_SHADOW: shadow}, shadow_bytes_capacity=self.shadow_bytes,
            kv_blocks_total=256,
        )  # fmt: skip

    def _complete(self, request: dict[str, Any]) -> tuple[int, bytes]:
        prompt = request["prompt"]
        if max(prompt) >= self.vocabulary:
            return 400, b"out of vocabulary"
        if len(self.prompts) >= self.dies_after:
            return 500, b"dead"
        assert request["max_tokens"] == 1
        self.prompts.append(prompt)
        blocks = [tuple(prompt[: end * BLOCK]) for end in range(1, (len(prompt) - 1) // BLOCK + 1)]
        hit = next((number for number, block in enumerate(blocks) if block not in self.hbm), len(blocks))
        restored = 0
        while hit + restored < len(blocks) and blocks[hit + restored] in self.shadow:
            restored += 1
        new_tokens = len(prompt) - (hit + restored) * BLOCK
        self.new_tokens.append(new_tokens)
        took_ms = new_tokens * self.ms_per_token + restored * BLOCK * self.restore_ms_per_token
        if hit + restored == 0 and new_tokens <= 40 and self.slow_small_prompts > 0:
            self.slow_small_prompts -= 1
            took_ms *= 2
        if restored and self.senseless_restores:
            took_ms += 10_000.0 / restored
        self.now_s += took_ms / 1_000
        self.hbm.update(blocks)
        if self.shadow_bytes and not self.shadow_loses:
            self.shadow.update(blocks)
        disturbed = len(self.prompts) in self.disturb_samples
        self.steps = StepCounters(
            prefill=self.steps.prefill + -(-new_tokens // 512), pure_decode=self.steps.pure_decode + disturbed
        )
        cached = {"prompt_tokens_details": {"cached_tokens": (hit + restored) * BLOCK}} if self.says_cached else {}
        return 200, json.dumps({"usage": cached}).encode()


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
