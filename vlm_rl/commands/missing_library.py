"""Say which library a command needs and how to install it, where Python finds none of that name."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, requires

_MODULES = {"markdown_it": "markdown-it-py", "PIL": "pillow", "vl_convert": "vl-convert-python"}  # of other names


def install_advice(module: str) -> str | None:
    """Return a line with the command that installs a module's package; None for a module that is not ours to need.

    Only our own requirements are named: any other missing module is a fault that keeps its traceback.
    """
    name = module.partition(".")[0]
    package = _MODULES.get(name, name.replace("_", "-")).lower()
    try:
        needed = [_read(requirement) for requirement in requires("vlm-rl") or []]
    except PackageNotFoundError:
        return None
    extras = [extra for known, extra in needed if known == package]
    if not extras or name == "vlm_rl":  # an extra requires others of ours
        return None
    others = sorted(known for known, extra in needed if extra and extra == extras[0] and known != package)
    return f"{name} is not installed, and this command needs it: pip install {' '.join([package, *others])}"


def _read(requirement: str) -> tuple[str, str]:
    """Return the package that a requirement names, and the extra that it is of; "" if it is of none."""
    wanted, _, marker = requirement.partition(";")
    extra = re.search(r"""extra == ["']([\w-]+)["']""", marker)
    return re.split(r"[<>=!~\[ ]", wanted, maxsplit=1)[0].lower(), extra[1] if extra else ""
