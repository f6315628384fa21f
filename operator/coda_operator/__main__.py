"""``python -m coda_operator``: run the operator until SIGTERM."""

import logging
import sys

import kopf

from coda_operator.config import parse_arguments
from coda_operator.handlers import Operator, register


def main() -> None:
    """Run the operator."""
    config = parse_arguments(sys.argv[1:])
    kopf.configure(verbose=config.verbose, log_format=kopf.LogFormat.FULL)
    logging.getLogger("aiohttp.access").setLevel(logging.WARNING)
    registry = kopf.OperatorRegistry()
    register(registry, Operator(config))
    kopf.run(
        registry=registry,
        standalone=True,  # one replica, replaced by Recreate; kopf's peering is no leader election
        clusterwide=not config.namespaces,
        namespaces=config.namespaces,
        liveness_endpoint=config.liveness,
    )


if __name__ == "__main__":
    main()
