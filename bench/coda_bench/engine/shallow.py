"""The first layers of a model: schedulers are compared, not texts, and a slow machine gets a faster model's pace."""

import json
import re
import shutil
import tempfile
from pathlib import Path

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
_WEIGHTS = "model.safetensors"


class ShallowModelError(ValueError):
    """The model cannot be made shallow; the message says why."""


def shallow_model(model: Path, layers: int) -> Path:
    """Return a folder beside ``model`` with its first ``layers`` layers, made when absent.

    Raises:
        ShallowModelError: The model has fewer layers, or its weights are not one safetensors file.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    present = config.get("num_hidden_layers", 0)
    if not 1 <= layers <= present:
        raise ShallowModelError(f"--layers {layers}: {model} has {present} layers")
    if not (model / _WEIGHTS).is_file():
        raise ShallowModelError(
            f"--layers: {model} has no {_WEIGHTS}; only models of one weights file can be made shallow"
        )
    made = model.with_name(f"{model.name}-{layers}-layers")
    if made.is_dir():
        return made
    with tempfile.TemporaryDirectory(dir=model.parent, prefix=f".{made.name}-") as scratch:
        folder = Path(scratch) / "model"
        shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}), encoding="utf-8")
        # With vLLM comes what reads weights; the rest of the benchmark does without.
        from safetensors import safe_open
        from safetensors.torch import save_file

        with safe_open(model / _WEIGHTS, framework="pt") as weights:
            kept = {name: weights.get_tensor(name) for name in weights.keys() if _is_kept(name, layers)}  # noqa: SIM118
            save_file(kept, folder / _WEIGHTS, metadata=weights.metadata())
        folder.rename(made)
    return made


def _is_kept(name: str, layers: int) -> bool:
    layer = _LAYER.match(name)
    return layer is None or int(layer[1]) < layers
