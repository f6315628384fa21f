"""vLLM arguments that Coda sets itself; extra arguments may not contain them."""

from collections.abc import Sequence

_ONE_WORKER = "one engine process is one Coda worker: use spec.engine.replicas"

OWNED_ARGUMENTS: dict[str, str] = {
    "--model": "use spec.model",
    "--served-model-name": "use spec.model.servedNames",
    "--revision": "use spec.model.revision",
    "--dtype": "use spec.model.dtype",
    "--kv-cache-dtype": "use spec.model.kvCacheDtype",
    "--quantization": "use spec.model.quantization",
    "--max-model-len": "use spec.model.maxContextTokens",
    "--tool-call-parser": "use spec.model.toolParser",
    "--max-num-seqs": "use spec.engine.maxRunning",
    "--max-num-batched-tokens": "use spec.engine.maxBatchedTokens",
    "--kv-cache-memory-bytes": "use spec.engine.kvCacheSize",
    "--enable-lora": "requests for an adapter's name would reach no engine yet",
    "--lora-modules": "requests for an adapter's name would reach no engine yet",
    "--host": "Coda binds the engine's address",
    "--port": "Coda binds the engine's port",
    "--uds": "Coda binds the engine's address",
    "--scheduler-cls": "Coda's admission works inside vLLM's own scheduler",
    "--scheduling-policy": "use spec.admission.state.policy",
    "--kv-transfer-config": "reserved for Coda's KV shadow",
    "--kv-offloading-size": "reserved for Coda's KV shadow",
    "--kv-offloading-backend": "reserved for Coda's KV shadow",
    "--ec-transfer-config": "not supported by state admission",
    "--data-parallel-size": _ONE_WORKER,
    "--data-parallel-size-local": _ONE_WORKER,
    "--data-parallel-rank": _ONE_WORKER,
    "--data-parallel-start-rank": _ONE_WORKER,
    "--data-parallel-address": _ONE_WORKER,
    "--data-parallel-rpc-port": _ONE_WORKER,
    "--data-parallel-backend": _ONE_WORKER,
    "--data-parallel-hybrid-lb": _ONE_WORKER,
    "--data-parallel-external-lb": _ONE_WORKER,
    "--data-parallel-multi-port-external-lb": _ONE_WORKER,
    "--api-server-count": _ONE_WORKER,
    "--headless": _ONE_WORKER,
    "--nnodes": "an engine runs on one node",
    "--node-rank": "an engine runs on one node",
    "--api-key": "API keys are the router's: use spec.router.apiKeySecret",
    "--ssl-keyfile": "the router speaks to engines over plain HTTP",
    "--ssl-certfile": "the router speaks to engines over plain HTTP",
    "--grpc": "the router speaks to engines over plain HTTP",
    "--tensor-parallel-size": "use spec.engine.gpus",
    "--pipeline-parallel-size": "not supported by state admission",
    "--prefill-context-parallel-size": "not supported by state admission",
    "--decode-context-parallel-size": "not supported by state admission",
    "--speculative-config": "not supported by state admission",
    "--spec-method": "not supported by state admission",
    "--spec-model": "not supported by state admission",
    "--spec-tokens": "not supported by state admission",
    "--middleware": "Coda's plug-in serves the engine's internal endpoints",
    "--worker-cls": "reserved for Coda's KV shadow",
    "--worker-extension-cls": "reserved for Coda's KV shadow",
    "--enable-prompt-tokens-details": "always on with Coda",
    "--no-enable-prefix-caching": "Coda needs prefix caching",
    "--config": "a configuration file could hide arguments that Coda owns; write them in spec.engine.extraArgs",
}
"""Argument to the reason it is Coda's, or the field to use instead."""

_SHORT_FORMS = {
    "-q": "--quantization",
    "-dp": "--data-parallel-size",
    "-dpl": "--data-parallel-size-local",
    "-dpn": "--data-parallel-rank",
    "-dpr": "--data-parallel-start-rank",
    "-dpa": "--data-parallel-address",
    "-dpp": "--data-parallel-rpc-port",
    "-dpb": "--data-parallel-backend",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpe": "--data-parallel-external-lb",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-asc": "--api-server-count",
    "-n": "--nnodes",
    "-r": "--node-rank",
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-sc": "--speculative-config",
}


def owned_argument_problems(extra_args: Sequence[str]) -> list[str]:
    """Return one message for each extra argument that Coda owns: its name and what to do instead.

    Accepts vLLM's spellings: ``--a-b value``, ``--a_b=value``, ``-tp 2`` and dotted JSON forms (``--a.b``).
    """
    problems = []
    for argument in extra_args:
        if not argument.startswith("-"):
            continue
        if " " in argument.split("=", 1)[0]:
            problems.append(f"{argument!r} is one argument: give its name and its value as two items")
            continue
        name = argument.split("=", 1)[0].split(".", 1)[0].replace("_", "-")
        name = _SHORT_FORMS.get(name, name)
        match = _owned(name)
        if match is not None:
            problems.append(f"{argument.split('=', 1)[0]} belongs to Coda: {OWNED_ARGUMENTS[match]}")
    return problems


def _owned(name: str) -> str | None:
    """Return the owned argument that ``name`` is, or abbreviates (argparse takes unique prefixes)."""
    if name in OWNED_ARGUMENTS:
        return name
    if name.startswith("--") and len(name) > 2:
        return next((owned for owned in OWNED_ARGUMENTS if owned.startswith(name)), None)
    return None
