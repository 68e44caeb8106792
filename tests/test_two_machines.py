"""Two machines: network namespaces joined by a cable, each with its own torchrun agent and temporary folder."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.toy_runs import Toys, assert_equal_runs, assert_sound, clean_environment

pytestmark = pytest.mark.slow
TRAIN = {"steps": 3, "zero_stage": 2}
DEADLINE = 400.0  # seconds for a run, which takes some dozens


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@dataclass(frozen=True)
class Machine:
    """A network namespace with one address, and a folder for temporary files."""

    name: str
    address: str
    folder: Path

    def start(self, config: Path, first: str) -> subprocess.Popen[bytes]:
        """Start this machine's torchrun agent, with one rank; the agents meet at the address `first`."""
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:29500", "--rdzv-id", "run"]
        is_host = int(self.address == first)  # told, since a namespace has no name of its own
        command += ["--rdzv-conf", f"is_host={is_host}", "--local-addr", self.address]
        with (self.folder / "log").open("wb") as log:
            return subprocess.Popen(
                ["ip", "netns", "exec", self.name, *command, "-m", "vlm_rl", "train", str(config)],
                env=clean_environment() | {"TMPDIR": str(self.folder), "GLOO_SOCKET_IFNAME": "cable"},
                stdout=log,
                stderr=log,
            )


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    """Yield two machines on one cable."""
    names = [f"vlm-rl-{os.getpid()}-{index}" for index in range(2)]
    found = [Machine(name, f"10.77.0.{index + 1}", tmp_path / name) for index, name in enumerate(names)]
    try:
        for machine in found:
            machine.folder.mkdir()
            _ip("netns", "add", machine.name)
        ends = [("netns", machine.name, "name", "cable") for machine in found]
        _ip("link", "add", *ends[0][2:], *ends[0][:2], "type", "veth", "peer", *ends[1][2:], *ends[1][:2])
        for machine in found:
            _ip("-n", machine.name, "address", "add", f"{machine.address}/24", "dev", "cable")
            for device in ("lo", "cable"):
                _ip("-n", machine.name, "link", "set", device, "up")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces need root and iproute2: {error}")
    yield found[0], found[1]
    for machine in found:
        subprocess.run(["ip", "netns", "delete", machine.name], check=False, capture_output=True)


def test_two_machines_train_as_two_ranks_of_one(machines: tuple[Machine, Machine], toys: Toys) -> None:
    """Bit for bit, and through ten seconds without the cable in the middle of the run."""
    assert shutil.which("ip") is not None
    config = toys.config("two-machines", train=TRAIN)
    agents = [machine.start(config, machines[0].address) for machine in machines]
    run, end = toys.run("two-machines"), time.monotonic() + DEADLINE
    try:
        while not (run.path / "metrics.jsonl").exists() or not list(run.metrics()):
            assert all(agent.poll() is None for agent in agents) and time.monotonic() < end, _logs(machines)
            time.sleep(0.1)
        _ip("-n", machines[1].name, "link", "set", "cable", "down")
        time.sleep(10)
        _ip("-n", machines[1].name, "link", "set", "cable", "up")
        assert [agent.wait(end - time.monotonic()) for agent in agents] == [0, 0], _logs(machines)
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    one = toys.runner("train", str(toys.config("one-machine", train=TRAIN)), ranks=2)
    assert one.code == 0, one.output[-2000:]
    assert_equal_runs(run, toys.run("one-machine"))
    assert_sound(run)


def _logs(machines: tuple[Machine, Machine]) -> str:
    return "\n".join((machine.folder / "log").read_text()[-2000:] for machine in machines)
