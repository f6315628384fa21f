"""The settings in force: from the file at start and whenever it changes, or from a PUT in between."""

import logging

from coda_engine.contract.settings import Settings
from coda_router.hygiene.cleaning import PrefixHygiene
from coda_router.placement.chain import PlacementChain, chain_for

_log = logging.getLogger("coda.router.settings")


class LiveSettings:
    """The settings document in force, and the placement chain and the rules of hygiene made of it."""

    def __init__(self, settings: Settings) -> None:
        self._take(settings)

    @property
    def settings(self) -> Settings:
        """The document in force."""
        return self._settings

    @property
    def digest(self) -> str:
        """Digest of the document in force."""
        return self._digest

    @property
    def chain(self) -> PlacementChain:
        """The placement chain in force."""
        return self._chain

    @property
    def hygiene(self) -> PrefixHygiene:
        """The rules of prefix hygiene in force."""
        return self._hygiene

    def replace(self, settings: Settings) -> None:
        """Put another document in force; requests placed from now on follow it."""
        if settings.digest() == self._digest:
            return
        self._take(settings)
        _log.info("settings %s in force: placement %s", self._digest, settings.placement.policy.value)

    def _take(self, settings: Settings) -> None:
        self._settings = settings
        self._digest = settings.digest()
        self._chain = chain_for(settings.placement)
        self._hygiene = PrefixHygiene(
            billing_line=settings.hygiene.billing_line, rolling_markers=settings.hygiene.rolling_markers
        )
