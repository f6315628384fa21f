"""``coda key``: makes an API key and the document that a router's folder of keys takes for it."""

import json
from collections.abc import Sequence

import click

from coda_router.auth.documents import KeyDocument, hashed, new_key


@click.command()
@click.option("--tenant", help="Whose key it is; default: the name of the file that you put the document in.")
@click.option("--model", "models", multiple=True, help="A model that the key may use (may be repeated); default: all.")
@click.option("--requests-per-minute", type=int, help="Most requests a minute; default: no limit.")
@click.option("--max-concurrent-requests", type=int, help="Most requests under way at once; default: no limit.")
def key(
    tenant: str | None, models: Sequence[str], requests_per_minute: int | None, max_concurrent_requests: int | None
) -> None:
    """Print the document of a new API key, and on standard error the key itself.

    So ``coda key > keys/alice`` writes what the router takes. The document holds only the key's hash: keep the key, it
    is not shown again.
    """
    secret = new_key()
    fields = {
        "keyHash": hashed(secret),
        "tenant": tenant,
        "models": list(models) or None,
        "requestsPerMinute": requests_per_minute,
        "maxConcurrentRequests": max_concurrent_requests,
    }
    document = json.dumps({name: value for name, value in fields.items() if value is not None})
    KeyDocument.parse(document.encode())  # refuses here what the router would refuse
    click.echo(secret, err=True)
    click.echo(document)
