"""Adds the attributes to the span that vLLM's output processor makes when a request is over."""

import functools
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from coda_engine.vllm_adapter.hooking import is_hooked, mark_hooked
from coda_engine.vllm_adapter.log import logger
from coda_engine.vllm_adapter.tracing.attributes import Attributes, detach


def hook_spans(module: ModuleType) -> None:
    """Hook vLLM's output processor, once in a process.

    Args:
        module: ``vllm.v1.engine.output_processor``: the class that ends requests and the function by which it makes
            spans are its members.
    """
    trace, make_span = module.OutputProcessor.do_tracing, module.instrument_manual
    if is_hooked(trace):
        return
    current: ContextVar[Attributes | None] = ContextVar("coda_span_attributes", default=None)

    @functools.wraps(trace)
    def trace_with_attributes(self: Any, engine_core_output: Any, *args: Any, **kwargs: Any) -> None:
        token = current.set(_take(engine_core_output))
        try:
            trace(self, engine_core_output, *args, **kwargs)
        finally:
            current.reset(token)

    @functools.wraps(make_span)
    def make_span_with_attributes(*args: Any, attributes: dict[str, Any] | None = None, **kwargs: Any) -> Any:
        return make_span(*args, attributes={**(attributes or {}), **(current.get() or {})}, **kwargs)

    mark_hooked(trace_with_attributes)
    module.OutputProcessor.do_tracing = trace_with_attributes
    module.instrument_manual = make_span_with_attributes  # type: ignore[attr-defined]


def _take(output: Any) -> Attributes | None:
    """Take the attributes out of an output; None when there are none or they cannot be read."""
    try:
        output.trace_headers, attributes = detach(output.trace_headers)
    except Exception as error:
        logger.warning("coda: a span goes without its attributes: %s", error)
        return None
    return attributes
