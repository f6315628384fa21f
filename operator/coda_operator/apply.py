"""Apply: bring the cluster to a plan, writing only what differs, and say what was done."""

import asyncio
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from coda_operator.errors import ApiError
from coda_operator.kube.client import KubeClient
from coda_operator.kube.resources import Object, Ref, ref_of
from coda_operator.observed import Observed
from coda_operator.plan import Plan
from coda_operator.spec import PROFILE_KIND
from coda_operator.telemetry import Telemetry

DIGEST_ANNOTATION = "coda-serving.dev/applied"
"""Digest of an object as this operator last applied it: a field that is no longer wanted shows only here."""


class Action(StrEnum):
    """What was done to an object; the reason of the Event that says so."""

    CREATED = "Created"
    UPDATED = "Updated"
    DELETED = "Deleted"
    SETTINGS_APPLIED = "SettingsApplied"
    PROFILE_DELIVERED = "ProfileDelivered"

    @property
    def verb(self) -> str:
        """The action in a sentence, before what it was done to."""
        return {self.SETTINGS_APPLIED: "applied without a restart:", self.PROFILE_DELIVERED: "delivered"}.get(
            self, self.value.lower()
        )


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that was done."""

    action: Action
    subject: str


@dataclass(frozen=True, slots=True)
class Applied:
    """What came of a plan.

    Attributes:
        changes: What was done.
        problem: Why the API server refused to go on; "" when it did not.
    """

    changes: list[Change]
    problem: str = ""


async def apply(kube: KubeClient, telemetry: Telemetry, observed: Observed, plan: Plan) -> Applied:
    """Carry out ``plan`` and return what was done, up to the first object that the API server refuses.

    Raises:
        ApiError: The API server could not be reached, or is not able to answer now.
    """
    changes: list[Change] = []
    try:
        for child in plan.create:
            await _create(kube, child, changes)
        for child in plan.apply:
            await _apply(kube, observed, child, changes)
        for doomed in plan.delete:
            await kube.delete(doomed.ref, observed.key.namespace, doomed.uid)
            changes.append(Change(Action.DELETED, str(doomed.ref)))
        if plan.adopt_profile is not None:
            await _adopt(kube, observed, plan.adopt_profile)
    except ApiError as error:
        if not _is_refusal(error):
            raise
        return Applied(changes, str(error))
    changes += await _deliver(telemetry, observed, plan)
    return Applied(changes)


async def _create(kube: KubeClient, child: Object, changes: list[Change]) -> None:
    try:
        await kube.create(child)
    except ApiError as error:
        if not error.is_conflict:
            raise
        return  # made meanwhile; what is in it stays
    changes.append(Change(Action.CREATED, str(ref_of(child))))


async def _apply(kube: KubeClient, observed: Observed, child: Object, changes: list[Change]) -> None:
    wanted = with_digest(child)
    ref = ref_of(child)
    live = observed.live.get(ref)
    if live is not None and is_applied(wanted, live):
        return
    stored = await kube.apply(wanted)
    if live is not None and stored["metadata"]["resourceVersion"] == live["metadata"]["resourceVersion"]:
        return  # only written differently, for example 1024Mi as 1Gi
    changes.append(Change(Action.CREATED if live is None else Action.UPDATED, str(ref)))


async def _adopt(kube: KubeClient, observed: Observed, name: str) -> None:
    """Add this CodaCluster to a profile's owners, so that it stays as long as one of them does."""
    stored, cluster = observed.profile, observed.cluster
    if stored is None or cluster is None:
        return
    owners = [*stored.owners, cluster.owner_reference(controller=False)]
    await kube.merge(Ref(PROFILE_KIND, name), observed.key.namespace, {"metadata": {"ownerReferences": owners}})


async def _deliver(telemetry: Telemetry, observed: Observed, plan: Plan) -> list[Change]:
    """Hand settings and profile to the processes that run others; one that does not take them is asked again later."""
    token = observed.internal_token
    took = await asyncio.gather(*(telemetry.put_settings(url, plan.settings, token) for url in plan.settings_to))
    changes = []
    count = took.count("")
    if count:
        subject = f"settings {plan.settings.digest()} on {count} of {len(took)} processes"
        changes.append(Change(Action.SETTINGS_APPLIED, subject))
    if plan.profile is not None and plan.profile_to:
        profile = plan.profile
        answers = await asyncio.gather(*(telemetry.put_profile(url, profile, token) for url in plan.profile_to))
        subject = f"profile {profile.digest()} to {answers.count('')} of {len(answers)} engines"
        changes.append(Change(Action.PROFILE_DELIVERED, subject))
    return changes


def with_digest(child: Object) -> Object:
    """Return ``child`` with the digest of its content in an annotation."""
    content = hashlib.sha256(json.dumps(child, sort_keys=True).encode()).hexdigest()[:16]
    annotations = {**child["metadata"].get("annotations", {}), DIGEST_ANNOTATION: content}
    return {**child, "metadata": {**child["metadata"], "annotations": annotations}}


def is_applied(wanted: Any, live: Any) -> bool:
    """Return whether ``live`` has every field of ``wanted``; fields of others do not matter.

    Quantities that the API server writes another way count as different; applying them again changes nothing.
    """
    if isinstance(wanted, Mapping):
        return isinstance(live, Mapping) and all(
            _is_absent(value) if name not in live else is_applied(value, live[name]) for name, value in wanted.items()
        )
    if isinstance(wanted, list):
        return (
            isinstance(live, list)
            and len(live) == len(wanted)
            and all(is_applied(ours, theirs) for ours, theirs in zip(wanted, live, strict=True))
        )
    return bool(wanted == live)


def _is_absent(value: Any) -> bool:
    """Return whether the API server leaves ``value`` out when it stores an object."""
    return value in (False, "", None) or (isinstance(value, dict | list) and not value)


def _is_refusal(error: ApiError) -> bool:
    """Return whether the API server understood and said no; anything else may go better in a moment."""
    # A field that its schema does not have comes as an internal error of server-side apply.
    unknown_field = error.status == 500 and "failed to create typed patch object" in str(error)
    return unknown_field or error.status in (400, 403, 405, 413, 415, 422)
