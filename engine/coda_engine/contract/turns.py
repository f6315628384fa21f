"""What somebody outside the engine says of a turn that has ended: which tools the session waits for now."""

from pydantic import Field

from coda_engine.contract.models import WireModel

MAX_TURN_BYTES = 64 * 1024
"""Largest such document that an engine takes."""


class CalledTool(WireModel):
    """One tool that a reply called.

    Attributes:
        name: The tool's name.
        command: The command line, if the tool is a shell; looked at and forgotten.
    """

    name: str = Field(min_length=1, max_length=256)
    command: str = Field(default="", max_length=16_384)


class TurnEnd(WireModel):
    """A turn that has ended.

    Attributes:
        session_id: The identity value that the turn's request carried in ``X-Session-ID``.
        tools: What its reply called; none: it was a final answer.
    """

    session_id: str = Field(min_length=1, max_length=4_096)
    tools: list[CalledTool] = Field(default_factory=list, max_length=16)
