"""ConfigMaps and Secrets: settings, profile, signing secret and internal token, API key."""

import base64

from coda_engine.contract.profile import Profile
from coda_operator.desired.cluster import ENGINE, ROUTER, Child, Cluster

SETTINGS_FILE = "settings.json"
PROFILE_FILE = "profile.json"
CLUSTER_SECRET_FILE = "cluster-secret"  # noqa: S105 - a file's name
INTERNAL_TOKEN_FILE = "internal-token"  # noqa: S105 - a file's name
DEFAULT_TENANT = "default"


def settings_config_map(cluster: Cluster) -> Child:
    """Return the ConfigMap with the settings document that engines and routers start with."""
    document = cluster.spec.settings().model_dump_json(by_alias=True)
    content = {"data": {SETTINGS_FILE: document}}
    return cluster.child("v1", "ConfigMap", cluster.child_name("settings"), ENGINE, content)


def profile_config_map(cluster: Cluster, profile: Profile) -> Child:
    """Return the ConfigMap that brings the profile into the engines' pods."""
    content = {"data": {PROFILE_FILE: profile.to_json().decode()}}
    return cluster.child("v1", "ConfigMap", cluster.child_name("profile"), ENGINE, content)


def internal_secret(cluster: Cluster, signing_secret: str, internal_token: str) -> Child:
    """Return the Secret that engines and routers share: it signs identities and opens internal endpoints."""
    content = {
        "type": "Opaque",
        "data": {CLUSTER_SECRET_FILE: _encode(signing_secret), INTERNAL_TOKEN_FILE: _encode(internal_token)},
    }
    return cluster.child("v1", "Secret", cluster.child_name("internal"), ENGINE, content)


def api_key_secret(cluster: Cluster, api_key: str) -> Child:
    """Return the Secret with one API key, for a CodaCluster that names none."""
    content = {"type": "Opaque", "data": {DEFAULT_TENANT: _encode(api_key)}}
    return cluster.child("v1", "Secret", cluster.generated_api_key_secret, ROUTER, content)


def _encode(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
