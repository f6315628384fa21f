"""The conversion itself, run as a process of its own: it needs a gigabyte that the caller should not keep.

``python -m coda_cli.model.convert MODEL GGUF_FILE FOLDER``
"""

import sys
from pathlib import Path

from coda_cli.model.catalog import BUILTIN_MODELS, BuiltinModel


def convert(model: BuiltinModel, gguf_file: Path, folder: Path) -> None:
    """Write the GGUF's weights, dequantised to bfloat16, its tokenizer and Coda's chat template into ``folder``."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
    weights = AutoModelForCausalLM.from_pretrained(
        **source, dtype="bfloat16", quantization_config=GgufConfig(dequantize=True)
    )
    weights.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    tokenizer.chat_template = model.chat_template()
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    name, gguf, target = sys.argv[1:]
    convert(BUILTIN_MODELS[name], Path(gguf), Path(target))
