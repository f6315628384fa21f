"""Real schedulers, connectors, workers and a real shadow store around a KV cache whose right content is known.

The forward pass is replaced by one that writes a chain of hashes: eight bytes for each token, made of all tokens
before it. Before it writes, it reads every context as attention would. So whatever reaches a request's blocks
wrongly (a page of another prefix, a torn copy, a block reused too early) is noticed in the step that would use it.
"""

import copy
import pickle
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from scheduler_harness import BLOCK_TOKENS, Drive
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.kv_offload.base import CanonicalKVCacheRef, CanonicalKVCaches, CanonicalKVCacheTensor
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from coda_engine.shadow import EvictionPolicyName
from coda_engine.vllm_adapter.config import ShadowConfig
from coda_engine.vllm_adapter.shadow.connector import CodaShadowConnector
from coda_engine.vllm_adapter.shadow.injection import configure
from coda_engine.vllm_adapter.shadow.worker import HostShadowWorker

TOKEN_BYTES = 8
PAGE_BYTES = BLOCK_TOKENS * TOKEN_BYTES
_MASK = 2**64 - 1
_LONG_CONTEXT_TOKENS = 900


def shadowed(config: VllmConfig, folder: Path, blocks: int, ranks: int = 1) -> VllmConfig:
    """Return a copy of ``config`` with a shadow of ``blocks`` blocks in ``folder``."""
    own = copy.deepcopy(config)
    own.parallel_config.tensor_parallel_size = own.parallel_config.world_size = ranks
    configure(own, ShadowConfig(blocks * PAGE_BYTES * ranks, folder, EvictionPolicyName.LRU))
    assert own.kv_transfer_config is not None
    return own


@dataclass
class Faults:
    """What goes wrong, each with its probability for one page or transfer, and how late loads end."""

    damage: float = 0.0
    unreadable: float = 0.0
    unwritable: float = 0.0
    most_late_steps: int = 0
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def happens(self, probability: float) -> bool:
        """Toss a coin."""
        return probability > 0 and self.rng.random() < probability


class FaultyPages:
    """A rank's pages through which faults come in."""

    def __init__(self, pages, faults: Faults) -> None:
        self._pages, self._faults = pages, faults
        self.damaged = 0

    def intact(self, ref, copy=None):
        if self._faults.happens(self._faults.unreadable):
            raise OSError("the page cannot be read")
        if self._faults.happens(self._faults.damage):
            self._pages.page(ref.slot)[self._faults.rng.randrange(PAGE_BYTES)] ^= 1
            self.damaged += 1
        return self._pages.intact(ref, copy)

    def seal(self, ref):
        if self._faults.happens(self._faults.unwritable):
            raise OSError("the page cannot be written")
        self._pages.seal(ref)

    def __getattr__(self, name):
        return getattr(self._pages, name)


