"""``coda router``: the router's own command."""

from coda_router.command import router

__all__ = ["router"]
