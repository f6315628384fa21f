"""What the scheduler's side and the workers' side of the shadow tell each other; they share no memory."""

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata, KVConnectorWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.kv_offload.base import LoadStoreSpec

from coda_engine.shadow import PageRef


@dataclass(frozen=True, slots=True)
class ShadowPageList(LoadStoreSpec):
    """Pages of a transfer, one for each block of its other end, in the same order.

    Attributes:
        refs: The pages; None where the page vanished before it could be pinned.
    """

    refs: tuple[PageRef | None, ...] = ()


@dataclass(slots=True)
class TransferFailures:
    """What went wrong in transfers that have ended.

    Attributes:
        load_jobs: Loads that were not completed; the blocks from the first failed one on hold nothing.
        bad_pages: Pages that were not what was sealed, or could not be read.
        unwritten_pages: Pages whose copy did not come about.
    """

    load_jobs: set[int] = field(default_factory=set)
    bad_pages: list[PageRef] = field(default_factory=list)
    unwritten_pages: list[PageRef] = field(default_factory=list)

    def add(self, other: "TransferFailures") -> None:
        """Take in the failures of other transfers, or of other ranks in the same ones."""
        self.load_jobs |= other.load_jobs
        self.bad_pages += [ref for ref in other.bad_pages if ref not in self.bad_pages]
        self.unwritten_pages += [ref for ref in other.unwritten_pages if ref not in self.unwritten_pages]


@dataclass
class ShadowWorkerMetadata(OffloadingWorkerMetadata):
    """vLLM's report of completed transfers, with those that failed.

    To vLLM a failed transfer is a completed one: its own report has no other kind.
    """

    failures: TransferFailures = field(default_factory=TransferFailures)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "ShadowWorkerMetadata":
        """Return the report of this and another rank."""
        native = super().aggregate(other)
        assert isinstance(native, OffloadingWorkerMetadata)  # noqa: S101 - so says vLLM's own
        failures = TransferFailures()
        for part in (self, other):
            if isinstance(part, ShadowWorkerMetadata):
                failures.add(part.failures)
        return ShadowWorkerMetadata(native.completed_jobs, native.transfer_stats, failures)


@dataclass(frozen=True, slots=True)
class ShadowHandshake(KVConnectorHandshakeMetadata):
    """What a worker says of its pages before anything is stored.

    Attributes:
        layout_digest: Digest of the layout as the worker sees it.
        problem: Why the worker has no pages; "" when it has.
    """

    layout_digest: str
    problem: str = ""
