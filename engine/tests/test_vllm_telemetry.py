"""Telemetry of real schedulers with a real shadow: every page, startup costs, sessions, failures."""

import json
import random
import time

import pytest
from fastapi import HTTPException
from scheduler_harness import BLOCK_TOKENS, adapter_config, attach, open_gates, settings_json, use_tiered_aging
from shadow_engine_harness import shadow_folder
from shadow_scheduler_harness import PAGE_BYTES, driving, shadowed

from coda_engine.contract.reasons import Feature, PreparationPath, Reason, ShadowEvent
from coda_engine.contract.settings import StateAdmissionPolicyName
from coda_engine.contract.snapshot import EngineSnapshot, SessionDelta
from coda_engine.vllm_adapter.config import ENV_PAGE_FILES
from coda_engine.vllm_adapter.http.reader import PagesReader
from coda_engine.vllm_adapter.identity.table import RequestIdentity
from coda_engine.vllm_adapter.runtime import EngineRuntime
from coda_engine.vllm_adapter.scheduler.shadow_residency import shadow_key
from coda_engine.vllm_adapter.telemetry.catalogue import CATALOGUE, PREFIX
from coda_engine.vllm_adapter.telemetry.page import PageFiles
from coda_engine.vllm_adapter.telemetry.pages import CAPACITIES
from coda_engine.vllm_adapter.telemetry.sessions import delta
from coda_engine.vllm_adapter.tracing.attributes import detach

HBM_BLOCKS, SHADOW_BLOCKS = 60, 300


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1_000) for _ in range(count)]


ALL_OF_HBM = tokens(2, (HBM_BLOCKS - 1) * BLOCK_TOKENS - 1)
"""A prompt that needs every block."""


class Engine:
    """An engine whose pages are read as the API process reads them."""

    def __init__(self, drive, pages: PageFiles, traced: bool = False) -> None:
        self.drive, self.reader = drive, PagesReader(pages.prefix)
        if traced:
            drive.scheduler.vllm_config.observability_config.otlp_traces_endpoint = "http://127.0.0.1:1"
        self.runtime = attach(drive.scheduler, {ENV_PAGE_FILES: str(pages.prefix)})
        use_tiered_aging(self.runtime)

    def begin(self, session: str, prompt: list[int], max_tokens: int = 1) -> str:
        name = f"r{len(self.drive.requests)}"
        self.runtime.identities.put(name, RequestIdentity(session_key=session, tier=2), trusted=True)
        self.drive.add(name, prompt, max_tokens=max_tokens, arrival_s=time.time())
        return name

    def serve(self, session: str, prompt: list[int]) -> str:
        name = self.begin(session, prompt)
        self.settle()
        return name

    def settle(self) -> None:
        """Run until nothing is left, transfers included, and everything is published."""
        self.drive.finish()
        for _ in range(10):
            self.drive.step()
        self.runtime.telemetry._board.close()

    def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot.from_json(self.runtime.telemetry._gatherer.gather()(1))

    def measures(self):
        return json.loads(self.runtime.telemetry._board._measures_source.gather()(1))

    def session(self, key: str):
        document = json.loads(self.runtime.telemetry.sessions.gather()(1))
        rows = SessionDelta.model_validate(delta(document, "", 0)).sessions
        return next(row for row in rows if row.key == key)

    def startups(self) -> dict[str, int]:
        states = self.measures()["histograms"]["startup_seconds"]
        return {path: sum(state["counts"]) for path, state in states.items() if sum(state["counts"])}


@pytest.fixture
def folder():
    with shadow_folder() as made:
        yield made


@pytest.fixture
def pages(tmp_path):
    files = PageFiles.create(tmp_path, CAPACITIES)
    yield files
    files.remove()


@pytest.fixture
def engine(vllm_config, folder, pages):
    with driving(shadowed(vllm_config, folder, SHADOW_BLOCKS), HBM_BLOCKS) as drive:
        yield Engine(drive, pages)


def test_resumed_requests_are_counted_by_path(engine):
    history = tokens(1, 640)
    engine.serve("s", history)
    assert engine.startups() == {}
    engine.serve("s", history + tokens(2, 40))
    assert engine.startups() == {PreparationPath.HBM.value: 1}
    assert engine.drive.scheduler.reset_prefix_cache()
    engine.serve("s", history + tokens(3, 40))
    assert engine.startups() == {PreparationPath.HBM.value: 1, PreparationPath.SHADOW.value: 1}
    engine.serve("s", tokens(4, 640))
    assert engine.startups()[PreparationPath.RECOMPUTE.value] == 1
    assert engine.runtime.telemetry._costs.starting == []


def test_admissions_are_told_by_path_and_their_tokens(engine):
    history = tokens(1, 640)
    engine.serve("s", history)
    assert engine.drive.scheduler.reset_prefix_cache()
    engine.serve("s", history + tokens(2, 40))
    steps = engine.snapshot().steps
    assert steps.admissions_by_path == {PreparationPath.RECOMPUTE.value: 1, PreparationPath.SHADOW.value: 1}
    assert steps.admitted_tokens == {"HBM": 0, "Shadow": 640, "Recompute": 680}


