"""The CPU shadow inside vLLM: finished KV chunks are kept in host memory and restored on demand.

vLLM's own offloading connector does the bookkeeping of requests and blocks; Coda gives it the store that
engines share (:mod:`coda_engine.shadow`), the copies, and what a page that cannot be used any more needs.
"""
