"""Tells a session's auxiliary calls (a title, a summary of a page) from its conversation."""

from dataclasses import dataclass

from coda_router.sessions import Home


@dataclass(frozen=True, slots=True)
class AuxiliaryCalls:
    """Some clients send small calls of another purpose under their session's name, beside its conversation.

    Tools stand at the head of a prompt, so a call without any shares no KV with a conversation that has some.
    Were it taken for the conversation's next request, it would follow its KV for nothing, move its home and
    shrink its known context, here and in the engine's session table.

    Attributes:
        max_share: Share of the conversation's context below which a call without tools is auxiliary; in [0, 1].
            A larger one may be the conversation going on without tools, so it is taken for that.
    """

    max_share: float = 0.25

    def covers(self, home: Home | None, *, has_tools: bool, context_tokens: int) -> bool:
        """Return whether a request is auxiliary to the conversation that its session had until now.

        Args:
            home: The session's last placement; None = it has none, and nothing can be auxiliary to it.
            has_tools: Whether the request offers tools to the model.
            context_tokens: Estimate of the request's context, tokens.
        """
        if home is None or has_tools or not home.has_tools:
            return False
        return context_tokens < self.max_share * home.context_tokens
