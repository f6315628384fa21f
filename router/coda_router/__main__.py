"""``python -m coda_router``: the same as ``coda router``."""

from coda_router.command import router

if __name__ == "__main__":
    router(prog_name="python -m coda_router")