def test_the_snapshot_tells_the_shadow_s_bytes_and_pages(engine):
    history = tokens(1, 640)
    engine.serve("s", history)
    snapshot = engine.snapshot()
    assert snapshot.shadow_bytes_capacity == SHADOW_BLOCKS * PAGE_BYTES
    assert snapshot.shadow_bytes_used == 20 * PAGE_BYTES
    assert engine.drive.scheduler.reset_prefix_cache()
    engine.drive.faults.most_late_steps = 3
    engine.drive.faults.rng.randint = lambda low, high: high
    engine.begin("s", history + tokens(2, 40))
    engine.drive.step()
    assert engine.snapshot().outstanding_restore_bytes == 20 * PAGE_BYTES
    engine.settle()
    snapshot, values = engine.snapshot(), engine.measures()["values"]
    assert snapshot.outstanding_restore_bytes == 0
    assert snapshot.steps.shadow_pages[ShadowEvent.PUBLISHED] == 21
    assert snapshot.steps.shadow_pages[ShadowEvent.RESTORED] == 20
    assert values["shadow_restored_bytes"][""] == 20 * PAGE_BYTES
    assert values["shadow_published_bytes"][""] == 21 * PAGE_BYTES
    assert min(values["shadow_restore_seconds"][""], values["shadow_publish_seconds"][""]) > 0
    assert values["shadow_pages_now"] == {"used": 21, "writing": 0, "poisoned": 0, "free": SHADOW_BLOCKS - 21}


def test_what_a_closed_shadow_counted_is_still_told_and_its_room_is_gone(engine):
    engine.serve("s", tokens(1, 640))
    engine.snapshot()
    engine.drive.manager.close(Reason.SHADOW_UNUSABLE, "a test")
    snapshot = engine.snapshot()
    assert (snapshot.shadow_bytes_used, snapshot.shadow_bytes_capacity) == (0, 0)
    assert snapshot.steps.shadow_pages[ShadowEvent.PUBLISHED] == 20
    assert snapshot.capabilities[Feature.KV_SHADOW].reason is Reason.SHADOW_UNUSABLE


def test_a_session_s_prefix_in_the_shadow_outlives_hbm(engine):
    engine.serve("s", tokens(1, 640))
    both = engine.session("s")
    assert (both.hbm_tokens, both.shadow_tokens) == (640, 640)
    engine.serve("big", ALL_OF_HBM)
    evicted = engine.session("s")
    assert (evicted.hbm_tokens, evicted.shadow_tokens) == (0, 640)


def test_a_page_that_vanishes_from_the_shadow_shortens_the_session(engine):
    history = tokens(1, 640)
    engine.serve("s", history)
    engine.serve("big", ALL_OF_HBM)
    assert engine.session("s").shadow_tokens == 640
    request = engine.drive.requests["r0"]
    shadow = engine.drive.scheduler.connector.coda_shadow
    refs = shadow.index.pin([shadow_key(request.block_hashes[7])])
    assert not engine.runtime.telemetry.sessions.doubtful
    shadow.index.poison(refs)
    shadow.index.unpin(refs)
    assert engine.runtime.telemetry.sessions.doubtful
    assert engine.session("s").shadow_tokens == 7 * BLOCK_TOKENS


def test_sessions_lose_what_only_a_closed_shadow_had(engine):
    engine.serve("s", tokens(1, 640))
    engine.serve("big", ALL_OF_HBM)
    assert engine.session("s").shadow_tokens == 640
    engine.drive.manager.close(Reason.SHADOW_UNUSABLE, "a test")
    assert engine.session("big").shadow_tokens == engine.session("big").hbm_tokens > 0
    with pytest.raises(StopIteration):
        engine.session("s")


def test_sessions_of_a_long_run_are_what_the_tiers_really_hold(engine):
    rng = random.Random(5)
    contexts = {f"s{number}": tokens(number, rng.randrange(40, 500)) for number in range(12)}
    last = {}
    for _ in range(80):
        session = rng.choice(list(contexts))
        contexts[session] = [*contexts[session], *tokens(rng.randrange(1_000), 40)][:1_500]
        last[session] = engine.begin(session, contexts[session])
        engine.drive.finish()
    for _ in range(10):
        engine.drive.step()
    document = json.loads(engine.runtime.telemetry.sessions.gather()(1))
    rows = {row[0]: (row[1], row[2]) for row in document["rows"]}
    pool, ready = engine.drive.scheduler.kv_cache_manager.block_pool, engine.drive.manager.index.ready
    expected = {}
    for session, name in last.items():
        hashes = engine.drive.requests[name].block_hashes
        resident = 0
        while resident < len(hashes) and pool.get_cached_block(hashes[resident], [0]):
            resident += 1
        anywhere = resident
        while anywhere < len(hashes) and ready(shadow_key(hashes[anywhere])):
            anywhere += 1
        if anywhere:
            expected[session] = (resident * BLOCK_TOKENS, anywhere * BLOCK_TOKENS)
    assert rows == expected
    assert any(hbm < shadow_tokens for hbm, shadow_tokens in rows.values())


