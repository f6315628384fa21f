"""The engine as the profiler and other tools see it: a handful of blocking HTTP requests, one connection each."""

import http.client
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from coda_engine.contract.errors import ProfileRefusedError
from coda_engine.contract.interface import (
    DECISIONS_PATH,
    HBM_FORGET_PATH,
    KEYS_PATH,
    PROFILE_PATH,
    SNAPSHOT_PATH,
)
from coda_engine.contract.profile import FullKey, Profile
from coda_engine.contract.reasons import Reason
from coda_engine.contract.snapshot import EngineSnapshot
from coda_engine.profiling.errors import EngineRequestError

_SHORT_TIMEOUT_S = 30.0
_PREFILL_TIMEOUT_S = 600.0
_KEPT_BODY_CHARS = 2_000
_COMPLETIONS_PATH = "/v1/completions"


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
class FirstToken:
    """The answer to a prompt with one token.

    Attributes:
        ms: From sending the request to its answer, milliseconds.
        cached_tokens: Tokens of the prompt whose KV was reused; None when the engine does not say.
    """

    ms: float
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class AppliedProfile:
    """What an engine says of a profile that it took.

    Attributes:
        digest: The profile's digest as the engine reports it from now on.
        outdated: Why the profile's held-out points want another look; "" = they do not.
    """

    digest: str
    outdated: str


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
        connection = self._connection(timeout_s)
        try:
            self._send(connection, method, path, body)
            return self._answer(connection, method, path)
        finally:
            connection.close()

    def _connection(self, timeout_s: float) -> http.client.HTTPConnection:
        address = urlsplit(self.url)
        return http.client.HTTPConnection(address.hostname or "", address.port or 80, timeout=timeout_s)

    def _send(self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None) -> None:
        headers = {"Content-Type": "application/json"}
        if self.internal_token is not None and path.startswith("/coda/"):
            headers["Authorization"] = f"Bearer {self.internal_token}"
        try:
            connection.request(method, path, body, headers)
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error

    def _answer(self, connection: http.client.HTTPConnection, method: str, path: str) -> bytes:
        try:
            response = connection.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._unreachable(error) from error
        if response.status != 200:
            raise EngineRequestError(
                f"{method} {self.url}{path} answered {response.status}{_advice(response.status, path)}",
                response.status,
                data.decode(errors="replace")[:_KEPT_BODY_CHARS],
            )
        return data

    def _unreachable(self, error: Exception) -> EngineRequestError:
        return EngineRequestError(f"{self.url} cannot be reached: {error or type(error).__name__}")


@dataclass(frozen=True, slots=True)
class EngineClient(ProcessClient):
    """One engine's address.

    Attributes:
        clock: Seconds, by which first tokens are timed.
    """

    clock: Callable[[], float] = time.perf_counter

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

    def first_tokens(self, model: str, prompts: Sequence[Sequence[int]]) -> list[FirstToken]:
        """Return the answers to prompts that are sent one after another, none waiting for another's answer.

        Their connections are open before the first one is sent. Answers are read from the last one backwards, so
        that the last one's time is exact.

        Raises:
            EngineRequestError: One of them failed.
        """
        bodies = [
            json.dumps({"model": model, "prompt": list(prompt), "max_tokens": 1, "temperature": 0.0}).encode()
            for prompt in prompts
        ]
        connections = [self._connection(_PREFILL_TIMEOUT_S) for _ in bodies]
        try:
            for connection in connections:
                try:
                    connection.connect()
                except OSError as error:
                    raise self._unreachable(error) from error
            sent_s = []
            for connection, body in zip(connections, bodies, strict=True):
                sent_s.append(self.clock())
                self._send(connection, "POST", _COMPLETIONS_PATH, body)
            answers = []
            for connection, began_s in zip(reversed(connections), reversed(sent_s), strict=True):
                data = self._answer(connection, "POST", _COMPLETIONS_PATH)
                answers.append(FirstToken((self.clock() - began_s) * 1_000, _cached_tokens(data)))
            return answers[::-1]
        finally:
            for connection in connections:
                connection.close()

    def forget_hbm(self) -> bool:
        """Make the engine forget the KV that is cached in HBM; return False when it is not idle enough to."""
        try:
            self._body("POST", HBM_FORGET_PATH)
        except EngineRequestError as error:
            if error.status == 409:
                return False
            raise
        return True

    def profile(self) -> Profile | None:
        """Return the profile in force, or None."""
        try:
            return Profile.from_json(self._body("GET", PROFILE_PATH))
        except EngineRequestError as error:
            if error.status == 404:
                return None
            raise

    def put_profile(self, profile: Profile) -> AppliedProfile:
        """Hand ``profile`` to the engine, which goes on serving, and return what it says.

        Raises:
            ProfileRefusedError: The engine says that the profile is not its own, or not validated.
            EngineRequestError: Anything else.
        """
        try:
            answer = self._json("PUT", PROFILE_PATH, profile.to_json())
            return AppliedProfile(str(answer.get("digest", "")), str(answer.get("detail", "")))
        except EngineRequestError as error:
            if error.status != 409:
                raise
            raise _refusal(error.body) from error


def _cached_tokens(data: bytes) -> int | None:
    try:
        return int(json.loads(data)["usage"]["prompt_tokens_details"]["cached_tokens"] or 0)
    except (ValueError, KeyError, TypeError):
        return None


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
