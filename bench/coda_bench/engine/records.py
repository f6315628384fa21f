"""What a run of sessions left behind: one record for each request, all times from the start of the run."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as its client saw it.

    Attributes:
        session: The session's index.
        round: The round within it, from 0.
        prompt_tokens: Length of the whole prompt.
        new_tokens: Prompt tokens that no earlier request of the session had (round 0: all of them).
        wanted_tokens: Output length asked for.
        sent_s: When it was sent: the moment at which it was ready, seconds.
        token_s: When each output token arrived, seconds, growing.
        cached_tokens: Prompt tokens that the engine did not compute, by its own account; None while unfinished.
    """

    session: int
    round: int
    prompt_tokens: int
    new_tokens: int
    wanted_tokens: int
    sent_s: float
    token_s: tuple[float, ...]
    cached_tokens: int | None = None

    @property
    def finished(self) -> bool:
        """Whether the whole reply arrived."""
        return len(self.token_s) >= self.wanted_tokens

    @property
    def finished_s(self) -> float | None:
        """When the last token arrived, seconds; None while unfinished."""
        return self.token_s[-1] if self.finished else None

    @property
    def ttft_s(self) -> float | None:
        """Time to the first token, seconds; None while there is none."""
        return self.token_s[0] - self.sent_s if self.token_s else None

    def until(self, end_s: float) -> Self | None:
        """Return the record as it stood at ``end_s``; None when the request had not been sent yet."""
        if self.sent_s >= end_s:
            return None
        seen = tuple(at_s for at_s in self.token_s if at_s < end_s)
        cached = self.cached_tokens if len(seen) == len(self.token_s) else None
        return type(self)(
            self.session, self.round, self.prompt_tokens, self.new_tokens, self.wanted_tokens, self.sent_s, seen, cached
        )

    def to_document(self) -> dict[str, Any]:
        """Return the record as plain data, times in milliseconds."""
        document = asdict(self)
        document["sent_s"] = round(self.sent_s, 4)
        document["token_s"] = [round(at_s, 4) for at_s in self.token_s]
        return document

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Return the record in plain data.

        Raises:
            TypeError: A field is missing or unknown.
        """
        return cls(**{**document, "token_s": tuple(document["token_s"])})
