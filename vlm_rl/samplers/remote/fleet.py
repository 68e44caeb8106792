"""The servers of a run: which of them answer, serve the right model, and hold the current weights."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vlm_rl.config import Quantization, is_server_address
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.distributed import all_gather, from_main
from vlm_rl.errors import UserError
from vlm_rl.samplers.remote.client import ServerError, ask_info, ask_proof, connected, media_mismatch
from vlm_rl.samplers.remote.push import BACKENDS, Peer
from vlm_rl.samplers.remote.server_token import read_token
from vlm_rl.untrusted.plain_files import read_small

SILENCE = 60.0  # seconds after which a server that does not answer is taken for hung


class ServersGoneError(UserError):
    """No server has answered for rollout.server_timeout; what was trained can be saved."""


@contextmanager
def all_served() -> Iterator[None]:
    """Raise ServersGoneError on every rank where one of them does in a `with` block: all save together. Collective.

    A rank that raises leaves the block early, without the collective calls that are left in it.
    """
    lost: ServersGoneError | None = None
    try:
        yield
    except ServersGoneError as error:
        lost = error
    if reasons := [reason for reason in all_gather(str(lost) if lost else "") if reason]:
        raise lost or ServersGoneError(reasons[0])


@dataclass(frozen=True)
class ServerSettings:
    """How the servers are reached, and what they must serve."""

    servers: Sequence[str] | str  # addresses, or a file with one a line
    token_file: Path
    timeout: float  # seconds without any server
    model_sha256: str  # of the served model's config.json
    tensor_parallel: int = 1  # cards of each server
    quantization: Quantization | None = None  # how they round weights
    silence: float = SILENCE


class Fleet:
    """The servers of rollout.servers, as one rank knows them."""

    def __init__(
        self,
        settings: ServerSettings,
        *,
        builder: PromptBuilder,
        max_model_len: int,
        dtype: torch.dtype,
        is_stopped: Callable[[], bool],
        note: Callable[[str], None],
    ) -> None:
        """Read the token and the addresses; no server is asked.

        Args:
            settings: of the servers.
            builder: the prompt builder of the model.
            max_model_len: the context that a server must have, in tokens.
            dtype: of the servers' weights.
            is_stopped: tells whether the run is to end.
            note: prints a line.

        Raises UserError if there is no token, and for a list of servers that cannot be read.
        """
        self.settings = settings
        self.token = read_token(settings.token_file)
        self.dtype = dtype
        self.version = 0  # of the current weights
        self.rooms: dict[str, int] = {}  # the servers that hold the current weights, and what each can sample at once
        self.changes = 0  # pushes that were begun
        self.is_pushing = False
        self.buffers: Mapping[str, str] | None = None  # of the first server before its first push; all have the same
        self._builder, self._max_model_len = builder, max_model_len
        self._is_stopped, self._note = is_stopped, note
        self._run = from_main(lambda: uuid.uuid4().hex)  # tells our weights from those of another run
        self._said: dict[str, str] = {}  # of each server, and of their file as "", so that it is said once
        self._lost_since: float | None = None  # since when no server has completed a group
        self._addresses = read_addresses(settings.servers)

    @property
    def label(self) -> str:
        """Return the label of the current weights."""
        return f"{self._run}-{self.version}"

    def version_of(self, label: str) -> int | None:
        """Return the policy version of the weights with this label; None if this run has not made such weights."""
        run, _, version = label.rpartition("-")
        if run != self._run or not version.isdecimal() or len(version) > len(str(self.version)):
            return None
        return int(version) if int(version) <= self.version else None

    @contextmanager
    def pushing(self) -> Iterator[None]:
        """Expect servers to hold any weights while this lasts. All ranks enter it before a push begins."""
        self.is_pushing = True  # first: a thread that looks between the two sees a change after it
        self.changes += 1
        try:
            yield
        finally:
            self.is_pushing = False

    def lose(self, url: str) -> None:
        """Give this server no more work until weights were pushed to it again."""
        self.rooms.pop(url, None)

    def note_progress(self) -> None:
        """Take note that a server has completed a group."""
        self._lost_since = None

    def look_around(self, holding: str | None = None) -> dict[Peer, int]:
        """Return the servers that answer now and serve the right model, with their rooms.

        With `holding` only those that hold the weights with this label.
        """

        async def attempt(url: str) -> tuple[Peer, int] | None:
            try:
                async with connected(url, self.token) as client:
                    info = await ask_info(client, seconds=min(10.0, self.settings.silence))
                if problem := self._mismatch(info):
                    raise ServerError(problem)
                if holding not in (None, info["weight_version"]):
                    raise ServerError("it was started again, and has not got the weights")
                if holding is not None and info["is_paused"]:
                    raise ServerError("its last push did not end, and it samples nothing until the next")
                if self.buffers is None:
                    async with connected(url, self.token) as client:
                        proof = await ask_proof(client, layout="", dtype="", seconds=self.settings.silence)
                    self.buffers = self.buffers or proof["buffers"]
                return Peer(url, str(info["instance"]), info["backend"], info["world_size"]), int(
                    info["max_num_seqs"]
                )
            except (ServerError, KeyError, ValueError, TypeError, OverflowError) as error:
                self.say(url, str(error))
                return None

        async def all_of_them() -> list[tuple[Peer, int] | None]:
            return await asyncio.gather(*map(attempt, self.addresses()))

        return dict(peer for peer in asyncio.run(all_of_them()) if peer is not None)

    def _mismatch(self, info: Mapping[str, Any]) -> str | None:
        """Return how a server differs from what this run needs, or None."""
        needed: dict[str, Any] = {
            "model": self.settings.model_sha256,
            "dtype": str(self.dtype).removeprefix("torch."),
            "quantization": self.settings.quantization,
            "max_model_len": self._max_model_len,
            "logprobs_mode": "processed_logprobs",
            "world_size": self.settings.tensor_parallel,
        }
        for key, value in needed.items():
            if info.get(key) != value or type(info.get(key)) is not type(value):  # 1.0 is no number of ranks
                what = (
                    "a different model"
                    if key == "model"
                    else f"{key} {info.get(key)!r}, and this run needs {value!r}"
                )
                return f"it serves {what}: start it with `vlm-rl serve` and this run's configuration"
        if fault := media_mismatch(info, self._builder):
            return fault
        if info.get("backend") not in BACKENDS:
            return f"it takes weights by {info.get('backend')!r}: start it with `vlm-rl serve`"
        return None

    def wait(self, *, holding: str | None = None) -> dict[Peer, int]:
        """Return the servers there are, once there is one; with `holding` only those that hold these weights.

        Raises ServersGoneError if no group was completed for rollout.server_timeout, or the run is to end.
        """
        if self._lost_since is None:
            self._lost_since = time.monotonic()
            self._note(f"no rollout server is left: waiting up to {self.settings.timeout:g} s for one")
        while not self._is_stopped():
            # Those that come back and never complete a group are as good as gone.
            is_over = time.monotonic() - self._lost_since >= self.settings.timeout
            if not is_over and (ready := self.look_around(holding)):
                return ready
            if is_over:
                raise ServersGoneError(
                    f"no rollout server has worked for {self.settings.timeout:g} s: {', '.join(self.addresses())}: "
                    "start servers with `vlm-rl serve`, then resume"
                )
            time.sleep(min(1.0, self.settings.timeout / 10))
        raise ServersGoneError("the run was stopped while no rollout server was there")

    def addresses(self) -> list[str]:
        """Return the addresses of all servers: of a file, those that it named when it was last in order.

        It may be read while somebody writes it, and a run with servers does not end for that.
        """
        try:
            self._addresses = read_addresses(self.settings.servers)
            self._said.pop("", None)
        except UserError as error:
            self._say_once("", f"{error}; the servers that it named before are used")
        return self._addresses

    def say(self, url: str, text: str) -> None:
        """Note what is wrong with a server, once."""
        self._say_once(url, f"rollout server {url}: {text}")

    def _say_once(self, subject: str, text: str) -> None:
        if self._said.get(subject) != text:
            self._said[subject] = text
            self._note(text)


def read_addresses(where: Sequence[str] | str | Path) -> list[str]:
    """Return the addresses of a list or a file. Raises UserError for a file that cannot be read or names none."""
    if not isinstance(where, str | Path):
        return [url.rstrip("/") for url in where]
    try:
        lines = read_small(where).split()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"rollout.servers: {where} cannot be read: {error}") from None
    wrong = [line for line in lines if not is_server_address(line)]
    if wrong or not lines:
        problem = f"{wrong[0]!r} is not an address such as http://127.0.0.1:8000" if wrong else "it names no server"
        raise UserError(f"rollout.servers: {where}: {problem}")
    return [line.rstrip("/") for line in lines]
