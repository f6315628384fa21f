"""Which system runs when and on which core: systems alternate, and swap cores between repetitions."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from coda_bench.engine.systems import System


@dataclass(frozen=True, slots=True)
class Job:
    """One run.

    Attributes:
        system: What runs.
        seed: The arrival pattern that it meets.
        core: CPU that its engine is bound to.
    """

    system: System
    seed: int
    core: int


def jobs(systems: Sequence[System], seeds: Sequence[int], cores: Sequence[int]) -> list[Job]:
    """Return a run for each system and seed, in order.

    From one seed to the next every system changes its core and the order begins with the next system, so that
    neither a faster core nor a slow hour of the machine favours anybody.
    """
    planned = []
    for repetition, seed in enumerate(seeds):
        order = [(repetition + offset) % len(systems) for offset in range(len(systems))]
        planned += [Job(systems[index], seed, cores[(index + repetition) % len(cores)]) for index in order]
    return planned


def side_by_side(planned: Sequence[Job], cores: Sequence[int]) -> list[list[Job]]:
    """Return the runs in groups that go on at the same time, at most one on each core."""
    lanes = [[job for job in planned if job.core == core] for core in cores]
    return [[job for job in group if job is not None] for group in zip_longest(*lanes)]
