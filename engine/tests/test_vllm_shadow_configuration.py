"""Where the CPU shadow is configured, where it is not and why, and what happens when it cannot be used."""

import copy
from types import SimpleNamespace

import pytest
from scheduler_harness import adapter_config, attach, new_scheduler, open_gates
from shadow_engine_harness import shadow_folder
from shadow_scheduler_harness import PAGE_BYTES, ShadowDrive, driving, shadowed
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs

from coda_engine.contract.reasons import Feature, Reason
from coda_engine.shadow import EvictionPolicyName
from coda_engine.vllm_adapter.compat import Gate
from coda_engine.vllm_adapter.config import ShadowConfig
from coda_engine.vllm_adapter.shadow.injection import CONNECTOR, configure, hook_configuration
from coda_engine.vllm_adapter.shadow.layout import configured_identity
from coda_engine.vllm_adapter.shadow.support import unsupported_configuration


@pytest.fixture
def folder():
    with shadow_folder() as made:
        yield made


@pytest.fixture
def own_config(vllm_config):
    """A configuration that a test may change."""
    return copy.deepcopy(vllm_config)


def wanted(folder, size_bytes=10_000_000):
    return ShadowConfig(size_bytes, folder, EvictionPolicyName.LRU)


def capability(scheduler, **environment):
    return attach(scheduler, environment).capabilities.snapshot()[Feature.KV_SHADOW]


def test_without_a_size_vllm_has_no_connector_and_the_capability_says_why(own_config, folder):
    configure(own_config, wanted(folder, 0))
    assert own_config.kv_transfer_config is None
    scheduler = new_scheduler(own_config, 50)
    assert scheduler.connector is None
    state = capability(scheduler)
    assert (state.enabled, state.reason) == (False, Reason.DISABLED_BY_SETTINGS)
    assert not folder.exists()


def test_a_wanted_and_supported_shadow_publishes_everything_and_recomputes_what_fails(own_config, folder):
    configure(own_config, wanted(folder))
    transfer = own_config.kv_transfer_config
    assert (transfer.kv_connector, transfer.kv_role) == (CONNECTOR, "kv_both")
    assert transfer.kv_load_failure_policy == "recompute"
    assert transfer.kv_connector_extra_config["offload_prompt_only"] is False


UNSUPPORTED = {
    "another KV connector": lambda c: setattr(c, "kv_transfer_config", KVTransferConfig()),
    "prefix caching is off": lambda c: setattr(c.cache_config, "enable_prefix_caching", False),
    "can be made to collide": lambda c: setattr(c.cache_config, "prefix_caching_hash_algo", "xxhash"),
    "parallelism is on": lambda c: setattr(c.parallel_config, "pipeline_parallel_size", 2),
    "several nodes": lambda c: setattr(c.parallel_config, "world_size", 4),
    "full attention": lambda c: setattr(c.model_config, "attention_chunk_size", 8_192),
    "speculative decoding": lambda c: setattr(c, "speculative_config", SimpleNamespace()),
    "weights may be exchanged": lambda c: setattr(c, "weight_transfer_config", SimpleNamespace()),
    "hashed by name": lambda c: setattr(c, "lora_config", SimpleNamespace()),
    "encoder-cache connector": lambda c: setattr(c, "ec_transfer_config", SimpleNamespace()),
    "neither a CPU nor CUDA": lambda c: setattr(c.device_config, "device_type", "tpu"),
}


@pytest.mark.parametrize("part", UNSUPPORTED)
def test_what_is_not_supported_is_named_and_leaves_the_configuration_alone(own_config, folder, part):
    UNSUPPORTED[part](own_config)
    before = own_config.kv_transfer_config
    configure(own_config, wanted(folder))
    assert own_config.kv_transfer_config is before
    assert part in unsupported_configuration(own_config)


