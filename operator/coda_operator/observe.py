"""Gather: everything that one decision about a CodaCluster needs, read once."""

import asyncio
import base64
import binascii

from coda_engine.contract.errors import DocumentError
from coda_operator.desired.cluster import CLUSTER_LABEL, ENGINE, ROUTER, Cluster, Images, possible_children
from coda_operator.desired.documents import INTERNAL_TOKEN_FILE
from coda_operator.kube.client import KubeClient
from coda_operator.kube.resources import CODA_CLUSTERS, CODA_PROFILES, JOBS, PODS, Object, Ref, ref_of
from coda_operator.observed import Key, Observed, StoredProfile
from coda_operator.pods import Pod, read_pod
from coda_operator.profile_object import MANAGED_BY, MANAGED_BY_LABEL, SPEC_KEY_LABEL, CodaProfileSpec
from coda_operator.spec import CodaClusterSpec
from coda_operator.status import CodaClusterStatus
from coda_operator.telemetry import Telemetry


async def observe(kube: KubeClient, telemetry: Telemetry, key: Key, images: Images) -> Observed | None:
    """Return what there is, or None when the CodaCluster is gone or going.

    Raises:
        ApiError: The API server refused, or could not be reached.
    """
    item = await kube.get(CODA_CLUSTERS, key.namespace, key.name)
    if item is None or "deletionTimestamp" in item["metadata"]:
        return None
    cluster, spec_problem = read_cluster(item, images)
    live, pods = await asyncio.gather(_live_objects(kube, key), _pods(kube, key))
    # After the Jobs: a Job writes its profile before it ends, so an ended Job without a profile really has none.
    profile = await _stored_profile(kube, cluster) if cluster is not None else None
    token = _internal_token(live.get(Ref("Secret", f"{key.name}-internal")))
    engines, routers = await asyncio.gather(
        telemetry.engines([pod for pod in pods if pod.component == ENGINE], token),
        telemetry.routers([pod for pod in pods if pod.component == ROUTER], token),
    )
    return Observed(
        key=key,
        uid=item["metadata"]["uid"],
        generation=item["metadata"].get("generation", 0),
        status=CodaClusterStatus.read(item.get("status")),
        cluster=cluster,
        spec_problem=spec_problem,
        live=live,
        profile=profile,
        pods=pods,
        engines=engines,
        routers=routers,
        internal_token=token,
        api_key_secret_exists=cluster is None or await _exists(kube, Ref("Secret", cluster.api_key_secret), key),
    )


def read_cluster(item: Object, images: Images) -> tuple[Cluster | None, str]:
    """Return the CodaCluster in a Kubernetes object, or None and what is wrong with its specification."""
    metadata = item["metadata"]
    try:
        spec = CodaClusterSpec.parse(item.get("spec"))
    except DocumentError as error:
        return None, str(error)
    return Cluster(metadata["name"], metadata["namespace"], metadata["uid"], spec, images), ""


def read_profile(item: Object) -> StoredProfile:
    """Return the profile in a CodaProfile object."""
    metadata = item["metadata"]
    made_by_job = metadata.get("labels", {}).get(MANAGED_BY_LABEL) == MANAGED_BY
    owners = metadata.get("ownerReferences", [])
    try:
        profile = CodaProfileSpec.parse(item.get("spec")).artifact
    except DocumentError as error:
        return StoredProfile(metadata["name"], owners, made_by_job, None, str(error))
    return StoredProfile(metadata["name"], owners, made_by_job, profile)


async def _live_objects(kube: KubeClient, key: Key) -> dict[Ref, Object]:
    refs = possible_children(key.name)
    found = await asyncio.gather(*(kube.get(ref.resource, key.namespace, ref.name) for ref in refs))
    jobs = await kube.find(JOBS, key.namespace, {CLUSTER_LABEL: key.name})
    objects = [*jobs, *(item for item in found if item is not None)]
    return {ref_of(item): item for item in objects}


async def _exists(kube: KubeClient, ref: Ref, key: Key) -> bool:
    return await kube.get(ref.resource, key.namespace, ref.name) is not None


async def _pods(kube: KubeClient, key: Key) -> list[Pod]:
    return [read_pod(item) for item in await kube.find(PODS, key.namespace, {CLUSTER_LABEL: key.name})]


async def _stored_profile(kube: KubeClient, cluster: Cluster) -> StoredProfile | None:
    labels = {SPEC_KEY_LABEL: cluster.spec_key.digest()}
    found = [read_profile(item) for item in await kube.find(CODA_PROFILES, cluster.namespace, labels)]
    # A readable one before an unreadable one, then by name, so that every look takes the same.
    return min(found, key=lambda stored: (stored.profile is None, stored.name), default=None)


def _internal_token(secret: Object | None) -> str | None:
    encoded = (secret or {}).get("data", {}).get(INTERNAL_TOKEN_FILE)
    try:
        return base64.b64decode(encoded, validate=True).decode() if encoded else None
    except (binascii.Error, UnicodeDecodeError):
        return None
