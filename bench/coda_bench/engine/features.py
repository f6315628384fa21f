"""What an engine must have before it is measured: a profile to decide by, and the features of its system."""

import asyncio
from collections.abc import Collection
from http import HTTPStatus

from coda_bench.engine.server import EngineStartError, EngineUnderTest
from coda_engine.contract.reasons import Feature
from coda_engine.contract.snapshot import Capability
from coda_engine.profiling import EngineClient, EngineRequestError
from coda_engine.profiling.assumed import assumed_profile

_ASSUMED_RESTORE_MS_PER_MB = 0.25
_FEATURE_TRIES = 20
_FEATURE_PAUSE_S = 0.25


async def accept_profile(engine: EngineUnderTest, ms_per_token: float = 1.0) -> None:
    """Give the engine a profile with its own key and a straight cost curve, so that admission decides.

    The curve is assumed, not measured: benchmarks of overhead need decisions, not true costs.

    Raises:
        ProfilingError: The engine does not answer.
        ProfileRefusedError: It refused the profile.
    """
    client = EngineClient(engine.url)
    key = await asyncio.to_thread(client.full_key)
    await asyncio.to_thread(
        client.put_profile, assumed_profile(key, ms_per_token, restore_ms_per_mb=_ASSUMED_RESTORE_MS_PER_MB)
    )


async def require_features(engine: EngineUnderTest, features: Collection[Feature]) -> None:
    """Check by the engine's own account that ``features`` are on, so that nothing else is measured in their name.

    Raises:
        EngineStartError: One of them is off; with the engine's reason.
        ProfilingError: The engine does not answer.
    """
    client, wanting = EngineClient(engine.url), ""
    for _ in range(_FEATURE_TRIES):
        try:
            capabilities = (await asyncio.to_thread(client.snapshot)).capabilities
        except EngineRequestError as error:
            if error.status != HTTPStatus.SERVICE_UNAVAILABLE:
                raise
            wanting = "a snapshot"
        else:
            seen = {feature: capabilities.get(feature) for feature in features}
            off = [feature for feature, capability in seen.items() if capability is None or not capability.enabled]
            if not off:
                return
            wanting = "; ".join(f"{feature.value} ({_why(seen[feature])})" for feature in off)
        await asyncio.sleep(_FEATURE_PAUSE_S)  # the next snapshot tells what a delivered profile changed
    raise EngineStartError(f"the engine {engine.system} runs without {wanting}")


def _why(capability: Capability | None) -> str:
    return "unknown to it" if capability is None else f"{capability.reason.value}: {capability.detail}"