def test_the_hook_configures_engines_once_and_an_error_in_it_leaves_them_stock(model_folder, folder, monkeypatch):
    class Arguments(EngineArgs):
        # Coda's plug-in may have hooked vLLM's own in this process.
        create_engine_config = getattr(EngineArgs.create_engine_config, "__wrapped__", EngineArgs.create_engine_config)

    for _ in range(2):
        hook_configuration(Arguments, wanted(folder))
    arguments = Arguments(model=str(model_folder), enforce_eager=True, block_size=32, max_model_len=1_024)
    assert arguments.create_engine_config().kv_transfer_config.kv_connector == CONNECTOR
    monkeypatch.setattr("coda_engine.vllm_adapter.shadow.injection.unsupported_configuration", lambda config: 1 / 0)
    assert arguments.create_engine_config().kv_transfer_config is None


def test_a_changed_vllm_keeps_the_shadow_off_with_its_reason(own_config):
    gates = open_gates() | {Feature.KV_SHADOW: Gate(False, Reason.CHANGED_VLLM_INTERNALS, "x has changed")}
    runtime = attach(new_scheduler(own_config, 50), {"CODA_SHADOW_BYTES": "1000000"}, gates)
    state = runtime.capabilities.snapshot()[Feature.KV_SHADOW]
    assert (state.enabled, state.reason) == (False, Reason.CHANGED_VLLM_INTERNALS)


@pytest.mark.parametrize(
    ("variable", "value", "part"),
    [("CODA_SHADOW_BYTES", "4Gi", "is no number of bytes"), ("CODA_SHADOW_EVICTION", "random", "one of lru, fifo")],
)
def test_an_unreadable_wish_is_named_and_there_is_no_shadow(own_config, variable, value, part):
    environment = {"CODA_SHADOW_BYTES": "1000000"} | {variable: value}
    config = adapter_config(environment)
    configure(own_config, config.shadow)
    assert own_config.kv_transfer_config is None
    state = capability(new_scheduler(own_config, 50), **environment)
    assert state.reason is Reason.UNSUPPORTED_CONFIGURATION
    assert part in state.detail


def serves(drive, prompt=range(200)):
    """Serve a request twice, the second time from HBM or by computing it; return pages restored."""
    for name in ("a", "b"):
        drive.add(name, list(prompt))
        drive.finish()
        drive.scheduler.reset_prefix_cache()
    assert drive.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 59
    return drive.manager.counters.restored


def test_a_shadow_for_which_there_is_no_space_is_closed_and_the_engine_serves(vllm_config, folder):
    with driving(shadowed(vllm_config, folder, 10**10), 60) as drive:
        assert drive.connector.coda_shadow is None
        state = capability(drive.scheduler)
        assert not state.enabled
        assert "bytes" in state.detail
        assert serves(drive) == 0


def test_a_folder_that_others_may_enter_is_refused_and_the_engine_serves(vllm_config, folder):
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with driving(shadowed(vllm_config, folder, 100), 60) as drive:
        state = capability(drive.scheduler)
        assert str(folder) in state.detail
        assert serves(drive) == 0


def test_a_shadow_smaller_than_one_block_is_named(vllm_config, folder):
    config = shadowed(vllm_config, folder, 1)
    config.kv_transfer_config.kv_connector_extra_config["coda_shadow"]["size_bytes"] = PAGE_BYTES - 1
    with driving(config, 60) as drive:
        assert "spec.kvShadow.size" in capability(drive.scheduler).detail
        assert serves(drive) == 0


def test_ranks_that_lay_pages_out_otherwise_close_the_shadow(vllm_config, folder):
    with driving(shadowed(vllm_config, folder, 100), 60) as drive:
        runtime = attach(drive.scheduler)
        assert runtime.capabilities.snapshot()[Feature.KV_SHADOW].enabled
        hello = drive.ranks[0].connector.get_handshake_metadata()
        other = type(hello)("another layout", "")
        drive.connector.set_xfer_handshake_metadata({0: hello, 1: other})
        state = runtime.capabilities.snapshot()[Feature.KV_SHADOW]
        assert (state.enabled, state.reason) == (False, Reason.UNSUPPORTED_CONFIGURATION)
        assert "rank 1" in state.detail
        assert drive.connector.coda_shadow is None
        assert serves(drive) == 0


