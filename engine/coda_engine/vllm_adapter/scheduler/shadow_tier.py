"""The CPU shadow as state admission sees it: what each waiting request would restore, and when it has to wait."""

from collections.abc import Collection
from typing import Protocol

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from coda_engine.vllm_adapter.scheduler.shadow_residency import ReadyKeys, RestorableRun, ShadowResidency


class Shadow(Protocol):
    """What the connector shows of its shadow (``scheduler.connector.coda_shadow``)."""

    @property
    def index(self) -> ReadyKeys:
        """Which keys can be restored."""
        ...

    @property
    def page_bytes_all_ranks(self) -> int:
        """Bytes that restoring one block moves, all ranks together."""
        ...

    @property
    def outstanding_restore_bytes(self) -> int:
        """Bytes of the restores that have been ordered and have not ended."""
        ...

    @property
    def keys_being_restored(self) -> Collection[bytes]:
        """Keys that restores under way bring back; who needs one of them waits for that restore."""
        ...

    def has_transfers(self, request_id: str) -> bool:
        """Return whether transfers of the request itself are under way."""
        ...

    def may_restore(self, request_id: str) -> bool:
        """Return whether the request is restored at all; not once its loads have failed too often."""
        ...


class ShadowTier:
    """Read-only looks at one open shadow.

    Args:
        shadow: The shadow.
        block_tokens: Tokens in a KV block; a page of the shadow is one block.
    """

    def __init__(self, shadow: Shadow, block_tokens: int) -> None:
        self.shadow = shadow
        self.residency = ShadowResidency(shadow.index)
        self.page_bytes = shadow.page_bytes_all_ranks
        self._block_tokens = block_tokens

    @property
    def outstanding_bytes(self) -> int:
        """Bytes that the transfer domain still has to restore before anything that is ordered now."""
        return self.shadow.outstanding_restore_bytes

    def run_of(self, request: Request) -> RestorableRun:
        """Return a run for the request's prompt, to be refreshed with its hit in HBM."""
        if request.skip_reading_prefix_cache or not self.shadow.may_restore(request.request_id):
            return RestorableRun((), 0)
        blocks = min(len(request.block_hashes), request.num_tokens // self._block_tokens)
        most_tokens = (request.kv_transfer_params or {}).get("max_load_tokens")
        # vLLM ignores any other value in the same way.
        if type(most_tokens) is not int or most_tokens < 0:
            return RestorableRun(request.block_hashes, blocks)
        return RestorableRun(request.block_hashes, blocks, most_tokens // self._block_tokens)

    def passed_over(self, request: Request, run: RestorableRun) -> bool:
        """Return whether vLLM would pass the request over in this step for the sake of a transfer.

        That is so while one of its own transfers is under way, or while another request restores a part of
        what it would restore itself.
        """
        if request.skip_reading_prefix_cache:
            return False
        if self.shadow.has_transfers(request.request_id):
            return True
        loading = self.shadow.keys_being_restored
        return bool(loading) and run.blocks > 0 and any(key in loading for key in run.restored_keys())


def open_shadow(scheduler: Scheduler) -> Shadow | None:
    """Return the scheduler's shadow; None without one, and once it has closed."""
    shadow: Shadow | None = getattr(scheduler.connector, "coda_shadow", None)
    return shadow