class Rank:
    """One tensor-parallel rank: its KV cache, its end of the connector, transfers that take their time."""

    def __init__(self, config: VllmConfig, kv_cache: KVCacheConfig, rank: int, faults: Faults) -> None:
        own = copy.deepcopy(config)
        own.parallel_config.rank = rank
        self.kv = torch.zeros((kv_cache.num_blocks, PAGE_BYTES), dtype=torch.int8)
        self.connector = CodaShadowConnector(own, KVConnectorRole.WORKER, kv_cache)
        self.connector.connector_worker._init_worker(
            CanonicalKVCaches([CanonicalKVCacheTensor(self.kv, PAGE_BYTES)], [[CanonicalKVCacheRef(0, PAGE_BYTES)]])
        )
        worker = self.connector.connector_worker.worker
        self._faults, self._held, self._ended = faults, [], worker._ended
        worker._ended = self._late
        if isinstance(worker, HostShadowWorker):
            self.pages = worker._pages = FaultyPages(worker._pages, faults)

    @property
    def words(self) -> np.ndarray:
        """The KV cache as one 64-bit number for each token of each block."""
        return self.kv.numpy().view(np.uint64)

    def before_forward(self, output: SchedulerOutput) -> None:
        """Do what vLLM's model runner does before the forward pass."""
        self.metadata = pickle.loads(pickle.dumps(output.kv_connector_metadata))  # noqa: S301 - as between processes
        self.connector.handle_preemptions(self.metadata)
        self.connector.bind_connector_metadata(self.metadata)

    def after_forward(self, output: SchedulerOutput) -> KVConnectorOutput:
        """Do what vLLM's model runner does after it."""
        self.connector.start_load_kv(None)
        self.connector.wait_for_save()
        results = self.connector.get_transfer_results(output.finished_req_ids)
        report = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=self.connector.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=self.connector.build_connector_worker_meta(),
        )
        self.connector.clear_connector_metadata()
        return pickle.loads(pickle.dumps(report))  # noqa: S301 - as between processes

    def _late(self):
        self._held += [(self._faults.rng.randint(0, self._faults.most_late_steps), one) for one in self._ended()]
        due = [outcome for left, outcome in self._held if left <= 0]
        self._held = [(left - 1, outcome) for left, outcome in self._held if left > 0]
        return due


class ShadowDrive(Drive):
    """A scheduler with a shadow, its ranks, and the requests that a test gave it."""

    def __init__(self, config: VllmConfig, blocks: int, faults: Faults | None = None) -> None:
        ranks = config.parallel_config.tensor_parallel_size
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=2, dtype=torch.bfloat16)
        kv_cache = KVCacheConfig(
            num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        config.cache_config.num_gpu_blocks = blocks
        construct = getattr(Scheduler.__init__, "__wrapped__", Scheduler.__init__)
        scheduler = Scheduler.__new__(Scheduler)
        with set_current_vllm_config(config):
            construct(
                scheduler,
                vllm_config=config,
                kv_cache_config=kv_cache,
                structured_output_manager=StructuredOutputManager(config),
                block_size=BLOCK_TOKENS,
                log_stats=False,
            )
            self.faults = faults or Faults()
            self.ranks = [Rank(config, kv_cache, rank, self.faults) for rank in range(ranks)]
        super().__init__(scheduler)
        self._aggregator = KVOutputAggregator(ranks)
        self._chains: dict[str, list[int]] = {}
        self.checked_tokens = 0
        hellos = {rank: one.connector.get_handshake_metadata() for rank, one in enumerate(self.ranks)}
        self.connector.set_xfer_handshake_metadata(hellos)

    @property
    def connector(self) -> CodaShadowConnector:
        """The scheduler's end."""
        return self.scheduler.connector

    @property
    def manager(self):
        """The shadow's manager."""
        return self.connector.manager

    def close(self) -> None:
        """End the engine in an orderly way."""
        self.scheduler.shutdown()
        for rank in self.ranks:
            rank.connector.shutdown()

    def step(self) -> dict[str, int]:
        """Run one step: as the base class does it, with the KV cache and its transfers."""
        output = self.scheduler.schedule()
        scheduled = dict(output.num_scheduled_tokens)
        self.admitted += [data.req_id for data in output.scheduled_new_reqs]
        for rank in self.ranks:
            rank.before_forward(output)
        for name, count in scheduled.items():
            self._forward(self.requests[name], count)
        reports = [self._report(scheduled, rank.after_forward(output)) for rank in self.ranks]
        aggregated = self._aggregator.aggregate(reports) if len(reports) > 1 else reports[0]
        self.scheduler.update_from_output(output, aggregated)
        self.trace.append(scheduled)
        return scheduled

    def leftovers(self) -> dict[str, int]:
        """What is still held although nothing runs; all must be 0."""
        pool, statistics = self.scheduler.kv_cache_manager.block_pool, self.manager.index.statistics()
        native = self.connector.scheduler
        return {
            "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            "pinned": statistics.pinned_pages,
            "writing": statistics.writing_pages,
            "requests": len(native._req_status) + len(self.scheduler.requests),
            "jobs": len(native._jobs) + len(native._block_id_to_pending_jobs) + len(native._chunks_being_loaded),
            "outstanding": self.manager.outstanding_restore_bytes,
            "unwritten": len(self.manager._unwritten) + len(self.manager._stores) + len(self.manager._stopped_loads),
        }

    def _forward(self, request: Request, count: int) -> None:
        """Read a request's context from its blocks, then write what this step computes."""
        (blocks,) = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        before, end = request.num_computed_tokens - count, request.num_computed_tokens
        chain = np.array(self._chain(request, end), np.uint64)
        rows = np.repeat(blocks, BLOCK_TOKENS)[:end]
        columns = np.arange(end) % BLOCK_TOKENS
        for number, rank in enumerate(self.ranks):
            salted = chain ^ np.uint64(number)
            read = rank.words[rows[:before], columns[:before]]
            wrong = np.nonzero(read != salted[:before])[0]
            assert not len(wrong), f"{request.request_id}: token {wrong[0]} of {before} is not its own on rank {number}"
            rank.words[rows[before:], columns[before:]] = salted[before:]
        self.checked_tokens += before

    def _chain(self, request: Request, end: int) -> list[int]:
        chain = self._chains.setdefault(request.request_id, [])
        tokens = request.all_token_ids
        for position in range(len(chain), end):
            previous = chain[-1] if chain else hash(request.cache_salt) & _MASK
            chain.append((previous * 6_364_136_223_846_793_005 + tokens[position] + 1) & _MASK)
        return chain[:end]

    def _report(self, scheduled: dict[str, int], transfers: KVConnectorOutput) -> ModelRunnerOutput:
        names = list(scheduled)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: position for position, name in enumerate(names)},
            sampled_token_ids=[[] if self.requests[name].is_prefill_chunk else [7] for name in names],
            kv_connector_output=transfers,
        )


