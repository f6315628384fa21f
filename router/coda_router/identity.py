"""Whose conversation a request belongs to: the session that a client states, or its conversation's opening.

Clients differ; the precedence is fixed here in one place. Every session is namespaced by its tenant.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from coda_engine.contract.identity import Identity, pack
from coda_engine.contract.snapshot import session_key
from coda_router.envelope import Envelope, decoded
from coda_router.opening import opening_name

MAX_SESSION_CHARS = 256
"""Longest session name taken as it is; a longer one, or one of other than plain characters, is hashed."""


class SessionSource(StrEnum):
    """Where a session's name came from, most telling first; an auxiliary call's from the session beside which it is."""

    CODA_HEADER = "CodaHeader"
    CLAUDE_CODE = "ClaudeCode"
    CODEX = "Codex"
    SESSION_HEADER = "SessionHeader"
    LITELLM = "LiteLLM"
    PROMPT_CACHE_KEY = "PromptCacheKey"
    METADATA = "Metadata"
    RESPONSE_CHAIN = "ResponseChain"
    OPENING = "Opening"
    AUXILIARY = "Auxiliary"


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation as its client names it.

    Attributes:
        name: The session within its tenant.
        parent: The session that spawned this one (a sub-agent's parent); ``""`` for none.
        source: Where the name came from.
    """

    name: str
    parent: str
    source: SessionSource


def session_of(headers: Mapping[bytes, bytes], envelope: Envelope, chained: str = "") -> Session:
    """Return the request's session.

    Args:
        headers: Header names in lower case to values.
        envelope: The request's body.
        chained: Name of the session of the stored response that the request continues; ``""`` = it continues none.
    """
    if session := _from_headers(headers) or _from_body(envelope):
        return session
    if chained:
        return Session(chained, "", SessionSource.RESPONSE_CHAIN)
    return Session(opening_name(envelope), "", SessionSource.OPENING)


def auxiliary_to(session: Session) -> Session:
    """Return the session of another session's auxiliary calls: a child of it, with a home of its own."""
    return Session(_bounded(f"{session.name}/auxiliary"), session.name, SessionSource.AUXILIARY)


def _from_headers(headers: Mapping[bytes, bytes]) -> Session | None:
    def value(name: bytes) -> str:
        return _bounded(headers.get(name, b"").decode("latin-1"))

    if name := value(b"x-coda-session"):
        return Session(name, value(b"x-coda-parent-session"), SessionSource.CODA_HEADER)
    if name := value(b"x-claude-code-session-id"):
        if agent := value(b"x-claude-code-agent-id"):
            parent = value(b"x-claude-code-parent-agent-id")
            # Sub-agents share their root's session id, but not its prompt.
            return Session(
                _bounded(f"{name}/{agent}"), _bounded(f"{name}/{parent}") if parent else name, SessionSource.CLAUDE_CODE
            )
        return Session(name, "", SessionSource.CLAUDE_CODE)
    if name := value(b"session-id") or value(b"session_id") or value(b"thread-id"):
        # Codex: a sub-agent keeps the root's session id and has a thread of its own.
        return Session(value(b"thread-id") or name, value(b"x-codex-parent-thread-id"), SessionSource.CODEX)
    if name := value(b"x-session-id") or value(b"x-session-affinity"):
        return Session(name, value(b"x-parent-session-id"), SessionSource.SESSION_HEADER)
    if name := value(b"x-litellm-session-id"):
        return Session(name, "", SessionSource.LITELLM)
    return None


def _from_body(envelope: Envelope) -> Session | None:
    cache_key = decoded(envelope.prompt_cache_key)
    if isinstance(cache_key, str) and cache_key:
        return Session(_bounded(cache_key), "", SessionSource.PROMPT_CACHE_KEY)
    metadata = decoded(envelope.metadata)
    user_id = metadata.get("user_id") if isinstance(metadata, dict) else None
    if isinstance(user_id, str) and (name := _session_in_user_id(user_id)):
        return Session(_bounded(name), "", SessionSource.METADATA)
    return None


def _session_in_user_id(user_id: str) -> str:
    """Return the session in Claude Code's ``metadata.user_id``: a JSON string, or ``..._session_<id>`` before."""
    if user_id.startswith("{"):
        try:
            fields = json.loads(user_id)
        except (ValueError, RecursionError):
            return ""
        name = fields.get("session_id")
        return name if isinstance(name, str) else ""
    _, separator, name = user_id.rpartition("_session_")
    return name if separator else ""


def _bounded(name: str) -> str:
    # Anything else than plain ASCII may grow sixfold on its way to an engine, whose header has a limit.
    if len(name) <= MAX_SESSION_CHARS and name.isascii() and name.isprintable():
        return name
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


@dataclass(frozen=True, slots=True)
class IdentityWriter:
    """Writes the identity that engines get, and knows under which key they will list the session.

    Attributes:
        router_id: This router.
        secret: The cluster's secret; None = engines trust no router and work from the session name as it is.
    """

    router_id: str
    secret: bytes | None

    def table_key(self, tenant: str, session: str) -> str:
        """Return the session's key in the engines' session tables."""
        key = session_key(tenant, session)
        return key if self.secret is not None else session_key("", key)

    def header_value(self, tenant: str, session: Session, *, attempt: int, ready_age_ms: float) -> bytes:
        """Return the value of ``X-Session-ID`` for one attempt; without a secret it is the hashed session only."""
        if self.secret is None:
            return session_key(tenant, session.name).encode("ascii")
        identity = Identity(
            tenant=tenant,
            session=session.name,
            parent=session.parent,
            router_id=self.router_id,
            attempt=attempt,
            ready_age_ms=round(ready_age_ms, 3),
        )
        return pack(identity, self.secret).encode("ascii")
