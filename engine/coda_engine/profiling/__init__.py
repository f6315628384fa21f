"""Profiling: measure a running engine, fit its costs, check them on held-out points, write the artifact.

``plan`` decides what to measure, ``engine`` talks to the engine, ``sampler`` takes one sample, ``measure`` goes through
the rounds, ``resume`` keeps what was measured over an interruption, ``fit`` judges the samples, ``revalidate`` looks at
held-out points again; ``plan`` and ``fit`` are pure.
"""

from coda_engine.profiling.engine import EngineClient, ProcessClient
from coda_engine.profiling.errors import EngineBusyError, EngineRequestError, MeasurementError, ProfilingError
from coda_engine.profiling.measure import measure_profile
from coda_engine.profiling.plan import FULL, QUICK, THOROUGH, Effort
from coda_engine.profiling.resume import sample_file_path
from coda_engine.profiling.revalidate import needs_revalidation, revalidate

__all__ = [
    "FULL",
    "QUICK",
    "THOROUGH",
    "Effort",
    "EngineBusyError",
    "EngineClient",
    "EngineRequestError",
    "MeasurementError",
    "ProcessClient",
    "ProfilingError",
    "measure_profile",
    "needs_revalidation",
    "revalidate",
    "sample_file_path",
]
