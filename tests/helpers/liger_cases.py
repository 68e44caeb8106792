"""Liger's layers in tiny models of several types, on a CPU, beside transformers' own.

    TRITON_INTERPRET=1 python -m tests.helpers.liger_cases FOLDER ...     # prints a line of JSON for each folder

A process of its own: Triton reads the variable when it is imported.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from tests.helpers.family_rows import BANNED, TEMPERATURE, groups_of, packed_row
from vlm_rl.config import LayerPatches
from vlm_rl.errors import UserError
from vlm_rl.learner.policy import Policy, load_model
from vlm_rl.learner.self_check import SelfCheck


def complete_the_interpreter() -> None:
    """Give kernels a float as a float32 scalar, as a compiler does, and a rsqrt: NVIDIA's is compiled code."""
    import liger_kernel.ops.rms_norm as norms
    from triton.runtime import interpreter

    norms.rsqrt = lambda x: 1 / interpreter.tl.sqrt(x)

    convert: Any = interpreter._implicit_cvt

    def with_floats(value: Any) -> Any:
        if not isinstance(value, float):
            return convert(value)
        kind = interpreter.tl.float32
        array = interpreter.np.array([value], dtype=interpreter.np.float32)
        return interpreter.tl.tensor(interpreter.TensorHandle(array, kind), kind)

    interpreter._implicit_cvt = with_floats


def computed(folder: Path, patches: LayerPatches) -> tuple[list[str], torch.Tensor, torch.Tensor]:
    """Return the replaced layers, the log-probs [K] of a row, and all gradients end to end."""
    config = AutoConfig.from_pretrained(folder)
    groups = groups_of(config.model_type, folder, config.get_text_config().vocab_size)
    groups = groups[1:2] if hasattr(config, "vision_config") else groups[:1]  # one with an image; each token is slow
    model = load_model(folder, dtype=torch.float32)
    check = SelfCheck(model, [group.prompt for group in groups], banned_ids=BANNED, temperature=TEMPERATURE)
    policy = Policy(model, banned_ids=BANNED, temperature=TEMPERATURE, layer_patches=patches)
    check.compare(policy, path=folder)
    policy.enable_checkpointing()
    logp_K, entropy_K = policy(packed_row(policy, groups))
    (logp_K.sum() + 0.1 * entropy_K.sum()).backward()
    grads = [p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]
    return policy.replaced_layers, logp_K.detach(), torch.cat(grads)


def compared(folder: Path) -> dict[str, Any]:
    """Return what was replaced, and the largest errors against transformers' own layers; or the refusal."""
    _, wanted_K, wanted = computed(folder, False)
    try:
        replaced, logp_K, grad = computed(folder, "liger")
    except UserError as error:
        return {"refused": str(error)}
    return {
        "replaced": replaced,
        "log-probs": float((logp_K - wanted_K).abs().max()),
        "gradient": float((grad - wanted).norm() / wanted.norm()),
    }


if __name__ == "__main__":
    complete_the_interpreter()
    for name in sys.argv[1:]:
        print(json.dumps(compared(Path(name))), flush=True)
