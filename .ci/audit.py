"""Check the pinned dependencies: known vulnerabilities by pip-audit where its data can be had, and the reviewed pins.

constraints.txt says what is installed. reviewed_pins.csv lists the packages that read what is not trusted, each with
the version that somebody looked at and the day. A pin that moved without a new line there is an error, and so is a
known vulnerability.
"""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
from pathlib import Path

CI = Path(__file__).resolve().parent
CONSTRAINTS = CI.parent / "constraints.txt"


def unreviewed() -> list[str]:
    """Return a line for every reviewed package whose pin is a different version."""
    pins = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", CONSTRAINTS.read_text().lower(), re.MULTILINE))
    with (CI / "reviewed_pins.csv").open() as file:
        return [
            f"{row['package']}: {row['version']} was reviewed on {row['reviewed']}, "
            f"and {pins.get(row['package'])} is pinned"
            for row in csv.DictReader(file)
            if pins.get(row["package"]) != row["version"]
        ]


def vulnerable() -> list[str] | None:
    """Return a line for every known vulnerability of a pin; None where no advisories can be had."""
    uvx = Path(sys.executable).with_name("uvx")
    command = [uvx, "--quiet", "pip-audit", "-r", CONSTRAINTS, "--no-deps", "--disable-pip", "-f", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (json.JSONDecodeError, KeyError):
        return None
    looked_up = [package for package in packages if "skip_reason" not in package]
    if not looked_up:
        return None
    return [f"{p['name']} {p['version']}: {vuln['id']}" for p in looked_up for vuln in p["vulns"]]


def main() -> int:
    faults = [f"{line}: look at its changes, then give it a line in .ci/reviewed_pins.csv" for line in unreviewed()]
    known = vulnerable()
    print("no advisories can be had here" if known is None else f"{len(known)} known vulnerabilities")
    faults += known or []
    print("\n".join(faults) or "every reviewed pin is the one in constraints.txt")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
