"""``/v1/models``: what the fleet serves, under every name."""

from collections.abc import Mapping

from coda_router.dispatch import RETRY_AFTER_S
from coda_router.edge.answers import encoded
from coda_router.errors import Refusal, unknown_model
from coda_router.fleet.fleet import Fleet

_LIST_PATH = "/v1/models"


class ModelCatalog:
    """Answers from the workers' snapshots.

    Args:
        fleet: The workers.
        started_at_s: Unix time of the router's start, seconds; the models' ``created``.
    """

    def __init__(self, fleet: Fleet, started_at_s: float) -> None:
        self._fleet = fleet
        self._created = int(started_at_s)

    def check_visible(self, model: str | None, visible: frozenset[str] | None) -> None:
        """Refuse a model that is hidden from a client, in the very words for one that does not exist.

        Args:
            model: Name that the request asks for; None = none, and an engine would take what it serves.
            visible: Models that exist for the client; None = all.

        Raises:
            Refusal: 404; 400 where the request names no model and not all are visible.
        """
        if visible is None or model in visible:
            return
        served = self._fleet.served_models(visible)
        if model is None:
            named = f", one of: {', '.join(served)}" if served else ""
            raise Refusal(400, "missing_model", f"the request names no model; give its name{named}", param="model")
        raise unknown_model(model, served)

    def answer(self, path: str, method: str, visible: frozenset[str] | None) -> bytes:
        """Return the JSON for a GET of ``/v1/models`` or ``/v1/models/ID``.

        Args:
            path: What is asked for.
            method: HTTP method.
            visible: Models that exist for the client; None = all.

        Raises:
            Refusal: 404 for another path or an unknown model, 405 for another method, 503 while no engine is known.
        """
        if path != _LIST_PATH and not path.startswith(_LIST_PATH + "/"):
            raise Refusal(404, "not_found", f"there is no {path} here")
        if method not in {"GET", "HEAD"}:
            raise Refusal(405, "method_not_allowed", f"{path} takes GET, not {method}", allow="GET, HEAD")
        models = self._models()
        if not models:
            raise Refusal(503, "no_engine", "no engine is known yet; try again", retry_after_s=RETRY_AFTER_S)
        if visible is not None:
            models = {name: models[name] for name in models if name in visible}
        if path == _LIST_PATH:
            return encoded({"object": "list", "data": list(models.values())})
        name = path.removeprefix(_LIST_PATH + "/")
        if name not in models:
            raise unknown_model(name, models)
        return encoded(models[name])

    def _models(self) -> Mapping[str, dict[str, object]]:
        models: dict[str, dict[str, object]] = {}
        for worker in self._fleet.workers.values():
            snapshot = worker.snapshot
            names = snapshot.served_models if snapshot else sorted(worker.models)
            for name in names:
                models.setdefault(
                    name,
                    {
                        "id": name,
                        "object": "model",
                        "created": self._created,
                        "owned_by": "coda",
                        "root": names[0],
                        "parent": None,
                        "max_model_len": snapshot.max_context_tokens if snapshot else None,
                    },
                )
        return models