def test_the_request_for_which_blocks_are_kept_is_told(engine):
    engine.runtime.apply_settings(settings_json(StateAdmissionPolicyName.CODA, max_wait_ms=1))
    assert engine.snapshot().reservation is None
    engine.begin("running", tokens(1, 40 * BLOCK_TOKENS), max_tokens=60)
    for _ in range(4):
        engine.drive.step()
    name = engine.begin("large", tokens(2, 30 * BLOCK_TOKENS))
    time.sleep(0.01)
    engine.drive.step()
    reservation = engine.snapshot().reservation
    assert (reservation.tier, reservation.kv_blocks) == (2, 30)
    assert reservation.wait_ms >= 1
    engine.settle()
    assert engine.drive.requests[name].is_finished()
    assert engine.snapshot().reservation is None


def test_everything_declared_is_gathered_and_nothing_else(engine):
    engine.serve("s", tokens(1, 100))
    measures = engine.measures()
    gathered = {*measures["values"], *measures["histograms"]}
    declared = {metric.name.removeprefix(PREFIX) for metric in CATALOGUE}
    assert gathered <= declared
    values = {name: set(labels) for name, labels in measures["values"].items()}
    for metric in CATALOGUE:
        allowed = {value for label in metric.labels for value in label.values} or {""}
        assert values.get(metric.name.removeprefix(PREFIX), set()) <= allowed


def test_an_encoder_that_fails_takes_the_pages_back_and_nothing_else(engine):
    engine.serve("s", tokens(1, 100))
    assert json.loads(engine.reader.snapshot().payload)["instance_id"] == engine.runtime.instance_id
    engine.runtime.telemetry._gatherer.gather = lambda: lambda version: 1 / 0
    engine.runtime.telemetry.publish(idle=True)
    deadline_s = time.monotonic() + 20
    while not engine.runtime.capabilities.is_closed(Feature.SNAPSHOT):
        assert time.monotonic() < deadline_s
        engine.runtime.telemetry.publish(idle=True)
        time.sleep(0.02)
    assert engine.runtime.capabilities.snapshot()[Feature.SNAPSHOT].reason is Reason.INTERNAL_ERROR
    with pytest.raises(HTTPException, match="503"):
        engine.reader.snapshot()
    engine.begin("s", tokens(1, 100))
    engine.drive.finish()
    assert engine.runtime.telemetry.sessions is None
    assert engine.runtime.capabilities.snapshot()[Feature.STATE_ADMISSION].enabled


def test_startup_bookkeeping_that_fails_ends_alone(engine, monkeypatch):
    monkeypatch.setattr(engine.runtime.telemetry._costs, "admitted", lambda *_: 1 / 0)
    engine.serve("s", tokens(1, 100))
    assert engine.runtime.capabilities.is_closed(Feature.TRACE_ATTRIBUTES)
    assert engine.snapshot().capabilities[Feature.SNAPSHOT].enabled


def test_attributes_travel_with_a_traced_engine_s_outputs(vllm_config, folder, pages):
    with driving(shadowed(vllm_config, folder, SHADOW_BLOCKS), HBM_BLOCKS) as drive:
        engine = Engine(drive, pages, traced=True)
        assert engine.runtime.capabilities.snapshot()[Feature.TRACE_ATTRIBUTES].enabled
        history = tokens(1, 640)
        engine.serve("a session's key", history)
        assert drive.scheduler.reset_prefix_cache()
        name = engine.serve("a session's key", history + tokens(2, 40))
        own, attributes = detach(drive.requests[name].trace_headers)
    assert own is None
    assert attributes.pop("coda.admission.state_cost_ms") > 0
    assert attributes.pop("coda.admission.wait_ms") >= 0
    assert attributes == {
        "coda.tier": 2,
        "coda.session": "a session's key",
        "coda.path": "Shadow",
        "coda.tokens.hbm": 0,
        "coda.tokens.shadow": 640,
        "coda.tokens.prefill": 40,
        "coda.admission.reason": "OnlyCandidate",
        "coda.admission.reordered": False,
    }


def test_an_engine_that_is_not_traced_sends_no_attributes(engine):
    name = engine.serve("s", tokens(1, 100))
    assert engine.drive.requests[name].trace_headers is None
    state = engine.snapshot().capabilities[Feature.TRACE_ATTRIBUTES]
    assert (state.enabled, state.reason) == (False, Reason.DISABLED_BY_SETTINGS)


def test_without_pages_requests_are_served_and_nothing_is_kept(vllm_config, folder):
    with driving(shadowed(vllm_config, folder, SHADOW_BLOCKS), HBM_BLOCKS) as drive:
        runtime = EngineRuntime.attach(drive.scheduler, adapter_config(), open_gates())
        drive.add("one", tokens(1, 100))
        drive.finish()
        assert (runtime.telemetry.sessions, runtime.telemetry._board) == (None, None)
