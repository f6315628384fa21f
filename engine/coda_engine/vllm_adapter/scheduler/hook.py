"""Puts the waiting queue and the step's observers into a scheduler that vLLM has just built.

Methods are shadowed on the instance, so one hook serves Scheduler and AsyncScheduler and no scheduler
class has to be configured.
"""

import functools
from collections.abc import Callable
from typing import Any, Protocol

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from coda_engine.vllm_adapter.hooking import is_hooked, mark_hooked
from coda_engine.vllm_adapter.log import logger


class StepListener(Protocol):
    """What is told of each step; none of these may raise."""

    def request_arrived(self, request: Request) -> None:
        """A request comes to the scheduler."""
        ...

    def step_scheduled(self, output: SchedulerOutput) -> None:
        """A step was scheduled and will be executed now."""
        ...

    def step_finished(self) -> None:
        """The output of a step was taken into the requests."""
        ...

    def request_over(self, request: Request) -> None:
        """A request ends; its blocks are still its own."""
        ...


def hook_construction(scheduler_class: type[Scheduler], built: Callable[[Scheduler], object]) -> None:
    """Call ``built`` with each scheduler right after its construction; an error in it is logged only."""
    original = scheduler_class.__init__
    if is_hooked(original):
        return

    @functools.wraps(original)
    def construct(self: Scheduler, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        try:
            built(self)
        except Exception:
            logger.exception("coda is off: it could not attach to the scheduler; vLLM serves without it")

    mark_hooked(construct)
    scheduler_class.__init__ = construct


def hook_steps(scheduler: Scheduler, listener: StepListener) -> None:
    """Tell ``listener`` of the scheduler's steps and of each request's coming and end."""
    schedule, update, free = scheduler.schedule, scheduler.update_from_output, scheduler._free_request
    add = scheduler.add_request

    @functools.wraps(add)
    def tell_and_add(request: Request, *args: Any, **kwargs: Any) -> Any:
        listener.request_arrived(request)
        return add(request, *args, **kwargs)

    @functools.wraps(schedule)
    def schedule_and_tell(*args: Any, **kwargs: Any) -> SchedulerOutput:
        output = schedule(*args, **kwargs)
        listener.step_scheduled(output)
        return output

    @functools.wraps(update)
    def update_and_tell(*args: Any, **kwargs: Any) -> Any:
        result = update(*args, **kwargs)
        listener.step_finished()
        return result

    @functools.wraps(free)
    def tell_and_free(request: Request, *args: Any, **kwargs: Any) -> Any:
        listener.request_over(request)
        return free(request, *args, **kwargs)

    scheduler.add_request = tell_and_add
    scheduler.schedule = schedule_and_tell
    scheduler.update_from_output = update_and_tell
    scheduler._free_request = tell_and_free
