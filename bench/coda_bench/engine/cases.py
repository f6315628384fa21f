"""The cases that play sessions: how much memory, how much load, how long, and in which size they are run."""

from dataclasses import dataclass, field, replace

from coda_bench.engine.systems import NAMES
from coda_bench.engine.window import Window

KV_BLOCKS = 270
"""8.6 thousand tokens: two or three of the sessions' longest contexts, as a GPU holds of real ones."""

TIGHT_KV_BLOCKS = 188
SHADOW_TIMES_HBM = 10
QUICK_SHADOW_TIMES_HBM = 2
MAX_RUNNING = 16
MAX_CONTEXT_TOKENS = 4_096
LOAD = 1.35
"""Arrivals as a multiple of what FIFO with a shadow can serve: without a queue no order matters."""

_START_S = 40.0
"""About the time in which an engine starts and ends."""

ABLATION = ("cachewise", "tiered-aging", "coda")

SWEEP = (
    "coda",
    *(f"coda+tauMs={tau_ms}+maxWaitMs={wait_ms}" for tau_ms in (5_000, 20_000) for wait_ms in (20_000, 40_000, 60_000)),
)
"""How the default's constants are chosen for a configuration (paper Appendix A: an offline sweep)."""

ASSUMED_CAPACITY_PER_S = 0.3
"""FIFO's sessions/s where it is not measured (the quick size): about that of one core of a server CPU."""


@dataclass(frozen=True, slots=True)
class SessionsCase:
    """One comparison of systems under sessions that arrive at random.

    Attributes:
        name: As rows carry it.
        systems: Compared by default.
        load: Arrivals as a multiple of FIFO's capacity; None = uncompressed.
        requests_per_s: Model requests a second when uncompressed.
        kv_blocks: Blocks of KV cache in HBM.
        warm_s: Time before the window, seconds.
        window_s: Length of the window, seconds.
        blocks: Equal parts of the window, for the interval.
        seeds: Arrival patterns; every system meets each of them once, on alternating cores.
        drained_arrivals_s: Time in which the sessions of the finite trace arrive that is run to its end after the
            window, seconds; 0 = there is none.
        drained_seeds: The seeds after which that is done.
        drain_limit_s: Longest time for it, seconds.
        drain_expected_s: About how long it takes, seconds.
    """

    name: str
    systems: tuple[str, ...] = NAMES
    load: float | None = LOAD
    requests_per_s: float = 0.0
    kv_blocks: int = KV_BLOCKS
    warm_s: float = 60.0
    window_s: float = 240.0
    blocks: int = 4
    seeds: tuple[int, ...] = (1, 2, 3, 4)
    drained_arrivals_s: float = 60.0
    drained_seeds: tuple[int, ...] = (1, 2)
    drain_limit_s: float = 300.0
    drain_expected_s: float = 120.0

    @property
    def window(self) -> Window:
        """The part of each run that counts."""
        return Window(self.warm_s, self.warm_s + self.window_s, self.blocks)

    def expected_s(self, seed: int) -> float:
        """Return about how long one run takes with its engine's start, seconds."""
        return _START_S + self.warm_s + self.window_s + (self.drain_expected_s if self.drains(seed) else 0.0)

    def drains(self, seed: int) -> bool:
        """Return whether the finite trace is run after this seed's window."""
        return self.drained_arrivals_s > 0 and seed in self.drained_seeds


_SHORTER = SessionsCase("", warm_s=45.0, window_s=180.0, blocks=3, seeds=(1, 2, 3), drained_arrivals_s=0)

FULL = (
    SessionsCase("m3"),
    replace(_SHORTER, name="m3-tight", kv_blocks=TIGHT_KV_BLOCKS),
    replace(_SHORTER, name="m3-2.7x", load=2.7),
    replace(_SHORTER, name="m1", load=None, requests_per_s=0.6),
    SessionsCase("ablation", systems=ABLATION),
    replace(_SHORTER, name="sweep", systems=SWEEP, seeds=(1, 2)),
)
"""Cases of full size; all but ``m3`` are asked for by name."""


def quick(case: SessionsCase) -> SessionsCase:
    """Return the same work cut to a minute: it shows that everything runs, its figures mean nothing."""
    return replace(
        case,
        systems=(case.systems[0], case.systems[-1]),
        warm_s=3.0,
        window_s=12.0,
        blocks=2,
        seeds=(1,),
        drained_arrivals_s=1.0 if case.drained_arrivals_s else 0.0,
        drained_seeds=(1,),
        drain_limit_s=20.0,
        drain_expected_s=20.0,
    )


@dataclass(frozen=True, slots=True)
class FleetCase:
    """Two engines behind a router: each placement with admission on and off.

    Attributes:
        name: As rows carry it.
        placements: Placement policies of the router.
        admissions: Systems that the engines run: the default, and first come, first served.
        run: Load, length and seeds of each run; both engines together get twice one engine's load.
    """

    name: str = "fleet2"
    placements: tuple[str, ...] = ("coda", "smetric", "round-robin")
    admissions: tuple[str, ...] = ("coda", "fifo")
    run: SessionsCase = field(
        default=SessionsCase("fleet2", warm_s=30.0, window_s=120.0, blocks=2, seeds=(1, 2), drained_arrivals_s=0)
    )