@contextmanager
def driving(config: VllmConfig, blocks: int, faults: Faults | None = None) -> Iterator[ShadowDrive]:
    """A drive that is closed when the block ends."""
    drive = ShadowDrive(config, blocks, faults)
    try:
        yield drive
    finally:
        drive.close()


def agents(drive: ShadowDrive, rng: random.Random, sessions: int, aborts: float) -> Iterator[None]:
    """Let sessions come back turn by turn, sharing prefixes, some of them aborted; yields after each step."""
    contexts = [[rng.randrange(1_000) for _ in range(rng.randrange(40, 400))] for _ in range(sessions)]
    turn = 0
    while True:
        live = [name for name, request in drive.requests.items() if not request.is_finished()]
        if len(live) < sessions and rng.random() < 0.5:
            number = rng.randrange(sessions)
            if rng.random() < 0.05:
                contexts[number] = contexts[rng.randrange(sessions)][: rng.randrange(32, 200)]
            context = contexts[number] + [rng.randrange(1_000) for _ in range(rng.randrange(1, 90))]
            drive.add(f"s{number}-{turn}", context, max_tokens=rng.randrange(1, 25), arrival_s=time.time())
            contexts[number] = context if len(context) < _LONG_CONTEXT_TOKENS else context[:100]
            turn += 1
        if live and rng.random() < aborts:
            drive.abort([rng.choice(live)])
        drive.step()
        for name in [name for name, request in drive.requests.items() if request.is_finished()]:
            if name not in drive.scheduler.requests:
                finished = drive.requests.pop(name)
                drive._chains.pop(name, None)
                if finished.status != RequestStatus.FINISHED_ABORTED:
                    session = int(name[1:].split("-")[0])
                    # A context that has become long begins anew, as above: one that outgrew HBM would wait for ever.
                    if len(contexts[session]) < len(finished.all_token_ids) < _LONG_CONTEXT_TOKENS:
                        contexts[session] = list(finished.all_token_ids)
        yield
