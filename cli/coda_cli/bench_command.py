"""``coda bench``: the benchmarks, each a command of the package ``coda_bench``."""

from coda_cli.lazy_group import LazyGroup

bench = LazyGroup(
    {
        "engine": ("coda_bench.engine.command:engine", "The engine's decisions and their cost, against stock vLLM."),
        "router": ("coda_bench.router.command:router", "The router's data path: added latency, CPU, memory."),
    },
    name="bench",
    help="Run a benchmark; figures are one JSON object a line, with a table for people.",
)
