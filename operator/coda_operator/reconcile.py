"""One round for one CodaCluster: gather, decide, apply, report."""

import logging
import secrets
from dataclasses import dataclass

from coda_operator.apply import apply
from coda_operator.desired.cluster import Images
from coda_operator.kube.client import KubeClient
from coda_operator.observe import observe
from coda_operator.observed import Key
from coda_operator.plan import decide
from coda_operator.report import report, summary
from coda_operator.telemetry import Telemetry

_logger = logging.getLogger(__name__)
_SECRET_BYTES = 32


@dataclass(frozen=True, slots=True)
class Reconciler:
    """Brings CodaClusters to what they specify; each round starts from what there is and remembers nothing."""

    kube: KubeClient
    telemetry: Telemetry
    images: Images

    async def reconcile(self, key: Key) -> float | None:
        """Do one round and return when to look again (seconds), or None when the CodaCluster is gone.

        Raises:
            ApiError: The API server could not be reached, or is not able to answer now.
        """
        observed = await observe(self.kube, self.telemetry, key, self.images)
        if observed is None:
            return None
        plan = decide(observed, mint=lambda: secrets.token_urlsafe(_SECRET_BYTES))
        applied = await apply(self.kube, self.telemetry, observed, plan)
        for _, line in summary(applied):
            _logger.info("%s/%s: %s", key.namespace, key.name, line)
        await report(self.kube, observed, plan, applied)
        return plan.look_again_s
