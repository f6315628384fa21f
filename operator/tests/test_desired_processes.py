import json

import pytest

from coda_engine.contract.interface import ENV_SPEC_KEY
from coda_engine.contract.owned_args import OWNED_ARGUMENTS
from coda_engine.contract.profile import SpecKey
from coda_operator.desired.processes import EnginePlace, RouterPlace, engine_process, router_process
from coda_operator.spec import CodaClusterSpec

PLACE = EnginePlace(
    "engine-0", "python3", "127.0.0.1", 9000, "/models/m", "/c/settings.json", "/c/profile.json", cores="1"
)


def engine(model=None, place=PLACE, **fields):
    spec = CodaClusterSpec.parse(
        {
            "model": {"name": "m", "servedNames": ["alias"], "source": {"hostPath": "/models/m"}, **(model or {})},
            "engine": fields,
        }
    )
    return engine_process(spec, spec.spec_key("v"), place)


def value(process, option):
    return process.argv[process.argv.index(option) + 1]


def test_an_engine_is_stock_vllm_with_plugins_by_entry_point():
    process = engine(device="cpu")
    assert process.argv[:3] == ("python3", "-m", "vllm.entrypoints.openai.api_server")
    assert process.env["VLLM_PLUGINS"] == "coda,coda_http"


def test_a_model_is_served_under_its_name_and_aliases():
    argv = engine(device="cpu").argv
    position = argv.index("--served-model-name")
    assert argv[position + 1 : position + 3] == ("m", "alias")


def test_a_cpu_engine_takes_small_steps_and_is_bound_to_its_cores():
    process = engine(device="cpu", cpus=2, kvCacheSize="200M")
    assert value(process, "--max-num-batched-tokens") == "512"
    assert value(process, "--kv-cache-memory-bytes") == "200000000"
    assert process.env["VLLM_CPU_OMP_THREADS_BIND"] == "1"
    assert process.env["OMP_NUM_THREADS"] == "2"


def test_a_gpu_engine_keeps_vllms_own_step_and_block_sizes():
    argv = engine(gpus=4).argv
    assert "--block-size" not in argv
    assert "--max-num-batched-tokens" not in argv
    assert argv[argv.index("--tensor-parallel-size") + 1] == "4"


def test_a_hub_model_is_asked_for_by_id_and_may_use_the_network():
    place = EnginePlace("e", "python3", "10.0.0.1", 1, None, "/s", "/p")
    process = engine({"source": {"hub": "org/m"}, "revision": "abc"}, place=place)
    assert value(process, "--model") == "org/m"
    assert value(process, "--revision") == "abc"
    assert "HF_HUB_OFFLINE" not in process.env


def test_the_engine_is_told_the_key_that_it_was_started_for():
    process = engine(device="cpu")
    assert SpecKey.model_validate(json.loads(process.env[ENV_SPEC_KEY])).model == "/models/m"


def test_no_extra_argument_can_contradict_a_field_of_the_specification():
    model = {
        "source": {"hub": "org/m"}, "revision": "abc", "dtype": "float16", "kvCacheDtype": "fp8", "quantization": "awq",
        "maxContextTokens": 4096, "toolParser": "hermes",
    }  # fmt: skip
    argv = engine(model, gpus=2, kvCacheSize="1Gi", maxRunning=4, maxBatchedTokens=4096).argv
    switches = {
        "--enable-prefix-caching",
        "--enable-auto-tool-choice",
        "--disable-uvicorn-access-log",
        "--shutdown-timeout",
    }
    assert {argument for argument in argv if argument.startswith("--")} - switches <= OWNED_ARGUMENTS.keys()


@pytest.mark.parametrize("argument", ["--model", "--port", "--host", "--served-model-name"])
def test_arguments_that_coda_sets_are_refused_in_extra_args(argument):
    assert argument in engine(device="cpu").argv
    assert argument in OWNED_ARGUMENTS


def test_a_router_gets_only_the_options_that_it_has():
    process = router_process(
        RouterPlace("router", "python3", "127.0.0.1", 8080, "/s", workers=("http://a", "http://b"))
    )
    assert " ".join(process.argv[3:]) == (
        "--host 127.0.0.1 --port 8080 --workers http://a --workers http://b --settings-file /s"
    )
