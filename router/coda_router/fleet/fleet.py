"""All workers of one router, each with its follower."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Mapping

import aiohttp

from coda_router.fleet.address import WorkerAddress
from coda_router.fleet.follower import Follower
from coda_router.fleet.guard import SILENCE_LIMIT_S, Guard
from coda_router.fleet.lineup import Lineup
from coda_router.fleet.residency import Residency
from coda_router.fleet.worker import Worker
from coda_router.placement.candidates import Candidates

SNAPSHOT_LINE_BYTES = 1024 * 1024
"""Longest snapshot that is read, bytes."""

FOLLOW_AGAIN_S = 1.0
"""Pause before a follower that failed unexpectedly is started again."""

_log = logging.getLogger("coda.router.fleet")


class Fleet:
    """The workers and what is known of them.

    Use as an async context manager; :meth:`reconcile` may be called at any time. Workers are followed while the
    context is open.

    Args:
        router_id: This router, as engines attribute requests to it.
        internal_token: Sent to the engines' internal endpoints; None = they are open.
        on_change: Called when a request that is held back might now be placed.
        on_evicted: Called with a worker and the hashes of the keys of sessions of which it has nothing left.
        silence_limit_s: Silence after which a request is taken from an engine that does not move on, seconds.
    """

    def __init__(
        self,
        router_id: str,
        internal_token: str | None,
        on_change: Callable[[], None],
        on_evicted: Callable[[Worker, list[int]], None],
        silence_limit_s: float = SILENCE_LIMIT_S,
    ) -> None:
        self._router_id = router_id
        self._silence_limit_s = silence_limit_s
        self._headers = {"authorization": f"Bearer {internal_token}"} if internal_token else {}
        self._tell_change = on_change
        self._news = asyncio.Event()
        self._on_evicted = on_evicted
        self._workers: dict[str, Worker] = {}
        self.residency = Residency()
        self._lineup = Lineup()
        self._followers: dict[str, asyncio.Task[None]] = {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> "Fleet":
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            read_bufsize=SNAPSHOT_LINE_BYTES,
            connector=aiohttp.TCPConnector(limit=0),
            trust_env=False,
        )
        for worker in self._workers.values():
            self._start_following(worker)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        followers = list(self._followers.values())
        self.reconcile(())
        await asyncio.gather(*followers, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    @property
    def workers(self) -> Mapping[str, Worker]:
        """Name to worker."""
        return self._workers

    def reconcile(self, addresses: Iterable[WorkerAddress]) -> None:
        """Follow exactly these workers: new ones are added, the others dropped (their requests may finish)."""
        wanted = {address.name: address for address in addresses}
        for name, worker in list(self._workers.items()):
            if wanted.get(name) != worker.address:
                _log.info("worker %s is not part of the fleet any more", name)
                if name in self._followers:
                    self._followers.pop(name).cancel()
                self._workers.pop(name).pool.close()
                self.residency.forget(name)
        for name, address in wanted.items():
            if name not in self._workers:
                worker = Worker(address, self._router_id, self.residency, self._lineup.changed)
                self._workers[name] = worker
                if self._session is not None:
                    self._start_following(worker)
        self._lineup.consist_of(self._workers.values())

    def views(self, now_s: float) -> Candidates:
        """Return every worker as placement sees it, in the order of their names' arrival."""
        return self._lineup.candidates(now_s)

    def served_models(self, visible: frozenset[str] | None = None) -> list[str]:
        """Return the names of all models that a worker is known to serve, sorted; only ``visible`` ones if given."""
        served = frozenset[str]().union(*(worker.models for worker in self._workers.values()))
        return sorted(served if visible is None else served & visible)

    async def wait_until_known(self, timeout_s: float) -> None:
        """Return as soon as every worker was heard of or probed once, or after ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not all(worker.is_known for worker in self._workers.values()):
                    self._news.clear()
                    await self._news.wait()

    def _on_change(self) -> None:
        self._news.set()
        self._tell_change()

    def _start_following(self, worker: Worker) -> None:
        self._followers[worker.name] = asyncio.create_task(self._follow(worker), name=f"follow {worker.name}")

    async def _follow(self, worker: Worker) -> None:
        if self._session is None:
            raise RuntimeError("the fleet is used outside of its context")
        while True:
            try:
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(Follower(worker, self._session, self._on_change, self._on_evicted).run())
                    tasks.create_task(Guard(worker, self._silence_limit_s, self._on_change).run())
            except Exception:  # whatever it was: a worker that nobody follows would stay out of the fleet for ever
                _log.exception("worker %s: following it failed; starting again", worker.name)
                worker.set_health(False)
                await asyncio.sleep(FOLLOW_AGAIN_S)
