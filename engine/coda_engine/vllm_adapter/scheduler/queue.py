"""vLLM's waiting queue with one change: the head is chosen when the scheduler looks at it."""

from collections.abc import Iterable, Sequence
from typing import Protocol

from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.request import Request, RequestStatus


class HeadChooser(Protocol):
    """Decides which waiting request the scheduler sees next."""

    @property
    def reorders(self) -> bool:
        """Whether others than the native head may be promoted."""
        ...

    def choose(self, waiting: "FrontierQueue") -> Request | None:
        """Return the request to promote; None keeps the native head. Never raises."""
        ...

    def popped(self, request: Request) -> None:
        """Take note that the scheduler took ``request``, to run it or to skip it for this step."""
        ...

    def removed(self, requests: Sequence[Request]) -> None:
        """Take note that ``requests`` left the queue without being scheduled."""
        ...


class FrontierQueue(FCFSRequestQueue):
    """First come, first served, except that the chooser may promote one request to the head.

    The scheduler peeks, decides and pops; the choice is therefore remembered from the first peek until the
    next pop or any other change of the queue, so that what is popped is what was peeked. While requests are
    promoted, one that the scheduler passes over or that comes back goes to where it had arrived, not to the head.

    Attributes:
        changes: Grows whenever requests come, leave or are put back.
    """

    def __init__(self, chooser: HeadChooser, waiting: Iterable[Request] = ()) -> None:
        super().__init__(waiting)
        self._chooser = chooser
        self._chosen: Request | None = None
        self._promoted: Request | None = None
        self.changes = 0

    @property
    def chosen(self) -> Request | None:
        """The head as chosen and not popped since; None when the next peek will choose."""
        return self._chosen

    def reconsider(self) -> None:
        """Choose again at the next peek; who was promoted and not popped goes back to where it had arrived."""
        self._chosen = None
        promoted, self._promoted = self._promoted, None
        if promoted is not None and promoted.status != RequestStatus.PREEMPTED:
            self.remove(promoted)
            self.insert(self._place_of(promoted), promoted)

    def peek_request(self) -> Request:
        """Return the head after at most one remove-and-prepend."""
        if self._chosen is None:
            head = super().peek_request()
            promoted = self._chooser.choose(self)
            if promoted is not None and promoted is not head:
                self.remove(promoted)
                self.appendleft(promoted)
                self._promoted = head = promoted
            self._chosen = head
        return self._chosen

    def pop_request(self) -> Request:
        """Return and remove the head that was peeked."""
        request = super().pop_request()
        self._changed()
        self._left(request)
        self._chooser.popped(request)
        return request

    def add_request(self, request: Request) -> None:
        """Append ``request``."""
        self._changed()
        super().add_request(request)

    def prepend_request(self, request: Request) -> None:
        """Put ``request`` (a preempted one) at the head."""
        self._changed()
        super().prepend_request(request)

    def prepend_requests(self, requests: Iterable[Request]) -> None:
        """Put back the requests that the scheduler passed over in this step, the last first."""
        self._changed()
        returning = list(requests)
        placed = {one for one in returning if self._chooser.reorders and one.status != RequestStatus.PREEMPTED}
        super().prepend_requests(request for request in returning if request not in placed)
        for request in reversed(returning):
            if request in placed:
                self.insert(self._place_of(request), request)

    def remove_request(self, request: Request) -> None:
        """Remove an aborted request."""
        self._changed()
        super().remove_request(request)
        self._left(request)
        self._chooser.removed((request,))

    def remove_requests(self, requests: Iterable[Request]) -> None:
        """Remove aborted requests."""
        self._changed()
        leaving = list(requests)
        super().remove_requests(leaving)
        for request in leaving:
            self._left(request)
        self._chooser.removed(leaving)

    def _place_of(self, request: Request) -> int:
        """Return where a request that has waited belongs: before all that arrived later, behind preempted ones."""
        for place, other in enumerate(self):
            if other.status != RequestStatus.PREEMPTED and other.arrival_time > request.arrival_time:
                return place
        return len(self)

    def _left(self, request: Request) -> None:
        if request is self._promoted:
            self._promoted = None

    def _changed(self) -> None:
        self._chosen = None
        self.changes += 1
