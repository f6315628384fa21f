"""The router's Prometheus metrics, in a registry of its own."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from coda_router.dispatch import Dispatcher
from coda_router.relay import RelayEvent

_FIRST_BYTE_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class RouterMetrics(Collector):
    """Counts on the data path in plain integers and renders them when somebody asks.

    Attributes:
        first_byte_s: Time from a request's receipt to its reply's first byte, seconds.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._answers: Counter[tuple[str, int]] = Counter()
        self._refusals: Counter[str] = Counter()
        self._relay_events: Counter[RelayEvent] = Counter()
        self._registry = CollectorRegistry(auto_describe=False)
        self.first_byte_s = Histogram(
            "coda_router_first_byte_seconds",
            "Time from a request's receipt to the first byte of its reply.",
            buckets=_FIRST_BYTE_BUCKETS_S,
            registry=self._registry,
        )
        self._registry.register(self)

    def answered(self, endpoint: str, status: int) -> None:
        """Count a request as over; status 0 means that its reply was cut off before anything was sent."""
        self._answers[endpoint, status] += 1

    def refused(self, code: str) -> None:
        """Count a request that the router answered with an error itself."""
        self._refusals[code] += 1

    def relay_event(self, event: RelayEvent) -> None:
        """Count a retry, a truncation or a client that left."""
        self._relay_events[event] += 1

    def render(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Return nothing: collecting is cheap, but the registry need not do it at registration."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield the counts as metrics."""
        answers = CounterMetricFamily(
            "coda_router_requests",
            "Requests by endpoint and status (499 = client left).",
            labels=("endpoint", "status"),
        )
        for (endpoint, status), count in self._answers.items():
            answers.add_metric((endpoint, str(status)), count)
        yield answers
        decisions = self._dispatcher.decisions
        yield _counter("coda_router_placements", "Placements by deciding reason.", "reason", decisions.decided)
        yield _counter("coda_router_stage_findings", "What placement stages found.", "reason", decisions.found)
        yield _counter("coda_router_refusals", "Requests refused by the router itself.", "code", self._refusals)
        events = Counter({event.value: self._relay_events[event] for event in RelayEvent})
        yield _counter("coda_router_relay_events", "Retries, truncations, clients that left.", "event", events)
        yield from self._fleet_metrics()
        yield CounterMetricFamily(
            "coda_router_held", "Requests that were held back.", self._dispatcher.holding.held_total
        )
        yield GaugeMetricFamily(
            "coda_router_held_requests", "Requests held back for want of an engine.", len(self._dispatcher.holding)
        )
        yield GaugeMetricFamily(
            "coda_router_sessions", "Sessions whose last placement is remembered.", len(self._dispatcher.sessions)
        )

    def _fleet_metrics(self) -> Iterator[Metric]:
        in_flight = GaugeMetricFamily(
            "coda_router_in_flight_requests", "Requests in flight from this router.", labels=("worker",)
        )
        healthy = GaugeMetricFamily("coda_router_worker_healthy", "Whether the worker answers.", labels=("worker",))
        for name, worker in self._dispatcher.fleet.workers.items():
            in_flight.add_metric((name,), worker.in_flight_requests)
            healthy.add_metric((name,), int(worker.is_healthy))
        yield in_flight
        yield healthy


def _counter(name: str, documentation: str, label: str, counts: Counter[str]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, documentation, labels=(label,))
    for value, count in counts.items():
        family.add_metric((value,), count)
    return family
