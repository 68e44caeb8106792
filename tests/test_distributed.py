"""How a process joins its group, where what needs a GPU is looked at in the call, and how torchrun ends it."""

from __future__ import annotations

import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.launcher.api import LaunchConfig

from tests.helpers.processes import listening
from tests.helpers.toy_runs import clean_environment
from vlm_rl.devices import default_device
from vlm_rl.distributed import COLLECTIVE_TIMEOUT, init_ranks
from vlm_rl.errors import EXIT_STOPPED
from vlm_rl.samplers.remote.gloo_link import open_store


def test_on_gpus_nccl_gets_its_card_and_gloo_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: calls.append((args, kwargs)))
    for name, value in {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    device = torch.device("cuda", 1)
    assert init_ranks() == device
    assert current == [device], "what asks for the current card would get the first one"
    assert calls == [(("cpu:gloo,cuda:nccl",), {"timeout": COLLECTIVE_TIMEOUT, "device_id": device})]


def test_what_a_rank_makes_is_on_its_own_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    assert default_device() == torch.device("cuda", 3)


ALONE = """
import os, sys
from tests.helpers.processes import listening
from vlm_rl.distributed import init_ranks
from vlm_rl.errors import UserError

os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}
os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[1]}
try:
    init_ranks()
except UserError as error:
    print(error)
for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
    del os.environ[name]
init_ranks()
print(*(place.partition(":")[0] for place in listening()))
"""


def test_a_taken_port_is_one_message_and_a_single_rank_opens_none_for_others() -> None:
    """Gloo itself listens on the address of this machine's name, for a handshake of its own group."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        environment = clean_environment()
        environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        command = [sys.executable, "-c", ALONE, port]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    message, places = done.stdout.splitlines()
    assert message.startswith(f"the ranks cannot meet at 127.0.0.1:{port} (")
    assert "give another MASTER_PORT" in message
    assert {*places.split()} & {"00000000", "0" * 32} == set()


@pytest.mark.parametrize(("address", "word"), [("127.0.0.1", "0100007F"), ("::1", "0" * 24 + "01000000")])
def test_a_push_listens_on_the_way_to_its_server_alone(address: str, word: str) -> None:
    before = listening()
    store = open_store(address, timeout=timedelta(seconds=20))
    assert listening() - before == {f"{word}:{store.port:04X}"}
    assert TCPStore(address, store.port, is_master=False, timeout=timedelta(seconds=20)).add("joined", 1) == 1


RANK = """
import signal, sys, time

def stop(*_):
    print("told", flush=True)
    time.sleep(float(sys.argv[1]))
    print("saved", flush=True)
    sys.exit(int(sys.argv[2]))

signal.signal(signal.SIGTERM, stop)
print("ready", flush=True)
time.sleep(300)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "output"), [(1, "told\nsaved\n"), (60, "told\n")])
def test_torchrun_passes_sigterm_on_and_waits_as_long_as_it_was_told(
    tmp_path: Path, seconds: int, output: str
) -> None:
    """A rank that needs longer than --shutdown-timeout to save is killed; the ranks' exit code is lost either way."""
    (tmp_path / "rank.py").write_text(RANK)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--shutdown-timeout", "4"]
    process = subprocess.Popen(
        [*torchrun, str(tmp_path / "rank.py"), str(seconds), str(EXIT_STOPPED)],
        env=clean_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.terminate()
    assert process.communicate(timeout=120)[0] == output
    assert process.returncode not in (0, EXIT_STOPPED)
    assert LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=1).shutdown_timeout == 30  # where it was not told
