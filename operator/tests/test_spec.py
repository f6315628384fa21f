from datetime import date

import pytest

from coda_engine.contract.errors import DocumentError
from coda_operator.spec import CodaClusterSpec, quantity_bytes

MODEL = {"name": "m", "source": {"hub": "org/m"}}


def parse(**spec):
    return CodaClusterSpec.parse({"model": MODEL, **spec})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"engin": {}}, r"spec\.engin: unknown field"),
        ({"engine": {"max_running": 4}}, r"spec\.engine\.max_running: unknown field"),
        ({"engine": {"replicas": 0}}, r"spec\.engine\.replicas: at least 1: this version has no scale-to-zero"),
        ({"engine": {"replicas": "two"}}, r"spec\.engine\.replicas: .*integer"),
        ({"engine": {"replicas": "2"}}, r"spec\.engine\.replicas: .*integer \(given: '2'\)"),
        ({"router": {"replicas": True}}, r"spec\.router\.replicas: .*integer"),
        ({"model": {"name": date(2026, 1, 1), "source": {"hub": "a"}}}, r"spec\.model\.name: .*string"),
        ({"admission": {"state": {"reserveForOldest": "yes"}}}, r"spec\.admission\.state\.reserveForOldest: .*boolean"),
        ({"engine": {"device": "tpu"}}, r"spec\.engine\.device: .*'cpu' or 'cuda' \(given: 'tpu'\)"),
        ({"engine": {"device": "cpu", "gpus": 2}}, r"spec\.engine: gpus and gpuProduct are for device cuda"),
        (
            {"engine": {"kvCacheSize": "lots"}},
            r"spec\.engine\.kvCacheSize: must be a whole number with .* \(given: 'lots'\)",
        ),
        ({"engine": {"memory": "1.5Gi"}}, r"spec\.engine\.memory: must be a whole number .*for example 8Gi"),
        (
            {"engine": {"extraArgs": ["--dtype=float16"]}},
            r"spec\.engine\.extraArgs: --dtype belongs to Coda: use spec\.model\.dtype",
        ),
        (
            {"engine": {"extraArgs": ["--gpu-memory-utilization 0.9"]}},
            r"extraArgs: .* give its name and its value as two items",
        ),
        ({"engine": {"extraArgs": ["--port", "1"]}}, r"spec\.engine\.extraArgs: --port belongs to Coda"),
        ({"admission": {"state": {"tauMs": -5}}}, r"spec\.admission\.state\.tauMs: .*\(given: -5\)"),
        ({"admission": {"execution": {"minRequests": 4, "minCohort": 3}}}, r"spec\.admission\.execution: minCohort 3"),
        ({"admission": {"state": {"policy": "best"}}}, r"spec\.admission\.state\.policy: "),
        ({"router": {"placement": {"overloadBound": 0.5}}}, r"spec\.router\.placement\.overloadBound: "),
        (
            {"model": {"name": "m", "source": {}}},
            r"spec\.model\.source: set exactly one of hub, builtin, hostPath; 0 are set",
        ),
        ({"model": {"name": "m", "source": {"hub": "a", "hostPath": "/b"}}}, r"spec\.model\.source: .*; 2 are set"),
        ({"model": {"name": "", "source": {"hub": "a"}}}, r"spec\.model\.name: "),
    ],
)
def test_a_wrong_field_is_named_with_what_is_allowed(spec, message):
    with pytest.raises(DocumentError, match=message):
        parse(**spec)


def test_every_wrong_field_is_named_at_once():
    with pytest.raises(DocumentError) as refused:
        parse(engine={"replicas": 0, "gpu": 1}, admission={"state": {"tauMs": 0}})
    assert [line.split(":")[0] for line in str(refused.value).split("\n")] == [
        "spec.engine.replicas",
        "spec.engine.gpu",
        "spec.admission.state.tauMs",
    ]


def test_a_specification_that_is_not_a_mapping_is_refused():
    with pytest.raises(DocumentError, match="spec: "):
        CodaClusterSpec.parse(["a"])


@pytest.mark.parametrize(("text", "size"), [("200M", 200_000_000), ("2Gi", 2**31), ("7", 7)])
def test_quantities_are_read_as_kubernetes_reads_them(text, size):
    assert quantity_bytes(text) == size


def test_a_plain_number_is_a_quantity():
    assert parse(engine={"kvCacheSize": 200_000_000}).engine.kv_cache_size == "200000000"


def test_the_spec_key_changes_with_what_a_profile_depends_on():
    keys = {
        parse(engine=engine).spec_key("image:1").digest()
        for engine in ({}, {"gpus": 2}, {"gpuProduct": "NVIDIA-H200"}, {"device": "cpu"})
    }
    assert len(keys | {parse().spec_key("image:2").digest()}) == 5


def test_the_spec_key_does_not_change_with_replicas_or_admission():
    changed = parse(engine={"replicas": 3}, admission={"state": {"tauMs": 1}})
    assert changed.spec_key("image:1") == parse().spec_key("image:1")
