"""Two machines: network namespaces joined by a cable, each with its own torchrun agent and temporary folder."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp
from typing import TypeVar

import httpx
import pytest

from tests.helpers.rollout_servers import RolloutServer
from tests.helpers.toy_runs import Toys, assert_equal_runs, assert_sound, clean_environment, rollouts_of
from vlm_rl.run.directory import RunDirectory

T = TypeVar("T")

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

    @property
    def inside(self) -> list[str]:
        """Return the words that start a command on this machine."""
        settings = [f"TMPDIR={self.folder}", "GLOO_SOCKET_IFNAME=cable"]
        return ["ip", "netns", "exec", self.name, "env", *settings]

    def call(self, work: Callable[[], T]) -> T:
        """Return what a function returns in a thread on this machine."""

        def on_this_machine() -> T:
            with Path("/run/netns", self.name).open() as file:
                assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0
            return work()

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(on_this_machine).result()

    def start(self, config: Path, first: str) -> subprocess.Popen[bytes]:
        """Start this machine's torchrun agent, with one rank; the agents meet at the address `first`."""
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first}:29500", "--rdzv-id", "run"]
        is_host = int(self.address == first)  # told, since a namespace has no name of its own
        command += ["--rdzv-conf", f"is_host={is_host}", "--local-addr", self.address]
        return self.run(*command, "--shutdown-timeout", "2", "-m", "vlm_rl", "train", str(config))

    def run(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a command on this machine."""
        with (self.folder / "log").open("wb") as log:
            return subprocess.Popen([*self.inside, *command], env=clean_environment(), stdout=log, stderr=log)


@pytest.fixture
def machines() -> Iterator[tuple[Machine, Machine]]:
    """Yield two machines on one cable. The names of their folders are short: vLLM makes sockets there."""
    found = [
        Machine(f"vlm-rl-{os.getpid()}-{index}", f"10.77.0.{index}", Path(mkdtemp(prefix="machine-")))
        for index in (1, 2)
    ]
    try:
        for machine in found:
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
        left = subprocess.run(["ip", "netns", "pids", machine.name], capture_output=True, text=True)
        for process in left.stdout.split():  # the ranks of an agent that was killed
            with suppress(ProcessLookupError):
                os.kill(int(process), signal.SIGKILL)
        subprocess.run(["ip", "netns", "delete", machine.name], check=False, capture_output=True)
        shutil.rmtree(machine.folder)


@pytest.mark.turn(1, days=2)
def test_two_machines_train_as_two_ranks_of_one(machines: tuple[Machine, Machine], toys: Toys) -> None:
    """Bit for bit, and through ten seconds without the cable in the middle of the run."""
    assert shutil.which("ip") is not None
    config = toys.config("two-machines", train=TRAIN)
    with agents(machines, config) as both:
        wait_for_step(1, toys.run("two-machines"), both, machines)
        cut(machines, seconds=10)
        assert [agent.wait(DEADLINE) for agent in both] == [0, 0], _logs(machines)
    one = toys.runner("train", str(toys.config("one-machine", train=TRAIN)), ranks=2)
    assert one.code == 0, one.output[-2000:]
    run = toys.run("two-machines")
    assert_equal_runs(run, toys.run("one-machine"))
    assert_sound(run)


@pytest.mark.turn(0, days=4)
def test_servers_on_both_machines_and_a_cable_that_is_cut(machines: tuple[Machine, Machine], toys: Toys) -> None:
    """Ten seconds lose nothing. For good: the second machine's torchrun, which has lost the place where both meet,
    ends, and the first machine's is ended, as a batch system would. Alone, with its own server, it then continues at
    the last checkpoint."""
    pytest.importorskip("vllm")
    first = machines[0]
    token = first.folder / "token"
    rollout = {"sampler": "server", "servers": ["http://127.0.0.1:1"], "batch_size": 4, "server_token": str(token)}
    served = toys.config("served-machines", rollout=rollout)
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                RolloutServer(
                    served,
                    machine.folder / "server",
                    host=machine.address,
                    program=[*machine.inside, sys.executable, "-m", "tests.helpers.forked_server"],
                )
            )
            for machine in machines
        ]
        for machine, server in zip(machines, servers, strict=True):
            machine.call(server.wait)
        changes = {
            "rollout": rollout | {"servers": [server.url for server in servers]},
            "train": TRAIN | {"steps": 1000},
            "checkpoint": {"every": 1},
        }
        run = toys.run("machines-and-servers")
        with agents(machines, toys.config("machines-and-servers", **changes)) as both:
            wait_for_step(1, run, both, machines)
            cut(machines, seconds=10)
            wait_for_step(len(run.metrics()) + 2, run, both, machines)
            assert "rollout server" not in _logs(machines)
            drawn = [first.call(lambda url=server.url: requests_of(url, token)) for server in servers]
            cut(machines)
            assert both[1].wait(DEADLINE) != 0
            both[0].terminate()
            assert both[0].wait(DEADLINE) != 0
        assert min(drawn) > 0
        done = max(step for step, _ in run.checkpoints())
        changes["train"] = TRAIN | {"steps": done + 1}
        alone = toys.config("machines-and-servers", **changes)
        resumed = first.run(sys.executable, "-m", "vlm_rl", "train", str(alone), "--resume")
        assert resumed.wait(DEADLINE) == 0, _logs(machines)
        assert f"rollout server {servers[1].url}: " in _logs(machines)
    assert run.rollout_steps() == list(range(1, done + 2))
    counts = Counter(row["prompt_id"] for rows in rollouts_of(run)[: (done + 1) // 3 * 3] for row in rows)
    assert len(counts) == 12 and set(counts.values()) == {(done + 1) // 3 * 4}  # twelve problems, four a step
    assert_sound(run)


@contextmanager
def agents(machines: tuple[Machine, Machine], config: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Train on both machines."""
    both = [machine.start(config, machines[0].address) for machine in machines]
    try:
        yield both
    finally:
        for agent in both:
            agent.kill()
            agent.wait()


def wait_for_step(
    step: int, run: RunDirectory, both: list[subprocess.Popen[bytes]], machines: tuple[Machine, Machine]
) -> None:
    end = time.monotonic() + DEADLINE
    while not (run.path / "metrics.jsonl").exists() or len(run.metrics()) < step:
        assert all(agent.poll() is None for agent in both) and time.monotonic() < end, _logs(machines)
        time.sleep(0.1)


def cut(machines: tuple[Machine, Machine], *, seconds: float | None = None) -> None:
    """Unplug the cable for some seconds, or for good: then connections are given up in seconds, not in 15 minutes."""
    if seconds is None:
        for machine in machines:
            _ip("netns", "exec", machine.name, "sysctl", "net.ipv4.tcp_retries2=3")
    _ip("-n", machines[1].name, "link", "set", "cable", "down")
    if seconds is not None:
        time.sleep(seconds)
        _ip("-n", machines[1].name, "link", "set", "cable", "up")


def requests_of(url: str, token: Path) -> float:
    """Return how many responses a server has drawn."""
    headers = {"Authorization": f"Bearer {token.read_text().strip()}"}
    text = httpx.get(f"{url}/metrics", headers=headers, trust_env=False).text
    return sum(float(number) for number in re.findall(r"^vllm:request_success_total{.*} (.*)$", text, re.MULTILINE))


def _logs(machines: tuple[Machine, Machine]) -> str:
    return "\n".join((machine.folder / "log").read_text()[-2000:] for machine in machines)
