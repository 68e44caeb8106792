"""Break the code once in each of more than four hundred places, and name the test that notices.

    python tests/mutate.py maths            # a sign, a denominator, a bound, a mean: minutes
    python tests/mutate.py grader           # or preparation, evaluation, demo
    python tests/mutate.py maths clip       # the breaks whose name holds this word

The tables are in tests/breaks/. Every break is made in a copy of the repository's code in a temporary folder,
and the tests that it names run against it. A break that no test notices is an error. Not collected by pytest;
tests/test_breaks.py holds the tables to the code as it is now.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("maths",)


def noticed_by(copy: Path, tests: tuple[str, ...]) -> str | None:
    """The first of these tests to fail there, None if all pass. Raises SystemExit if there are none to run."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "", "--no-header", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "--tb=no", *tests],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if not done.returncode:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if failed is None:
        raise SystemExit(f"{' '.join(tests)}: pytest ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return failed[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("word", nargs="?", default="")
    options = parser.parse_args()
    chosen = [one for one in import_module(f"tests.breaks.{options.part}").BREAKS if options.word in one.name]
    unnoticed = 0
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        for folder in ("vlm_rl", "tests", "data_prep", "demo", "configs"):
            shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        for tests in {one.tests: None for one in chosen}:
            if found := noticed_by(copy, tests):
                raise SystemExit(f"{found} fails without any break")
        for one in chosen:
            path = copy / one.file
            source = path.read_text(encoding="utf-8")
            path.write_text(source.replace(one.right, one.wrong), encoding="utf-8")
            found = noticed_by(copy, one.tests)
            path.write_text(source, encoding="utf-8")
            unnoticed += found is None
            print(f"{one.name:<48} {found or 'NO TEST NOTICED'}", flush=True)
    print(f"{unnoticed} of {len(chosen)} breaks unnoticed")
    return int(unnoticed > 0)


if __name__ == "__main__":
    sys.exit(main())
