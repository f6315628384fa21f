"""From a request's headers and body to its conversation: its session, and the stored response that it goes on from."""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from coda_router.auxiliary import AuxiliaryCalls
from coda_router.dispatch import BYTES_PER_TOKEN
from coda_router.envelope import Envelope, decoded, offers_tools
from coda_router.identity import IdentityWriter, Session, SessionSource, auxiliary_to, session_of
from coda_router.responses import (
    ResponseMap,
    StoredResponse,
    previous_response_not_found,
    response_id_of,
    response_not_found,
)
from coda_router.sessions import SessionMap

LearnResponse = Callable[[str, int, bytes], None]
"""Takes a worker's name, its reply's status and the first bytes of that reply's body."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """What a request belongs to.

    Attributes:
        session: The conversation's session.
        table_key: The session's key in engines' session tables.
        stored_response: The stored response that the request is about; None for none.
    """

    session: Session
    table_key: str
    stored_response: StoredResponse | None = None


class Conversations:
    """Finds a request's conversation, by what the request says and what the router remembers.

    Args:
        identity: Knows sessions' keys in the engines' tables.
        sessions: Where sessions were placed last.
        responses: Which engine holds which stored response.
        auxiliary: Which calls are auxiliary to their session's conversation.
    """

    def __init__(
        self,
        identity: IdentityWriter,
        sessions: SessionMap,
        responses: ResponseMap,
        auxiliary: AuxiliaryCalls | None = None,
    ) -> None:
        self._identity = identity
        self._sessions = sessions
        self._responses = responses
        self._auxiliary = auxiliary or AuxiliaryCalls()

    def find(
        self,
        tenant: str,
        headers: Mapping[bytes, bytes],
        envelope: Envelope,
        body_bytes: int,
        *,
        makes_kv: bool,
        may_continue: bool,
    ) -> Conversation:
        """Return a request's conversation.

        Args:
            tenant: Whose request it is.
            headers: Header names in lower case to values.
            envelope: The request's body.
            body_bytes: Size of the body.
            makes_kv: Whether its KV is worth coming back to; only then can it be auxiliary.
            may_continue: Whether the endpoint knows stored responses.

        Raises:
            Refusal: 400; it continues a response that is not this tenant's, or that nobody here remembers.
                An engine that might know it is not asked: it would not ask whose it is.
        """
        response_id = decoded(envelope.previous_response_id) if may_continue else None
        if isinstance(response_id, str):
            response = self._responses.get(tenant, response_id, _now_s())
            if response is None:
                raise previous_response_not_found(response_id)
            return self._named(tenant, session_of(headers, envelope, response.session), response)
        conversation = self._named(tenant, session_of(headers, envelope))
        if not makes_kv or offers_tools(envelope):
            return conversation
        home = self._sessions.get(conversation.table_key, _now_s())
        if self._auxiliary.covers(home, has_tools=False, context_tokens=body_bytes // BYTES_PER_TOKEN):
            return self._named(tenant, auxiliary_to(conversation.session))
        return conversation

    def of_response(self, tenant: str, response_id: str) -> Conversation:
        """Return the conversation that a stored response belongs to.

        Raises:
            Refusal: 404; it is not this tenant's, or nobody here remembers it.
        """
        response = self._responses.get(tenant, response_id, _now_s())
        if response is None:
            raise response_not_found(response_id)
        return self._named(tenant, Session(response.session, "", SessionSource.RESPONSE_CHAIN), response)

    def learner(self, tenant: str, conversation: Conversation, envelope: Envelope) -> LearnResponse | None:
        """Return what remembers the response that the reply will name; None where the client wants none stored."""
        if decoded(envelope.store) is False:
            return None

        def learn(worker: str, status: int, reply: bytes) -> None:
            response_id = response_id_of(reply) if status == 200 else None
            if response_id is not None:
                self._responses.put(tenant, StoredResponse(response_id, worker, conversation.session.name), _now_s())

        return learn

    def _named(self, tenant: str, session: Session, response: StoredResponse | None = None) -> Conversation:
        return Conversation(session, self._identity.table_key(tenant, session.name), response)


def _now_s() -> float:
    return asyncio.get_running_loop().time()
