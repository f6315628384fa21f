"""What state admission remembers from one look at the queue to the next."""

from dataclasses import dataclass

from vllm.v1.request import Request

from coda_engine.vllm_adapter.scheduler.decisions import Decision
from coda_engine.vllm_adapter.scheduler.feasibility import Room


@dataclass(slots=True, eq=False)
class Pending:
    """A choice that the scheduler has not acted on yet.

    Attributes:
        request: The choice.
        decision: Why.
        promised: It fits as far as admission can tell, so that the allocator's no would be a wrong prediction.
    """

    request: Request
    decision: Decision
    promised: bool = True

    @property
    def refused(self) -> bool:
        """Whether a prediction was wrong if the scheduler looked at the request and left it in the queue."""
        # Something else than KV may keep a request with encoder inputs from being scheduled.
        return self.promised and not self.request.has_encoder_inputs


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What a decision depends on beside the time.

    Attributes:
        room: Blocks that may be taken.
        queue_changes: The queue's ``changes``.
        doubts: Events that touched what waiting requests would reuse or restore.
        references: Times that blocks may have become used or unused.
    """

    room: Room
    queue_changes: int
    doubts: int
    references: int


@dataclass(frozen=True, slots=True)
class Standstill:
    """Nobody can be admitted, whatever the time, while nothing changes and no more blocks may be taken.

    Attributes:
        since: The circumstances in which it was found.
        reserved: Whom freed blocks are kept for; None when the native head stays.
    """

    since: Circumstances
    reserved: Request | None = None

    def holds(self, now: Circumstances) -> bool:
        """Return whether it is certain that still nobody can be admitted."""
        then = self.since
        return now.room.within(then.room) and (now.queue_changes, now.doubts, now.references) == (
            then.queue_changes,
            then.doubts,
            then.references,
        )
