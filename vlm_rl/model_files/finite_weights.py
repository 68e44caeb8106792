"""Find NaN and infinity in a file of weights, without torch: every dtype is read as bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from vlm_rl.untrusted.json_object import read_object

# dtype -> (its bits as an integer, the bits of the exponent, which are all set in NaN and infinity alone)
_EXPONENTS = {
    "F64": (np.uint64, 0x7FF0_0000_0000_0000),
    "F32": (np.uint32, 0x7F80_0000),
    "BF16": (np.uint16, 0x7F80),
    "F16": (np.uint16, 0x7C00),
}
_BLOCK = 1 << 20  # elements looked at together: they stay in the processor's cache


def non_finite_tensor(file: Path) -> str | None:
    """Return the name of a tensor with a NaN or an infinity in this safetensors file, or None.

    Raises ValueError for a file of a different format.
    """
    with file.open("rb") as opened:
        header_bytes = int.from_bytes(opened.read(8), "little")
        try:
            header = read_object(opened.read(header_bytes))
            tensors = [(name, entry["dtype"], *entry["data_offsets"]) for name, entry in _tensors(header)]
        except (ValueError, KeyError, TypeError, AttributeError, MemoryError, OverflowError):
            raise ValueError(f"{file.name} is not a safetensors file") from None
    for name, dtype, begin, end in tensors:
        if dtype in _EXPONENTS and begin < end:
            kind, exponent = _EXPONENTS[dtype]
            bits = np.memmap(
                file, kind, "r", 8 + header_bytes + begin, shape=((end - begin) // np.dtype(kind).itemsize,)
            )
            for start in range(0, len(bits), _BLOCK):
                if ((bits[start : start + _BLOCK] & kind(exponent)) == exponent).any():
                    return name
    return None


def _tensors(header: dict[str, dict]) -> list[tuple[str, dict]]:
    return [(name, entry) for name, entry in header.items() if name != "__metadata__"]
