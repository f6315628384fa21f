"""What one look at a CodaCluster saw: plain values that decisions are made of."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from coda_engine.contract.profile import Profile
from coda_engine.contract.snapshot import EngineSnapshot
from coda_operator.desired.cluster import Cluster
from coda_operator.kube.resources import Object, Ref
from coda_operator.pods import Pod
from coda_operator.status import CodaClusterStatus


@dataclass(frozen=True, slots=True)
class Key:
    """Which CodaCluster."""

    namespace: str
    name: str


@dataclass(frozen=True, slots=True)
class StoredProfile:
    """A CodaProfile for this configuration.

    Attributes:
        name: Its name.
        owners: Its owner references.
        made_by_job: A profiling Job wrote it; otherwise a person did, and it is not ours to give owners.
        profile: The artifact; None when it cannot be read.
        problem: Why it cannot be read.
    """

    name: str
    owners: Sequence[Mapping[str, Any]]
    made_by_job: bool
    profile: Profile | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class EngineReport:
    """What one engine says about itself.

    Attributes:
        pod: Name of its pod.
        address: Its base URL.
        snapshot: Its snapshot; None when it gave none.
        problem: Why it gave none.
    """

    pod: str
    address: str
    snapshot: EngineSnapshot | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class RouterReport:
    """What one router says about itself.

    Attributes:
        pod: Name of its pod.
        address: Its base URL.
        settings_digest: Digest of the settings that it runs; None when it did not say.
        problem: Why it did not say.
    """

    pod: str
    address: str
    settings_digest: str | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Observed:
    """One CodaCluster and what exists around it.

    Attributes:
        key: Namespace and name.
        uid: The object's uid.
        generation: Generation of its spec.
        status: The status reported last.
        cluster: The valid specification; None when it is not.
        spec_problem: Why the specification is not valid: each field, what is allowed, what to do.
        live: Objects under the children's names, whoever owns them, and this cluster's Jobs.
        profile: The CodaProfile for this configuration; None without one.
        pods: This cluster's pods.
        engines: What the engines that serve say about themselves.
        routers: What the routers say.
        internal_token: Token of the internal endpoints; None before it is made.
        api_key_secret_exists: The Secret with the API keys is there, be it generated or the person's.
    """

    key: Key
    uid: str
    generation: int
    status: CodaClusterStatus
    cluster: Cluster | None
    spec_problem: str = ""
    live: Mapping[Ref, Object] = field(default_factory=dict)
    profile: StoredProfile | None = None
    pods: Sequence[Pod] = ()
    engines: Sequence[EngineReport] = ()
    routers: Sequence[RouterReport] = ()
    internal_token: str | None = None
    api_key_secret_exists: bool = True
