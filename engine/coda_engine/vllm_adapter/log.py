"""The adapter's logger: below vLLM's own, the only tree that vLLM gives handlers and a level in each process."""

import logging

logger = logging.getLogger("vllm.coda")
