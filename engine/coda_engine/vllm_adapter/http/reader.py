"""Reads the engine's pages in the API process."""

import json
from pathlib import Path

from fastapi import HTTPException

from coda_engine.vllm_adapter.log import logger
from coda_engine.vllm_adapter.telemetry.page import PageContent, PageReader, page_path
from coda_engine.vllm_adapter.telemetry.pages import (
    CONTROL_PAGE,
    DECISIONS_PAGE,
    MEASURES_PAGE,
    SESSIONS_PAGE,
    SNAPSHOT_PAGE,
    ControlDocument,
    DecisionsDocument,
    MeasuresDocument,
    SessionsDocument,
)


class PagesReader:
    """Typed access to the pages; each method answers 503 while the engine has published nothing.

    Args:
        prefix: Path prefix of the pages; None when there are none, which every method then says.
    """

    def __init__(self, prefix: Path | None) -> None:
        self._pages: dict[str, PageReader] = {}
        if prefix is None:
            return
        try:
            for name in (SNAPSHOT_PAGE, SESSIONS_PAGE, DECISIONS_PAGE, CONTROL_PAGE, MEASURES_PAGE):
                self._pages[name] = PageReader(page_path(prefix, name))
        except (OSError, ValueError) as error:
            logger.warning("coda: the engine's pages cannot be read: %s", error)
            self._pages.clear()

    def snapshot(self) -> PageContent:
        """Return the latest EngineSnapshot, as JSON, with its version."""
        return self._read(SNAPSHOT_PAGE)

    def sessions(self) -> SessionsDocument:
        """Return the session table; an empty one of the engine's instance before the first row."""
        page = self._pages.get(SESSIONS_PAGE)
        content = page.read() if page is not None else None
        if content is None:
            instance_id = self.control()["instance_id"]
            return SessionsDocument(
                instance_id=instance_id, version=0, complete_since=0, rows=[], removed=[], waiting={}
            )
        document: SessionsDocument = json.loads(content.payload)
        return document

    def decisions(self) -> DecisionsDocument:
        """Return the latest decisions; none while state admission is closed."""
        page = self._pages.get(DECISIONS_PAGE)
        content = page.read() if page is not None else None
        if content is None:
            return DecisionsDocument(next=0, decisions=[])
        document: DecisionsDocument = json.loads(content.payload)
        return document

    def measures(self) -> MeasuresDocument:
        """Return the latest measures."""
        document: MeasuresDocument = json.loads(self._read(MEASURES_PAGE).payload)
        return document

    def control(self) -> ControlDocument:
        """Return keys, settings and profile in force."""
        document: ControlDocument = json.loads(self._read(CONTROL_PAGE).payload)
        return document

    def _read(self, name: str) -> PageContent:
        page = self._pages.get(name)
        content = page.read() if page is not None else None
        if content is None or not content.payload:
            raise HTTPException(
                503, "the engine publishes nothing; its log says why Coda's telemetry is off, or it is starting"
            )
        return content
