"""What the plug-in is told: read from the environment once, when vLLM calls it."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from coda_engine.contract import interface
from coda_engine.contract.identity import Isolation
from coda_engine.shadow import EvictionPolicyName
from coda_engine.vllm_adapter.telemetry.page import FILE_PREFIX

ENV_PAGE_FILES = "CODA_PAGE_FILES"
"""Path prefix of the pages that the API process has made; set by Coda itself for EngineCore to inherit."""

DEFAULT_PAGE_DIR = Path("/dev/shm")  # noqa: S108 - shared memory is what it is for


@dataclass(frozen=True, slots=True)
class FileText:
    """A configured file's content, or why it could not be read.

    Attributes:
        path: The configured path; None when nothing is configured.
        text: Content without surrounding white space; None when absent or unreadable.
        problem: Why ``text`` is None although a path is configured; "" otherwise.
        missing: The path is configured and there is no such file.
    """

    path: Path | None = None
    text: str | None = None
    problem: str = ""
    missing: bool = False

    @classmethod
    def read(cls, path: str | None) -> Self:
        """Return the content of ``path``; never raises for a file that is absent, empty or not text."""
        if not path:
            return cls()
        file = Path(path)
        try:
            text = file.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return cls(file, None, f"{file} does not exist", missing=True)
        except (OSError, UnicodeDecodeError) as error:
            return cls(file, None, f"{file} cannot be read: {error}")
        return cls(file, text) if text else cls(file, None, f"{file} is empty")


@dataclass(frozen=True, slots=True)
class ShadowConfig:
    """The CPU shadow as it was asked for.

    Attributes:
        size_bytes: Bytes for pages of all ranks; 0 = no shadow.
        folder: Folder of its files.
        eviction: Which page makes room for a new one.
        problem: Why there is no shadow although one was asked for; "" otherwise.
    """

    size_bytes: int
    folder: Path
    eviction: EvictionPolicyName
    problem: str = ""

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Return what ``environment`` asks for; what cannot be read is kept as a problem, and there is no shadow."""
        folder = environment.get(interface.ENV_SHADOW_DIR)
        path = Path(folder) if folder else DEFAULT_PAGE_DIR / f"{interface.SHADOW_FOLDER_PREFIX}{os.getuid()}"
        size, eviction = environment.get(interface.ENV_SHADOW_BYTES) or "0", EvictionPolicyName.LRU
        if not (size.isascii() and size.isdigit()):
            problem = f"{interface.ENV_SHADOW_BYTES}: {size!r} is no number of bytes; set for example 4294967296"
            return cls(0, path, eviction, problem)
        chosen = environment.get(interface.ENV_SHADOW_EVICTION) or eviction
        try:
            return cls(int(size), path, EvictionPolicyName(chosen))
        except ValueError:
            allowed = ", ".join(EvictionPolicyName)
            return cls(
                0, path, eviction, f"{interface.ENV_SHADOW_EVICTION}: {chosen!r} is unknown; set one of {allowed}"
            )


@dataclass(frozen=True, slots=True)
class AdapterConfig:
    """The adapter's whole configuration (variables: :mod:`coda_engine.contract.interface`).

    Attributes:
        spec_key: JSON of the spec key that the engine was started for; "" = derive it.
        settings: The settings document to start with.
        profile: The profile to start with.
        cluster_secret: The secret that signs identity values.
        internal_token: The token that internal endpoints ask for.
        isolation: Whether tenants share KV of equal prefixes.
        isolation_problem: Why the configured isolation was not used (then it is Tenant, the stricter); else "".
        page_dir: Folder of the shared-memory pages.
        page_files: Path prefix of pages that a parent process has made; None in the first process.
        shadow: The CPU shadow.
    """

    spec_key: str
    settings: FileText
    profile: FileText
    cluster_secret: FileText
    internal_token: FileText
    isolation: Isolation
    isolation_problem: str
    page_dir: Path
    page_files: Path | None
    shadow: ShadowConfig

    def owns_pages(self, pid: int) -> bool:
        """Return whether the process ``pid`` made the pages (their name begins with its maker's pid)."""
        return self.page_files is not None and self.page_files.name.startswith(f"{FILE_PREFIX}{pid}-")

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Return the configuration in ``environment``; what cannot be read is kept with its problem."""
        isolation, isolation_problem = _isolation(environment.get(interface.ENV_ISOLATION))
        page_files = environment.get(ENV_PAGE_FILES)
        return cls(
            spec_key=environment.get(interface.ENV_SPEC_KEY, ""),
            settings=FileText.read(environment.get(interface.ENV_SETTINGS_FILE)),
            profile=FileText.read(environment.get(interface.ENV_PROFILE_FILE)),
            cluster_secret=FileText.read(environment.get(interface.ENV_CLUSTER_SECRET_FILE)),
            internal_token=FileText.read(environment.get(interface.ENV_INTERNAL_TOKEN_FILE)),
            isolation=isolation,
            isolation_problem=isolation_problem,
            page_dir=Path(environment.get(interface.ENV_PAGE_DIR) or DEFAULT_PAGE_DIR),
            page_files=Path(page_files) if page_files else None,
            shadow=ShadowConfig.from_environment(environment),
        )


def _isolation(value: str | None) -> tuple[Isolation, str]:
    if not value:
        return Isolation.TENANT, ""
    try:
        return Isolation(value), ""
    except ValueError:
        allowed = ", ".join(item.value for item in Isolation)
        return (
            Isolation.TENANT,
            f"{interface.ENV_ISOLATION}: {value!r} is unknown, Tenant is used; set one of {allowed}",
        )


def current() -> AdapterConfig:
    """Return the configuration of this process."""
    return AdapterConfig.from_environment(os.environ)
