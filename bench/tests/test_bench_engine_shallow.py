"""A model's first layers, as a folder that vLLM loads."""

import json
from pathlib import Path

import pytest

from coda_bench.engine.shallow import ShallowModelError, shallow_model

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"num_hidden_layers": 12, "hidden_size": 4}))
    (folder / "tokenizer.json").write_text("{}")
    names = ["model.embed_tokens.weight", "model.norm.weight", *(f"model.layers.{n}.mlp.weight" for n in range(12))]
    safetensors.save_file(
        {name: torch.ones(2) * place for place, name in enumerate(names)}, folder / "model.safetensors"
    )
    return folder


def test_the_first_layers_and_everything_else_are_kept_and_made_once(model: Path) -> None:
    made = shallow_model(model, 2)
    kept = safetensors.load_file(made / "model.safetensors")
    assert set(kept) == {
        "model.embed_tokens.weight", "model.norm.weight", "model.layers.0.mlp.weight", "model.layers.1.mlp.weight",
    }  # fmt: skip
    assert kept["model.layers.1.mlp.weight"].tolist() == [3.0, 3.0]
    assert json.loads((made / "config.json").read_text()) == {"num_hidden_layers": 2, "hidden_size": 4}
    assert (made / "tokenizer.json").is_file()
    before = (made / "model.safetensors").stat().st_mtime_ns
    assert shallow_model(model, 2) == made
    assert (made / "model.safetensors").stat().st_mtime_ns == before
    assert {path.name for path in model.parent.iterdir()} == {"small", "small-2-layers"}


@pytest.mark.parametrize("layers", [0, 13])
def test_layers_that_the_model_does_not_have_are_refused(model: Path, layers: int) -> None:
    with pytest.raises(ShallowModelError, match="has 12 layers"):
        shallow_model(model, layers)


def test_weights_in_several_files_are_refused(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    with pytest.raises(ShallowModelError, match=r"no model\.safetensors"):
        shallow_model(model, 2)
