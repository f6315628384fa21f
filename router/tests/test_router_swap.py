"""The placement policy changes under traffic, by the settings document, without a request noticing."""

import asyncio

from router_harness import RunningRouter, running_router
from scripted_worker import running_worker

from coda_engine.contract.settings import PlacementPolicyName, Settings


async def use(router: RunningRouter, policy: PlacementPolicyName) -> int:
    """Put a policy in force; return the number of the first decision made by it."""
    document = {"placement": {"policy": policy.value}}
    async with router.session.put(f"{router.url}/coda/settings", json=document) as reply:
        assert (reply.status, await reply.json()) == (200, {"digest": Settings.model_validate(document).digest()})
    _, decisions = await router.get("/coda/decisions")
    return int(decisions["next"])


async def test_every_policy_takes_over_under_traffic_without_a_failed_request():
    statuses: list[int] = []
    is_over = asyncio.Event()

    async def agent(router: RunningRouter, name: str) -> None:
        while not is_over.is_set():
            status, _ = await router.chat(headers={"x-coda-session": name})
            statuses.append(status)

    async with running_worker() as a, running_worker() as b, running_worker() as c, running_router(a, b, c) as router:
        agents = [asyncio.create_task(agent(router, f"s{n}")) for n in range(4)]
        for policy in PlacementPolicyName:
            first = await use(router, policy)
            seen = len(statuses)
            while len(statuses) < seen + 20:
                await asyncio.sleep(0.005)
            decisions = [d for d in await router.decisions() if d["sequence"] >= first]
            assert {d["policy"] for d in decisions} == {policy}
            assert all(d["worker"] for d in decisions)
        is_over.set()
        await asyncio.gather(*agents)
    assert set(statuses) == {200}


async def test_sessions_stay_where_they_are_when_a_policy_without_affinity_was_in_force_only_briefly():
    async with running_worker() as a, running_worker() as b, running_router(a, b) as router:
        await router.chat(headers={"x-coda-session": "s"})
        home = (await router.decisions())[-1]["worker"]
        await use(router, PlacementPolicyName.CACHEWISE_RR)
        for _ in range(3):
            await router.chat(headers={"x-coda-session": "s"})
        assert {d["worker"] for d in await router.decisions()} == {home}
