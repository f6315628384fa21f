"""The session table: what is resident of each session, and its deltas."""

import json
import random

import pytest
from scheduler_harness import BLOCK_TOKENS, Drive, attach, new_scheduler

from coda_engine.contract.snapshot import SessionDelta
from coda_engine.vllm_adapter.config import ENV_PAGE_FILES
from coda_engine.vllm_adapter.identity.table import RequestIdentity
from coda_engine.vllm_adapter.telemetry.page import PageFiles
from coda_engine.vllm_adapter.telemetry.pages import CAPACITIES
from coda_engine.vllm_adapter.telemetry.sessions import SessionTable, delta


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1_000) for _ in range(count)]


class Served:
    """An engine that serves sessions one request at a time."""

    def __init__(self, vllm_config, blocks: int, folder):
        self.scheduler = new_scheduler(vllm_config, blocks)
        pages = PageFiles.create(folder, CAPACITIES)
        self.runtime = attach(self.scheduler, {ENV_PAGE_FILES: str(pages.prefix)})
        self.drive = Drive(self.scheduler)

    def serve(self, session: str, prompt: list[int]) -> None:
        name = f"r{len(self.drive.requests)}"
        self.runtime.identities.put(name, RequestIdentity(session_key=session), trusted=True)
        self.drive.add(name, prompt, max_tokens=1)
        self.drive.finish()

    def document(self):
        return json.loads(self.runtime.telemetry.sessions.gather()(1))

    def resident(self) -> dict[str, int]:
        return {row[0]: row[1] for row in self.document()["rows"]}


@pytest.fixture
def served(vllm_config, tmp_path):
    return Served(vllm_config, 41, tmp_path)


def test_a_session_is_resident_with_its_full_blocks_after_its_request(served):
    served.serve("a", tokens(1, 330))
    assert served.resident() == {"a": 10 * BLOCK_TOKENS}


def test_a_longer_request_grows_the_session(served):
    served.serve("a", tokens(1, 100))
    served.serve("a", tokens(1, 100) + tokens(2, 100))
    assert served.resident() == {"a": 6 * BLOCK_TOKENS}


def test_eviction_shrinks_the_older_session_from_its_tail(served):
    served.serve("old", tokens(1, 640))
    served.serve("new", tokens(2, 960))
    resident = served.resident()
    assert resident["new"] == 960
    assert 0 < resident["old"] < 640
    hashes = served.runtime.telemetry.sessions._rows["old"].hashes
    assert len(hashes) * BLOCK_TOKENS == resident["old"]


def test_a_session_of_which_nothing_is_left_is_removed(served):
    served.serve("gone", tokens(1, 320))
    before = served.document()
    served.serve("big", tokens(2, 1_270))
    change = SessionDelta.model_validate(delta(served.document(), before["instance_id"], before["version"]))
    assert change.removed == ["gone"]
    assert [row.key for row in change.sessions] == ["big"]


def test_resetting_the_prefix_cache_leaves_nothing(served):
    served.serve("a", tokens(1, 320))
    assert served.scheduler.reset_prefix_cache()
    served.serve("b", tokens(2, 100))
    served.runtime.telemetry.sessions._doubtful.add("a")
    assert set(served.resident()) == {"b"}


def test_a_delta_tells_only_what_changed_since(served):
    served.serve("a", tokens(1, 100))
    first = served.document()
    served.serve("b", tokens(2, 100))
    second = served.document()
    change = SessionDelta.model_validate(delta(second, first["instance_id"], first["version"]))
    assert [row.key for row in change.sessions] == ["b"]
    assert (change.since, change.version) == (first["version"], second["version"])


@pytest.mark.parametrize(("instance", "since"), [("another", 1), ("", 0), (None, 99), (None, -1)])
def test_a_reader_of_another_instance_or_version_gets_the_full_table(served, instance, since):
    served.serve("a", tokens(1, 100))
    served.document()
    served.serve("b", tokens(2, 100))
    document = served.document()
    change = SessionDelta.model_validate(
        delta(document, document["instance_id"] if instance is None else instance, since)
    )
    assert ({row.key for row in change.sessions}, change.since, change.removed) == ({"a", "b"}, 0, [])


def test_the_table_keeps_the_most_recent_sessions_only(served):
    table = SessionTable(served.runtime.admission._index, "i", BLOCK_TOKENS, max_hashes=10_000, max_sessions=3)
    for number in range(5):
        served.drive.add(f"x{number}", tokens(number, 64), max_tokens=1)
        request = served.drive.requests[f"x{number}"]
        served.drive.finish()
        table.used(f"s{number}", request)
    assert {row[0] for row in json.loads(table.gather()(1))["rows"]} == {"s2", "s3", "s4"}


def test_the_table_keeps_a_bounded_number_of_hashes(served):
    table = SessionTable(served.runtime.admission._index, "i", BLOCK_TOKENS, max_hashes=5)
    for number in range(4):
        request = served.drive.add(f"y{number}", tokens(number, 70), max_tokens=1)
        served.drive.finish()
        table.used(f"s{number}", request)
    assert len(table) == 2
    assert table._hashes_kept == 4


def test_what_a_full_table_drops_is_told_to_readers_of_the_version_before(served):
    table = SessionTable(served.runtime.admission._index, "i", BLOCK_TOKENS, max_hashes=10_000, max_sessions=1)
    for number in range(2):
        request = served.drive.add(f"z{number}", tokens(number, 64), max_tokens=1)
        served.drive.finish()
        table.used(f"s{number}", request)
        document = json.loads(table.gather()(1))
    change = SessionDelta.model_validate(delta(document, "i", 1))
    assert ([row.key for row in change.sessions], change.removed) == (["s1"], ["s0"])


def test_a_table_that_is_never_gathered_keeps_its_bounds(served):
    table = SessionTable(served.runtime.admission._index, "i", BLOCK_TOKENS, max_hashes=10_000, max_sessions=2)
    request = served.drive.add("w", tokens(1, 64), max_tokens=1)
    served.drive.finish()
    for number in range(5_000):
        table.used(f"s{number}", request)
        table.changed(f"s{number}")
    assert len(table) == len(table._doubtful) == len(table._waits_changed) == 2
    assert len(table._removed) <= 4_096
