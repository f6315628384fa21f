"""Where the end-to-end cases run: in the lab of this machine, or in the cluster of KUBECONFIG."""

import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "e2e/lab/lab"
LAB_DIR = Path(os.environ.get("CODA_LAB_DIR", "/tmp/coda-lab"))
LAB_CACHE = Path(os.environ.get("CODA_LAB_CACHE", Path.home() / ".cache/coda-lab"))
HOST_VENV = ROOT / ".venv"
MODELS = Path.home() / ".cache/coda/e2e-models"

BUILT_IMAGES = {
    "operator": ("images/operator/Dockerfile", ()),
    "router": ("images/router/Dockerfile", ()),
    "engine-cpu": ("images/engine-cpu/Dockerfile", ("--build-arg", "WITH_VLLM=0")),
}
IMAGE_BUILD_TIMEOUT_S = 900


@dataclass(frozen=True)
class Site:
    """One place to run.

    Attributes:
        kubeconfig: How to reach it.
        images: Image of each component.
        pull_policy: imagePullPolicy; "" = Kubernetes' default.
        pod_template: What engines need here beyond the example.
        path: PATH on which kubectl and helm are.
    """

    kubeconfig: Path
    images: dict[str, str]
    pull_policy: str
    path: str
    pod_template: dict[str, Any] = field(default_factory=dict)


def this_place() -> Site:
    """Return where the cases run; skips when there is no cluster."""
    path = f"{os.environ['PATH']}:{LAB_CACHE / 'bin'}"
    own = os.environ.get("KUBECONFIG")
    if own and not Path(own).is_relative_to(LAB_DIR):
        return Site(Path(own), own_images(), os.environ.get("CODA_E2E_PULL_POLICY", ""), path)
    kubeconfig = LAB_DIR / "pki/admin.conf"
    if not kubeconfig.exists():
        missing("no cluster: run `make lab-up`, or set KUBECONFIG")
    if not (HOST_VENV / "lib/python3.11/site-packages/vllm").is_dir():
        missing("no vLLM for Python 3.11 in .venv, which the lab's engines mount: run `make install-dev`")
    return Site(kubeconfig, lab_images(), "Never", path, lab_pod_template())


def missing(reason: str) -> None:
    """Skip, or fail where nothing may be skipped."""
    if os.environ.get("CODA_REQUIRE_ALL") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


def own_images() -> dict[str, str]:
    """Return the images that a person's cluster pulls, as CODA_E2E_..._IMAGE name them; skips when one is not named."""
    named = {}
    for component in BUILT_IMAGES:
        variable = f"CODA_E2E_{component.upper().replace('-', '_')}_IMAGE"
        if variable not in os.environ:
            missing(f"{variable} is not set: name an image of images/{component} that your cluster can pull")
        named[component] = os.environ[variable]
    return named


def lab_images() -> dict[str, str]:
    """Return the images, built from this checkout and imported into the lab's node."""
    names = {}
    for component, (dockerfile, arguments) in BUILT_IMAGES.items():
        names[component] = f"localhost/coda/{component}:dev"
        command = [LAB, "image", "build", names[component], ROOT / dockerfile, ROOT, *arguments]
        built = subprocess.run(
            command, capture_output=True, text=True, timeout=IMAGE_BUILD_TIMEOUT_S, check=False, cwd=ROOT
        )
        if built.returncode:
            pytest.fail(f"{dockerfile} cannot be built:\n{built.stdout[-2000:]}{built.stderr[-2000:]}")
    return names


def lab_pod_template() -> dict[str, Any]:
    """Return what the lab's engines mount: this machine's vLLM instead of a 6 GB image, and a kept model."""
    MODELS.mkdir(parents=True, exist_ok=True)
    MODELS.chmod(0o777)  # the pod's user makes the model there
    venv = {
        "env": [{"name": "PYTHONPATH", "value": "/host-venv/lib/python3.11/site-packages"}],
        "volumeMounts": [{"name": "host-venv", "mountPath": "/host-venv", "readOnly": True}],
    }
    return {
        "spec": {
            "initContainers": [{"name": "model", **venv}],
            # The lab's node is small, and its two cores are also the control plane's.
            "containers": [{"name": "engine", "resources": {"requests": {"cpu": "500m"}}, **venv}],
            "volumes": [
                {"name": "host-venv", "hostPath": {"path": str(HOST_VENV), "type": "Directory"}},
                {"name": "models", "hostPath": {"path": str(MODELS), "type": "Directory"}},
            ],
        }
    }
