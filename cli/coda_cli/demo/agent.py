"""A coding agent in its smallest form: the model calls a tool, the tool's output goes back, again and again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coda_cli.demo.chat import ChatClient, Reply
from coda_cli.demo.tools import ERROR_PREFIX, Workbench, definitions

_SYSTEM_PROMPT = """You are a careful coding agent in a small Python project. You work in rounds: each round you call \
one tool, look at its output, and go on. Follow the project's rules:
- Read a file before you say anything about it. Never guess what is in a file that you have not read.
- Keep functions short. Names say what a value is, with its unit at the end when it has one.
- A function has a docstring of one sentence that says what is returned.
- Do not change a file that you were not asked to change; put remarks into a note instead.
- Run the code to see what it does before you call it correct, and quote the number that it printed.
- Errors are reported with the name of the file and the line, never hidden and never swallowed.
- Money is counted in whole cents where it is stored, and shown with two digits where it is printed.
- A discount is a percentage between 0 and 100; anything else is refused with a message that names the value.
- Tests are sentences: each one says what holds, and fails for one reason only.
- When everything that was asked for is done, say so in one or two plain sentences and stop.
You share the machine with other agents, so be brief: short notes, short answers, nothing said twice."""
_CALL_TOKENS = 120
_ANSWER_TOKENS = 48


@dataclass(frozen=True, slots=True)
class Step:
    """One round of a task: what the agent is told, and the tool that it has to call (None = answer in words)."""

    instruction: str
    tool: str | None


@dataclass(frozen=True, slots=True)
class Round:
    """What one round did.

    Attributes:
        session: The agent's session.
        action: The call as text, or "answer".
        outcome: The tool's output, or the model's words.
        reply: The measured reply.
        asked_for_tool: The model had to call a tool.
        tool_ran: It did, and the tool took the call.
    """

    session: str
    action: str
    outcome: str
    reply: Reply
    asked_for_tool: bool = False
    tool_ran: bool = False


TASKS: Mapping[str, Sequence[Step]] = {
    "agent-a": (
        Step("Find out which files the project has.", "list_files"),
        Step("Read the file with the code of the basket.", "read_file"),
        Step("Run the total of a basket.", "run_python"),
        Step("Write down in a note what you found.", "write_file"),
        Step("Say in one sentence what basket.py does.", None),
    ),
    "agent-b": (
        Step("List the files first.", "list_files"),
        Step("Read the README.", "read_file"),
        Step("Read the prices.", "read_file"),
        Step("Run the discount of an amount.", "run_python"),
        Step("Say in one sentence what this project is for.", None),
    ),
}


class Agent:
    """One session: a conversation that only grows, so that its beginning can be reused every round."""

    def __init__(self, client: ChatClient, workbench: Workbench) -> None:
        self.client = client
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": _SYSTEM_PROMPT}]
        self._workbench = workbench
        self._tools = definitions()
        self._rounds = 0

    def work(self, steps: Sequence[Step], report: Callable[[Round], None]) -> list[Round]:
        """Go through a task and return its rounds; ``report`` gets each as it ends."""
        rounds = []
        for step in steps:
            rounds.append(self.round(step))
            report(rounds[-1])
        return rounds

    def round(self, step: Step) -> Round:
        """Do one round: ask, run what the model calls, append both."""
        self._rounds += 1
        request_id = f"{self.client.session}-{self._rounds}"
        self.messages.append({"role": "user", "content": step.instruction})
        if step.tool is None:
            reply = self.client.chat(request_id, self.messages, _ANSWER_TOKENS, tools=self._tools, tool_choice="none")
            self.messages.append({"role": "assistant", "content": reply.text})
            return Round(self.client.session, "answer", reply.text, reply)
        choice = {"type": "function", "function": {"name": step.tool}}
        reply = self.client.chat(request_id, self.messages, _CALL_TOKENS, tools=self._tools, tool_choice=choice)
        calls = [
            {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.tool_calls
        ]
        self.messages.append({"role": "assistant", "content": reply.text or None, "tool_calls": calls})
        outcome = ""
        for call in reply.tool_calls:
            outcome = self._workbench.run(call.name, call.arguments)
            self.messages.append({"role": "tool", "tool_call_id": call.call_id, "content": outcome})
        action = ", ".join(f"{call.name}({_shown(call.arguments)})" for call in reply.tool_calls)
        ran = bool(reply.tool_calls) and not outcome.startswith(ERROR_PREFIX)
        return Round(self.client.session, action or "no call", outcome, reply, asked_for_tool=True, tool_ran=ran)


def _shown(arguments: str) -> str:
    return arguments.strip().removeprefix("{").removesuffix("}").strip()
