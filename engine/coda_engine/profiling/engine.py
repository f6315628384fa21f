"""The engine as the profiler and other tools see it: a handful of blocking HTTP requests, one connection each."""

import http.client
import json
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from coda_engine.contract.errors import ProfileRefusedError
from coda_engine.contract.interface import DECISIONS_PATH, KEYS_PATH, PROFILE_PATH, SNAPSHOT_PATH
from coda_engine.contract.profile import FullKey, Profile
from coda_engine.contract.reasons import Reason
from coda_engine.contract.snapshot import EngineSnapshot
from coda_engine.profiling.errors import EngineRequestError

_SHORT_TIMEOUT_S = 30.0
_PREFILL_TIMEOUT_S = 600.0
_KEPT_BODY_CHARS = 2_000


@dataclass(frozen=True, slots=True)
class Decisions:
    """A page of a process's decisions.

    Attributes:
        next: Sequence number to ask from the next time.
        decisions: Oldest first, as the process describes them.
    """

    next: int
    decisions: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ProcessClient:
    """The address of an engine or a router, and what both of them answer.

    Attributes:
        url: Base URL, ``http://host:port``.
        internal_token: Token of the internal endpoints; None where they are open.
    """

    url: str
    internal_token: str | None = None

    def decisions(self, since: int) -> Decisions:
        """Return the decisions from sequence number ``since`` on that are still kept: admissions, or placements.

        Raises:
            EngineRequestError: Not there, or the token is wrong.
        """
        answer = self._json("GET", f"{DECISIONS_PATH}?since={since}")
        return Decisions(int(answer["next"]), list(answer["decisions"]))

    def _json(self, method: str, path: str, body: bytes | None = None) -> dict[str, Any]:
        data = self._body(method, path, body)
        try:
            answer = json.loads(data)
        except ValueError as error:
            raise EngineRequestError(f"{self.url}{path} answered something that is not JSON") from error
        if not isinstance(answer, dict):
            raise EngineRequestError(f"{self.url}{path} answered JSON that is not an object")
        return answer

    def _body(self, method: str, path: str, body: bytes | None = None, timeout_s: float = _SHORT_TIMEOUT_S) -> bytes:
        headers = {"Content-Type": "application/json"}
        if self.internal_token is not None and path.startswith("/coda/"):
            headers["Authorization"] = f"Bearer {self.internal_token}"
        address = urlsplit(self.url)
        connection = http.client.HTTPConnection(address.hostname or "", address.port or 80, timeout=timeout_s)
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise EngineRequestError(f"{self.url} cannot be reached: {error or type(error).__name__}") from error
        finally:
            connection.close()
        if response.status != 200:
            raise EngineRequestError(
                f"{method} {self.url}{path} answered {response.status}{_advice(response.status, path)}",
                response.status,
                data.decode(errors="replace")[:_KEPT_BODY_CHARS],
            )
        return data


@dataclass(frozen=True, slots=True)
class EngineClient(ProcessClient):
    """One engine's address."""

    def full_key(self) -> FullKey:
        """Return the engine's own key.

        Raises:
            EngineRequestError: Not there, not an engine with Coda's plug-ins, or the token is wrong.
        """
        answer = self._json("GET", KEYS_PATH)
        try:
            return FullKey.model_validate(answer["full_key"])
        except (KeyError, TypeError, ValueError) as error:
            raise EngineRequestError(f"{self.url}{KEYS_PATH} has no readable full_key: {error}") from error

    def snapshot(self) -> EngineSnapshot:
        """Return the engine's latest snapshot."""
        return EngineSnapshot.from_json(self._body("GET", SNAPSHOT_PATH))

    def model_name(self) -> str:
        """Return the first name under which the engine serves its model."""
        answer = self._json("GET", "/v1/models")
        try:
            return str(answer["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise EngineRequestError(f"{self.url}/v1/models lists no model") from error

    def prefill_ms(self, model: str, token_ids: list[int]) -> float:
        """Return how long the engine took to answer a prompt with one token, milliseconds."""
        request = {"model": model, "prompt": token_ids, "max_tokens": 1, "temperature": 0.0}
        body = json.dumps(request).encode()
        started_s = time.perf_counter()
        self._body("POST", "/v1/completions", body, _PREFILL_TIMEOUT_S)
        return (time.perf_counter() - started_s) * 1_000

    def profile(self) -> Profile | None:
        """Return the profile in force, or None."""
        try:
            return Profile.from_json(self._body("GET", PROFILE_PATH))
        except EngineRequestError as error:
            if error.status == 404:
                return None
            raise

    def put_profile(self, profile: Profile) -> str:
        """Hand ``profile`` to the engine and return the digest that it reports.

        Raises:
            ProfileRefusedError: The engine says that the profile is not its own, or not validated.
            EngineRequestError: Anything else.
        """
        try:
            return str(self._json("PUT", PROFILE_PATH, profile.to_json()).get("digest", ""))
        except EngineRequestError as error:
            if error.status != 409:
                raise
            raise _refusal(error.body) from error


def _advice(status: int, path: str) -> str:
    if status in (401, 403):
        return ": the internal token is missing or wrong (--internal-token-file)"
    if status == 404 and path.startswith("/coda/") and path != PROFILE_PATH:
        return ": the engine runs without Coda's plug-ins (VLLM_PLUGINS)"
    return ""


def _refusal(body: str) -> ProfileRefusedError:
    try:
        answer = json.loads(body)
        return ProfileRefusedError(Reason(answer["reason"]), str(answer.get("detail", "")))
    except (ValueError, KeyError, TypeError):
        return ProfileRefusedError(Reason.PROFILE_MISMATCH, body)
