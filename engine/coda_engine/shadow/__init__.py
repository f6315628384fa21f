"""The shadow store: KV pages in host memory, shared by the engines of one CodaCluster on one node.

Two halves, because vLLM's scheduler and workers are different processes: ``ShadowIndex`` (scheduler side) knows which
key is where and who may write or read it; ``ShadowPages`` (worker side, one for each tensor-parallel rank) holds the
bytes. A page's life::

    scheduler  reserve(keys) -> refs              publish(refs)      pin(keys) -> refs                  unpin(refs)
    worker               begin_write(ref), copy in, seal(ref)               intact(ref), copy out

Neither half knows vLLM. Any process may be killed at any instruction; see docs/decisions/0009.
"""

from coda_engine.shadow.errors import ShadowError
from coda_engine.shadow.eviction import EvictionPolicyName
from coda_engine.shadow.index import ShadowIndex
from coda_engine.shadow.layout import MAX_KEY_BYTES, PageRef, ShadowLayout
from coda_engine.shadow.pages import ShadowPages
from coda_engine.shadow.statistics import ShadowStatistics

__all__ = [
    "MAX_KEY_BYTES",
    "EvictionPolicyName",
    "PageRef",
    "ShadowError",
    "ShadowIndex",
    "ShadowLayout",
    "ShadowPages",
    "ShadowStatistics",
]
