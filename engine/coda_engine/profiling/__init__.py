"""Profiling: measure a running engine, fit its cost curve, check it on held-out sizes, write the artifact.

``plan`` decides what to measure, ``engine`` talks to the engine, ``measure`` does it, ``fit`` judges the samples;
``plan`` and ``fit`` are pure.
"""

from coda_engine.profiling.engine import EngineClient, ProcessClient
from coda_engine.profiling.errors import EngineBusyError, EngineRequestError, MeasurementError, ProfilingError
from coda_engine.profiling.measure import measure_profile

__all__ = [
    "EngineBusyError",
    "EngineClient",
    "EngineRequestError",
    "MeasurementError",
    "ProcessClient",
    "ProfilingError",
    "measure_profile",
]
