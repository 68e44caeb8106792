"""Which files of this machine a Python program needs.

They are the interpreter, its standard library, NumPy where it is installed, and the shared libraries of these.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

from vlm_rl.errors import UserError

PYTHON = f"/python/bin/python{sys.version_info.major}.{sys.version_info.minor}"  # inside the walls
LIBRARIES = "/lib"  # inside the walls
PACKAGES = "/packages"  # inside the walls

_NEEDED = re.compile(r"^\s*(?:(?P<name>\S+) => )?(?P<path>/\S+) \(0x", re.MULTILINE)


@functools.cache
def interpreter_files() -> tuple[tuple[str, str], ...]:
    """Return (path here, path inside the walls) of all that Python needs. Raises UserError without ldd."""
    python = os.path.realpath(sys.executable)
    standard_library = Path(sysconfig.get_path("stdlib"))
    folder = standard_library / "lib-dynload"
    extensions = sorted(str(path) for path in folder.glob("*.so") if not path.name.startswith("_tkinter"))
    packages = _numpy_folders()
    extensions += sorted(str(path) for package in packages for path in package.rglob("*.so"))
    # vLLM sets LD_PRELOAD for its workers, and ldd lists what is named there as needed.
    environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    ldd = ["ldd", python, *extensions]
    try:
        listed = subprocess.run(ldd, capture_output=True, text=True, timeout=60, check=False, env=environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(
            f"programs cannot be sandboxed here: ldd does not run ({error}), which says what libraries Python needs: "
            "install the C library's tools (libc-bin)"
        ) from None
    files = {PYTHON: python, f"/python/{sys.platlibdir}/{standard_library.name}": str(standard_library)}
    files |= {f"{PACKAGES}/{package.name}": str(package) for package in packages}
    for match in _NEEDED.finditer(listed.stdout):
        path = match["path"]
        if any(Path(path).is_relative_to(package) for package in packages):
            continue
        # A line without a name is the loader, which is started by its own path.
        target = path if match["name"] is None else f"{LIBRARIES}/{Path(match['name']).name}"
        files.setdefault(target, os.path.realpath(path))
    # The C library opens this one only where a thread ends early, and aborts the program without it.
    folders = {Path(match["path"]).parent: None for match in _NEEDED.finditer(listed.stdout)}
    for folder in folders:
        if (unwinder := folder / "libgcc_s.so.1").is_file():
            files.setdefault(f"{LIBRARIES}/{unwinder.name}", os.path.realpath(unwinder))
    return tuple((source, target) for target, source in files.items())


def _numpy_folders() -> list[Path]:
    """Return NumPy's folder and that of its libraries, where it is installed."""
    found = importlib.util.find_spec("numpy")
    if found is None or found.origin is None:
        return []
    package = Path(found.origin).parent
    return [folder for folder in (package, package.with_name("numpy.libs")) if folder.is_dir()]
