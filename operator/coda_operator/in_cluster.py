"""Write one object to the Kubernetes cluster that this pod runs in, with nothing but the standard library.

For the profiling Job, which lives in the engine's image: that has no Kubernetes client.
"""

import json
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from coda_operator.errors import JobError
from coda_operator.kube.resources import ref_of

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TIMEOUT_S = 30


def apply_object(item: dict[str, Any]) -> None:
    """Make the object so (server-side apply), as the pod's service account.

    Each owner applies under a name of its own, so that two CodaClusters keep each other's owner references.

    Raises:
        JobError: Not in a cluster, or the API server refused; the message says what it said.
    """
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not (_ACCOUNT / "token").is_file():
        raise JobError("not in a pod with a service account: the profile cannot be written")
    ref, metadata = ref_of(item), item["metadata"]
    manager = f"coda-profiler-{metadata['ownerReferences'][0]['uid']}"
    query = urllib.parse.urlencode({"fieldManager": manager, "force": "true"})
    address = f"[{host}]" if ":" in host else host
    url = f"https://{address}:{port}{ref.resource.path(metadata['namespace'], ref.name)}?{query}"
    headers = {
        "Authorization": f"Bearer {(_ACCOUNT / 'token').read_text().strip()}",
        "Content-Type": "application/apply-patch+yaml",
    }
    request = urllib.request.Request(url, json.dumps(item).encode(), headers, method="PATCH")
    trust = ssl.create_default_context(cafile=str(_ACCOUNT / "ca.crt"))
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S, context=trust):  # noqa: S310 - https
            return
    except urllib.error.HTTPError as error:
        raise JobError(f"the API server refused the {ref}: HTTP {error.code}: {_message(error.read())}") from error
    except OSError as error:
        raise JobError(f"the API server cannot be reached to write the {ref}: {error}") from error


def _message(answer: bytes) -> str:
    try:
        return str(json.loads(answer)["message"])
    except (ValueError, KeyError, TypeError):
        return answer[:200].decode(errors="replace")
