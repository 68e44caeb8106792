"""The floor of an optimizer step, computed: its operations, and the time that they take at a measured rate.

    OMP_NUM_THREADS=1 python perf/floor.py

Nothing is trained. The table counts forward and backward of one group, six operations for each weight and token and
twelve for each pair of tokens and unit of width, for shared rows and for padded ones, and divides by this machine's
rate of float32 matrix products, which is measured first.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

IMAGE_SHARE = 0.75  # of the prompt's tokens, about
PATCHES = 4  # of a visual token


@dataclass(frozen=True)
class Model:
    """Sizes of a Qwen2.5-VL."""

    hidden: int
    layers: int
    kv_width: int
    mlp: int
    vocabulary: int
    vision: tuple[int, int, int, int]  # width, layers, MLP, layers that attend to the whole image

    @property
    def text_weights(self) -> int:
        """Return the weights of the layers, without embeddings."""
        return self.layers * (2 * self.hidden**2 + 2 * self.hidden * self.kv_width + 3 * self.hidden * self.mlp)

    @property
    def vision_weights(self) -> int:
        width, layers, mlp, _ = self.vision
        return layers * (4 * width**2 + 3 * width * mlp) + 1176 * width + (4 * width) ** 2 + 4 * width * self.hidden


MODELS = {
    "tiny": Model(128, 3, 64, 384, 382, (64, 2, 128, 1)),
    "100m": Model(768, 15, 128, 2048, 382, (256, 4, 768, 1)),
    "3B": Model(2048, 36, 256, 11008, 151936, (1280, 32, 3420, 4)),
    "7B": Model(3584, 28, 512, 18944, 152064, (1280, 32, 3420, 4)),
}
SHAPES = (  # prompt tokens, responses, tokens of each
    (340, 8, 100),
    (1000, 8, 100),
    (1000, 8, 300),
    (1000, 8, 1000),
    (1000, 8, 2000),
    (250, 8, 2000),
    (1000, 4, 300),
    (1000, 16, 300),
)


def operations(model: Model, prompt: int, lengths: Sequence[int], *, shared: bool, images: int = 1) -> float:
    """Return the operations of forward and backward of one group.

    Args:
        model: its sizes.
        prompt: tokens of the prompt, its images included.
        lengths: tokens of each response.
        shared: one row with the prompt once; otherwise a row per response, without padding.
        images: how many of them the prompt has.
    """
    copies = 1 if shared else len(lengths)
    text = copies * prompt + sum(lengths)
    pairs = copies * prompt**2 / 2 + sum(prompt * tokens + tokens**2 / 2 for tokens in lengths)
    patches = PATCHES * IMAGE_SHARE * prompt
    width, depth, _, full = model.vision
    vision = 6 * model.vision_weights * patches + 12 * width * (
        full * patches**2 / images + (depth - full) * patches * 64
    )
    head = 6 * model.vocabulary * model.hidden * sum(lengths)
    return 6 * model.text_weights * text + 12 * model.hidden * model.layers * pairs + head + copies * vision


def gain(model: Model, prompt: int, lengths: Sequence[int], *, padded: bool = False, images: int = 1) -> float:
    """Return the operations of one row per response over those of a shared row.

    With ``padded`` all rows are filled to the longest.
    """
    filled = [max(lengths)] * len(lengths) if padded else lengths
    theirs = operations(model, prompt, filled, shared=False, images=images)
    return theirs / operations(model, prompt, lengths, shared=True, images=images)


def matrix_rate() -> float:
    """Return the float32 operations a second of a matrix product on one thread, the best of twenty."""
    import torch

    a, b = torch.randn(2, 1024, 1024)
    best = float("inf")
    for _ in range(20):
        begun = time.process_time()
        a @ b
        best = min(best, time.process_time() - begun)
    return 2 * 1024**3 / best


def main() -> None:
    rate = matrix_rate()
    print(f"matrix products: {rate / 1e9:.0f} G operations a CPU second")
    print(
        "| prompt, G x tokens | model | shared, G operations | padded over shared | floor, CPU s |\n"
        "|---|---|---|---|---|"
    )
    for shape in SHAPES:
        for name in ("tiny", "100m", "3B"):
            prompt, lengths = shape[0], [shape[2]] * shape[1]
            ours = operations(MODELS[name], prompt, lengths, shared=True)
            times = gain(MODELS[name], prompt, lengths)
            floor = f"{ours / rate:.2f}" if name != "3B" else "-"
            print(f"| {shape[0]}, {shape[1]} x {shape[2]} | {name} | {ours / 1e9:.1f} | {times:.2f} | {floor} |")


if __name__ == "__main__":
    main()
