"""The router's Prometheus metrics, in a registry of its own."""

from collections import Counter
from collections.abc import Iterable, Iterator
from enum import StrEnum

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from coda_router.auth.keys import ApiKeys
from coda_router.auth.limits import Limit
from coda_router.dispatch import Dispatcher
from coda_router.faults import EngineFault
from coda_router.hygiene.cleaning import HygieneRule
from coda_router.relay import RelayEvent

_FIRST_BYTE_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class WatchedFile(StrEnum):
    """What a router reads again when it changes, as metrics name it."""

    SETTINGS = "Settings"
    API_KEYS = "ApiKeys"


class RouterMetrics(Collector):
    """Counts on the data path in plain integers and renders them when somebody asks.

    Attributes:
        first_byte_s: Time from a request's receipt to its reply's first byte, seconds.
    """

    def __init__(self, dispatcher: Dispatcher, keys: ApiKeys) -> None:
        self._dispatcher = dispatcher
        self._keys = keys
        self._answers: Counter[tuple[str, int]] = Counter()
        self._refusals: Counter[str] = Counter()
        self._relay_events: Counter[RelayEvent] = Counter()
        self._faults: Counter[EngineFault] = Counter()
        self._cleaned: Counter[HygieneRule] = Counter()
        self._refused_reloads: Counter[str] = Counter({file.value: 0 for file in WatchedFile})
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

    def reload_refused(self, file: WatchedFile) -> None:
        """Count a changed file that was not taken."""
        self._refused_reloads[file.value] += 1

    def relay_event(self, event: RelayEvent) -> None:
        """Count a retry, a truncation, a keep-alive or a client that left."""
        self._relay_events[event] += 1

    def engine_fault(self, fault: EngineFault) -> None:
        """Count a reply of an engine that was not taken, or not to its end."""
        self._faults[fault] += 1

    def cleaned(self, rules: Iterable[HygieneRule]) -> None:
        """Count the rules of prefix hygiene that changed one request."""
        for rule in rules:
            self._cleaned[rule] += 1

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
        limited = Counter({limit.value: self._keys.limited[limit] for limit in Limit if limit is not Limit.NONE})
        yield _counter("coda_router_limited_requests", "Requests refused by a limit of their key.", "limit", limited)
        yield _counter("coda_router_refused_reloads", "Changed files not taken.", "file", self._refused_reloads)
        events = Counter({event.value: self._relay_events[event] for event in RelayEvent})
        yield _counter(
            "coda_router_relay_events", "Retries, truncations, keep-alives, clients that left.", "event", events
        )
        faults = Counter({fault.value: self._faults[fault] for fault in EngineFault})
        yield _counter("coda_router_engine_faults", "Replies of engines that were not taken whole.", "fault", faults)
        cleaned = Counter({rule.value: self._cleaned[rule] for rule in HygieneRule})
        yield _counter("coda_router_cleaned_requests", "Requests that prefix hygiene changed.", "rule", cleaned)
        yield from self._fleet_metrics()
        yield from self._decision_file_metrics()
        yield CounterMetricFamily(
            "coda_router_held", "Requests that were held back.", self._dispatcher.holding.held_total
        )
        yield GaugeMetricFamily(
            "coda_router_held_requests", "Requests held back for want of an engine.", len(self._dispatcher.holding)
        )
        yield GaugeMetricFamily(
            "coda_router_sessions", "Sessions whose last placement is remembered.", len(self._dispatcher.sessions)
        )

    def _decision_file_metrics(self) -> Iterator[Metric]:
        file = self._dispatcher.decisions.file
        if file is not None:
            outcomes = Counter({"written": file.written, "dropped": file.dropped})
            documentation = "Lines for the decision log file, by what became of them."
            yield _counter("coda_router_decision_log_lines", documentation, "outcome", outcomes)

    def _fleet_metrics(self) -> Iterator[Metric]:
        in_flight = GaugeMetricFamily(
            "coda_router_in_flight_requests", "Requests in flight from this router.", labels=("worker",)
        )
        healthy = GaugeMetricFamily("coda_router_worker_healthy", "Whether the worker answers.", labels=("worker",))
        ejections = CounterMetricFamily(
            "coda_router_worker_ejections", "Times that the worker failed too often or hung.", labels=("worker",)
        )
        for name, worker in self._dispatcher.fleet.workers.items():
            in_flight.add_metric((name,), worker.in_flight_requests)
            healthy.add_metric((name,), int(worker.is_healthy))
            ejections.add_metric((name,), worker.ejection.ejections)
        yield in_flight
        yield healthy
        yield ejections


def _counter(name: str, documentation: str, label: str, counts: Counter[str]) -> CounterMetricFamily:
    family = CounterMetricFamily(name, documentation, labels=(label,))
    for value, count in counts.items():
        family.add_metric((value,), count)
    return family
