"""Checks of this machine."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from vlm_rl.doctor.check import Check

_LIBRARIES = ("torch", "transformers", "deepspeed")


def versions() -> Check:
    """Name the versions that everything else depends on."""
    known = [f"Python {platform.python_version()}"]
    for library in _LIBRARIES:
        try:
            known.append(f"{library} {version(library)}")
        except PackageNotFoundError:
            return Check("versions", "off", f"{library} is not installed", "install vlm-rl with its requirements")
    return Check("versions", "ok", ", ".join(known))


MACHINE_CHECKS = (versions,)
