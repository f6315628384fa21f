"""The operator's own configuration: its command line."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from coda_operator.desired.cluster import Images


@dataclass(frozen=True, slots=True)
class OperatorConfig:
    """What the operator is started with.

    Attributes:
        namespaces: Namespaces to look after; empty = all.
        liveness: URL on which the liveness probe is answered; None = not at all.
        images: Images that a CodaCluster gets unless it names its own.
        verbose: Log every step.
    """

    namespaces: tuple[str, ...]
    liveness: str | None
    images: Images
    verbose: bool = False


def parse_arguments(arguments: Sequence[str]) -> OperatorConfig:
    """Return the configuration in a command line; prints help and exits on ``--help`` or a mistake."""
    parser = argparse.ArgumentParser(prog="python -m coda_operator", description="The Coda operator.")
    parser.add_argument("--namespace", action="append", default=[], help="look after this namespace only; repeatable")
    parser.add_argument("--liveness", metavar="URL", help="answer probes here, for example http://0.0.0.0:8080/healthz")
    parser.add_argument("--router-image", required=True, help="router image for CodaClusters that name none")
    parser.add_argument("--engine-cpu-image", required=True, help="engine image for device cpu")
    parser.add_argument("--engine-cuda-image", required=True, help="engine image for device cuda")
    parser.add_argument("--image-pull-policy", default="", choices=["", "Always", "IfNotPresent", "Never"])
    parser.add_argument("--verbose", action="store_true", help="log every step")
    options = parser.parse_args(arguments)
    images = Images(
        options.router_image, options.engine_cpu_image, options.engine_cuda_image, options.image_pull_policy
    )
    return OperatorConfig(tuple(options.namespace), options.liveness, images, options.verbose)