def test_an_index_that_breaks_under_way_closes_the_shadow_and_no_request(vllm_config, folder, monkeypatch):
    with driving(shadowed(vllm_config, folder, 100), 60) as drive:
        runtime = attach(drive.scheduler)
        drive.add("before", list(range(200)))
        drive.finish()
        drive.scheduler.reset_prefix_cache()

        def breaks(keys):
            raise RuntimeError("bad index")

        monkeypatch.setattr(drive.manager.index, "pin", breaks)
        drive.add("after", list(range(200)))
        drive.finish()
        state = runtime.capabilities.snapshot()[Feature.KV_SHADOW]
        assert (state.reason, state.detail) == (Reason.INTERNAL_ERROR, "RuntimeError: bad index")
        assert serves(drive) == 0


def test_resetting_the_connectors_cache_closes_the_shadow(vllm_config, folder):
    config = shadowed(vllm_config, folder, 100)
    with driving(config, 60) as drive:
        drive.add("before", list(range(200)))
        drive.finish()
        assert drive.scheduler.reset_prefix_cache(reset_connector=True)
        assert drive.connector.coda_shadow is None
        assert serves(drive) == 0
    with driving(config, 60) as restarted:
        assert serves(restarted) == 12


@pytest.mark.parametrize(
    "change",
    [
        lambda c: setattr(c.model_config, "revision", "other"),
        lambda c: setattr(c.cache_config, "cache_dtype", "fp8"),
        lambda c: setattr(c.parallel_config, "tensor_parallel_size", 2),
        lambda c: setattr(c.cache_config, "prefix_caching_hash_algo", "sha256_cbor"),
        lambda c: setattr(c.model_config.hf_config, "rope_theta", 5.0),
        lambda c: setattr(c.model_config, "max_model_len", 512),
    ],
    ids=["revision", "KV type", "ranks", "hash", "rope", "longest context (LongRoPE chooses its factors by it)"],
)
def test_what_changes_a_blocks_bytes_or_hash_changes_the_identity(own_config, change):
    before = configured_identity(own_config)
    assert configured_identity(own_config) == before
    change(own_config)
    assert configured_identity(own_config) != before


def test_other_weights_of_the_same_names_and_sizes_are_another_identity(own_config, tmp_path):
    identities = set()
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        weights = bytearray(10_000_000)
        weights[5_000_000:5_100_000] = bytes([number]) * 100_000
        (folder / "model.safetensors").write_bytes(weights)
        own_config.model_config.model = str(folder)
        identities.add(configured_identity(own_config))
    assert len(identities) == 3


def test_weights_that_cannot_be_told_apart_keep_the_shadow_off(own_config, folder):
    own_config.model_config.model = "s3://bucket/model"
    configure(own_config, wanted(folder))
    assert own_config.kv_transfer_config is None
    own_config.model_config.hf_config._commit_hash = "abc"
    configure(own_config, wanted(folder))
    assert own_config.kv_transfer_config is not None


def test_another_hash_seed_is_another_identity(own_config, monkeypatch):
    before = configured_identity(own_config)
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    assert configured_identity(own_config) != before


def test_engines_of_different_identity_do_not_see_each_others_pages(vllm_config, folder):
    with driving(shadowed(vllm_config, folder, 100), 60) as first:
        assert serves(first) == 6
        other = copy.deepcopy(vllm_config)
        other.model_config.revision = "other"
        second = ShadowDrive(shadowed(other, folder, 100), 60)
        try:
            second.add("c", list(range(200)))
            second.finish()
            assert second.manager.counters.restored == 0
        finally:
            second.close()
