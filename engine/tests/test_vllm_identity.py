"""Identity: what a signed value says wins over whatever the client's body says."""

import pytest
from scheduler_harness import Drive, attach, new_scheduler
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from coda_engine.contract.identity import LOWEST_TIER, MAX_READY_AGE_MS, Identity, Isolation, cache_salt, pack
from coda_engine.contract.reasons import Feature, Reason
from coda_engine.contract.snapshot import session_key
from coda_engine.vllm_adapter.identity.hook import IdentityRules
from coda_engine.vllm_adapter.identity.table import UNKNOWN, IdentityTable, RequestIdentity

SECRET = b"a cluster's secret"
ALICE = Identity("alice", "session-1", router_id="router-a", tier=2, ready_age_ms=1_500.0)


def request(session_id: str | None = None, **fields) -> EngineCoreRequest:
    extra_args = fields.pop("extra_args", None)
    return EngineCoreRequest(
        request_id="r1",
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=1, extra_args=extra_args),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=fields.pop("cache_salt", None),
        data_parallel_rank=None,
        session_id=session_id,
        **fields,
    )


def judged(given: EngineCoreRequest, secret: bytes | None = SECRET, isolation: Isolation = Isolation.TENANT):
    table = IdentityTable()
    IdentityRules(secret, isolation).apply(given, table)
    return given, table


def test_a_signed_value_decides_salt_tier_session_and_age():
    given, table = judged(request(pack(ALICE, SECRET), priority=0, cache_salt="bob's salt"))
    assert given.cache_salt == cache_salt(ALICE, SECRET, Isolation.TENANT)
    assert given.priority == 2
    assert given.session_id == session_key("alice", "session-1")
    assert table.get("r1") == RequestIdentity(session_key("alice", "session-1"), "router-a", 2, 1_500.0)
    assert table.untrusted == 0


def test_shared_isolation_has_no_salt_for_trusted_requests():
    given, _ = judged(request(pack(ALICE, SECRET), cache_salt="mine"), isolation=Isolation.SHARED)
    assert given.cache_salt is None


@pytest.mark.parametrize("isolation", list(Isolation))
@pytest.mark.parametrize(
    "value", [None, "", "session-1", pack(ALICE, b"another secret"), pack(ALICE, SECRET)[:-2] + "AA", "coda1.x.y"]
)
def test_without_a_valid_signature_a_request_is_untrusted_in_the_lowest_tier(value, isolation):
    given, table = judged(request(value, priority=-5, cache_salt="alice's salt"), isolation=isolation)
    assert given.priority == LOWEST_TIER
    assert given.session_id is None
    assert given.cache_salt.startswith("u-")
    assert given.cache_salt != cache_salt(ALICE, SECRET, Isolation.TENANT)
    assert table.get("r1") == RequestIdentity(tier=LOWEST_TIER)
    assert table.untrusted == 1


def test_hostile_extra_arguments_are_removed_and_others_kept():
    hostile = {"kv_transfer_params": {"do_remote_prefill": True}, "coda_tier": 0, "session_id": "x", "harmless": 1}
    given = request(pack(ALICE, SECRET), extra_args=hostile)
    of_the_caller = given.sampling_params
    judged(given)
    assert given.sampling_params.extra_args == {"harmless": 1}
    assert of_the_caller.extra_args == hostile


def test_without_a_secret_the_session_is_taken_as_it_is():
    given, table = judged(request("my-session", priority=3), secret=None)
    assert (given.session_id, given.priority, given.cache_salt) == ("my-session", 3, None)
    assert table.get("r1") == RequestIdentity(session_key("", "my-session"), "", 3, 0.0)
    assert table.untrusted == 0


@pytest.mark.parametrize(("age_ms", "kept_ms"), [(-1.0, 0.0), (float("nan"), 0.0), (1e12, MAX_READY_AGE_MS)])
def test_an_impossible_age_is_bounded(age_ms, kept_ms):
    signed = pack(Identity("t", "s", ready_age_ms=age_ms), SECRET)
    assert judged(request(signed))[1].get("r1").ready_age_ms == kept_ms


def test_the_table_is_bounded_and_forgets_the_oldest():
    table = IdentityTable(max_entries=3)
    for number in range(5):
        table.put(f"r{number}", RequestIdentity(tier=number), trusted=True)
    assert table.get("r0") is UNKNOWN
    assert table.get("r4").tier == 4
    table.drop("r4")
    assert table.get("r4") is UNKNOWN


def test_a_secret_that_cannot_be_read_trusts_nobody(vllm_config, tmp_path):
    runtime = attach(new_scheduler(vllm_config, 50), {"CODA_CLUSTER_SECRET_FILE": str(tmp_path / "absent")})
    given = request(pack(ALICE, b""))
    runtime.identify(given)
    assert given.priority == LOWEST_TIER
    state = runtime.capabilities.snapshot()[Feature.IDENTITY]
    assert (state.enabled, state.reason) == (False, Reason.NO_CLUSTER_SECRET)
    assert "every request is untrusted" in state.detail


def test_a_request_that_breaks_identification_is_not_trusted_and_the_next_one_is(vllm_config, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    runtime = attach(new_scheduler(vllm_config, 50), {"CODA_CLUSTER_SECRET_FILE": str(secret)})
    broken, fine = request(pack(ALICE, SECRET), cache_salt="bob's"), request(pack(ALICE, SECRET))
    broken.sampling_params.extra_args = ["not", "a", "mapping"]
    runtime.identify(broken)
    runtime.identify(fine)
    assert broken.cache_salt.startswith("u-")
    assert broken.priority == LOWEST_TIER
    assert fine.cache_salt == cache_salt(ALICE, SECRET, Isolation.TENANT)


def test_an_unknown_isolation_is_tenant(vllm_config, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    environment = {"CODA_CLUSTER_SECRET_FILE": str(secret), "CODA_ISOLATION": "shared"}
    runtime = attach(new_scheduler(vllm_config, 50), environment)
    given = request(pack(ALICE, SECRET))
    runtime.identify(given)
    assert given.cache_salt == cache_salt(ALICE, SECRET, Isolation.TENANT)


def test_tenants_with_different_salts_share_no_blocks(vllm_config):
    scheduler = new_scheduler(vllm_config, 100)
    attach(scheduler)
    drive = Drive(scheduler)
    prompt = list(range(300))
    drive.add("alice", prompt, salt="a", max_tokens=1)
    drive.finish()
    assert drive.add("alice-again", prompt, salt="a", max_tokens=1) is not None
    first = drive.step()
    drive.finish()
    drive.add("bob", prompt, salt="b", max_tokens=1)
    second = drive.step()
    assert (first["alice-again"], second["bob"]) == (300 - 9 * 32, 300)


def test_identities_are_dropped_when_their_request_ends(vllm_config):
    scheduler = new_scheduler(vllm_config, 100)
    runtime = attach(scheduler)
    drive = Drive(scheduler)
    runtime.identities.put("r", RequestIdentity(tier=1), trusted=True)
    drive.add("r", list(range(40)), max_tokens=1)
    drive.finish()
    assert runtime.identities.get("r") is UNKNOWN
