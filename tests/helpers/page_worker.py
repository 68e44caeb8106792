"""Writes a page again and again, on a disk that fails at one point after the other; prints how each try ended.

    LD_PRELOAD=crash_points.so python -m tests.helpers.page_worker FOLDER ERROR ...

Each try is a fork of its own: a disk that has failed fails for good.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tests.helpers import crash_points
from vlm_rl.errors import UserError
from vlm_rl.report.html import write_page

PAGE = "<!doctype html>" + "later " * 100_000


def attempt(out: Path, error: str, number: int) -> dict[str, object]:
    """Write the page in a process whose disk fails from a point on; return what it said, or "written"."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        crash_points.fail(str(out.parent), error=error, number=number)
        try:
            write_page(PAGE, out)
            said = "written"
        except UserError as fault:
            said = str(fault)
        except BaseException as fault:
            said = f"raised {type(fault).__name__}: {fault}"
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    left = sorted(file.name for file in out.parent.iterdir() if file != out)
    for name in left:
        (out.parent / name).unlink()
    return {"error": error, "number": number, "said": said, "text": out.read_text()[:20], "left": left}


def main() -> None:
    out = Path(sys.argv[1]) / "report.html"
    out.write_text("earlier")
    tries = []
    for error in sys.argv[2:]:
        number = 1
        while True:
            made = attempt(out, error, number)
            tries.append(made)
            if made["said"] == "written":  # the point is behind the last one
                break
            number += 1
        out.write_text("earlier")
    print(json.dumps(tries))


if __name__ == "__main__":
    main()
