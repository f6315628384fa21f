"""Which weights these are: a KV block is of no use to other ones, however similar their files look."""

import hashlib
from pathlib import Path

from vllm.config import VllmConfig

from coda_engine.vllm_adapter.keys import WEIGHT_SUFFIXES

_SAMPLES = 256
_SAMPLE_BYTES = 4096


def weights_identity(config: VllmConfig) -> str:
    """Return what tells these weights from others; "" when nothing does.

    A hub's commit does. Files in a folder may be replaced by a fine-tuned model's, of the same names and sizes, so
    places all over each of them are read: training touches most of a model, merging an adapter a part of every layer.

    Raises:
        OSError: A file cannot be read.
    """
    folder = Path(str(config.model_config.model))
    if not folder.is_dir():
        commit = getattr(config.model_config.hf_config, "_commit_hash", None)
        return f"commit {commit}" if commit else ""
    digest = hashlib.blake2b(digest_size=16)
    files = sorted(path for path in folder.iterdir() if path.suffix in WEIGHT_SUFFIXES)
    for path in files:
        size_bytes = path.stat().st_size
        digest.update(f"{path.name} {size_bytes}".encode())
        with path.open("rb") as file:
            for sample in range(_SAMPLES):
                file.seek(max(0, size_bytes - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return f"files {digest.hexdigest()}" if files else ""
