"""What the demo plays, in order, against a running stack."""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from coda_cli.demo.agent import TASKS, Agent, Round, Step
from coda_cli.demo.chat import ChatClient, Reply
from coda_cli.demo.tools import Workbench
from coda_cli.demo.view import View
from coda_engine.profiling import EngineClient, ProcessClient

_QUESTION = "What is the capital of France?"
_DOCUMENT_LINES = 44
_NEXT_ARRIVAL_S = 0.2
_RUSH_STEP = Step("Say in one sentence what you did.", None)


def play(url: str, engine: EngineClient, router: ProcessClient, model: str, scratch: Path, view: View) -> None:
    """Play the whole demo: a question, two agents side by side, and a rush hour that admission has to order."""
    view.capabilities(engine.snapshot())
    view.section("A question")
    view.answer(_QUESTION, ChatClient(url, model, "question").chat("question", [_user(_QUESTION)], max_tokens=24))

    view.section("Two coding agents side by side; each round the model calls a tool, and the tool really runs")
    agents = {name: Agent(ChatClient(url, model, name), _workbench(scratch, name)) for name in TASKS}
    rounds = _work_side_by_side(agents, view.round)

    view.section("Rush hour: two long documents arrive, then both agents come back from their tools")
    first_decision = engine.decisions(0).next
    view.rush(_rush_hour(ChatClient(url, model, "documents"), agents))
    view.admissions(engine.decisions(first_decision).decisions)

    view.summary(rounds, engine.snapshot(), router.decisions(0).decisions)


def _work_side_by_side(agents: Mapping[str, Agent], report: Callable[[Round], None]) -> list[Round]:
    """Return the rounds of all agents, each working through its task at its own pace."""
    lock = threading.Lock()

    def report_one(finished: Round) -> None:
        with lock:
            report(finished)

    with ThreadPoolExecutor(len(agents)) as pool:
        tasks = [pool.submit(agent.work, TASKS[name], report_one) for name, agent in agents.items()]
        return [finished for task in tasks for finished in task.result()]


def _rush_hour(documents: ChatClient, agents: Mapping[str, Agent]) -> list[Reply]:
    """Return the replies in the order of the requests' arrival: documents first, agents after them."""
    with ThreadPoolExecutor(2 + len(agents)) as pool:
        waiting = []
        for number in (1, 2):
            messages = [_user(_document(number))]
            waiting.append(pool.submit(documents.chat, f"document-{number}", messages, max_tokens=8))
            time.sleep(_NEXT_ARRIVAL_S)
        turns = [pool.submit(agent.round, _RUSH_STEP) for agent in agents.values()]
        return [reply.result() for reply in waiting] + [turn.result().reply for turn in turns]


def _document(number: int) -> str:
    """Return a text of about 800 tokens that no other request begins with."""
    lines = [f"Entry {line} of log {number}: order {line * 7919 % 1000} was packed." for line in range(_DOCUMENT_LINES)]
    return "\n".join([*lines, "Say in a few words what this log is about."])


def _workbench(scratch: Path, name: str) -> Workbench:
    folder = scratch / name
    folder.mkdir()
    return Workbench(folder)


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
