"""Does a run fit? The one rule, which the dry run, init, doctor, `vlm-rl plan` and the out-of-memory message ask.

    fit = fits(dry_run(config, num_ranks=8), Card.of(80))
    fit.ok, fit.margin      # whether it fits, and the bytes to spare (below 0: missing) of its tightest part
    fit.over                # the parts that need more than they may take

`remedies` finds what would make it fit. A further part that needs memory is one more `Need` here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import psutil

from vlm_rl.config import ENGINE_SHARE, LARGEST_ENGINE_SHARE, Config
from vlm_rl.devices import gpu_memory, num_gpus, smallest_card
from vlm_rl.errors import UserError
from vlm_rl.planning.dry_run import DryRun, with_checkpointing
from vlm_rl.planning.memory import Memory

UPDATE_SHARE = 0.9  # of the free memory: the plan leaves out allocator overhead and communication buffers
ROLLOUT_SHARE = 0.95  # the engine keeps to its share by itself
SERVER_SHARE = 0.92  # of a card, which vLLM 0.32 takes by default; nothing else runs on a server's card
ENGINE_OVERHEAD = 2**30  # bytes of an engine's share for its CUDA graphs and what a prefill takes
MACHINE = 8  # cards of a machine, unless something says how many

MemoryPart = Literal["update", "rollout", "engine", "share", "host", "server"]


@dataclass(frozen=True, slots=True)
class Card:
    """The memory of the device that a rank has: a GPU, or its part of the host's. Bytes."""

    total: float
    free: float
    is_gpu: bool = True
    host: float | None = None  # free in host memory for each rank, if known
    neighbours: int = MACHINE  # cards of its machine, itself included: those that can form an engine

    @classmethod
    def of(cls, gigabytes: float, *, host: float | None = None, neighbours: int = MACHINE) -> Card:
        """Return a GPU with so many times 10^9 bytes, all of them free."""
        return cls(gigabytes * 1e9, gigabytes * 1e9, host=host, neighbours=neighbours)

    @classmethod
    def here(cls, ranks: int, *, emptied: bool = False) -> Card:
        """Return the smallest of this machine's GPUs, or without one a rank's part of the host's memory.

        Args:
            ranks: of the run.
            emptied: count what is in use now as free, and do not open a GPU to ask.
        """
        memory = psutil.virtual_memory()
        host = memory.total if emptied else memory.available
        if (size := smallest_card()) is None:
            return cls(memory.total / ranks, host / ranks, is_gpu=False, host=host / ranks)
        cards = num_gpus()
        free, total = (size, size) if emptied else min(gpu_memory(index) for index in range(cards))
        return cls(total, free, host=host / min(ranks, cards), neighbours=cards)

    def __str__(self) -> str:
        """Return its name in messages."""
        return f"a card with {self.total / 1e9:.0f} GB" if self.is_gpu else "this machine"


@dataclass(frozen=True, slots=True)
class Need:
    """What a part of a run needs, and what it may take. Bytes."""

    part: MemoryPart
    needed: float
    limit: float
    fault: str  # in words, if it needs too much

    @property
    def margin(self) -> float:
        """Return the bytes to spare; below 0, those that are missing."""
        return self.limit - self.needed


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a run fits on a card."""

    dry: DryRun
    card: Card
    needs: tuple[Need, ...]
    responses: int  # at full length that the engine must have room for

    @property
    def over(self) -> tuple[Need, ...]:
        """Return the parts that need more than they may take; none if the run fits."""
        return tuple(need for need in self.needs if need.margin < 0)

    @property
    def ok(self) -> bool:
        """Tell whether the run fits."""
        return not self.over

    @property
    def margin(self) -> float:
        """Return the bytes to spare of the tightest part; below 0, those that are missing."""
        return min(need.margin for need in self.needs)

    @property
    def faults(self) -> str:
        """Return in words which needs are over their limit."""
        return "; ".join(dict.fromkeys(need.fault for need in self.over))

    def missing(self, part: MemoryPart) -> float:
        """Return the bytes by which a part exceeds its limit, or 0."""
        return sum(-need.margin for need in self.over if need.part == part)

    @property
    def smallest_card(self) -> float:
        """Return the bytes of the smallest card on which it would fit, if its engine's share is adjusted."""
        shares = {"update": UPDATE_SHARE, "rollout": ROLLOUT_SHARE}
        return max(need.needed / shares[need.part] for need in self.needs if need.part in shares)

    @property
    def shares(self) -> tuple[float, float] | None:
        """Return the least share of the card that the engine needs, and the best one; None if none would do."""
        memory, card = self.dry.memory, self.card
        if not takes_share(memory, card) or not self.dry.samples:
            return None
        least, most = _shares(memory, card, room=_room(self.dry, self.responses))
        least = math.ceil(1e4 * least) / 1e4
        best = max(math.floor(100 * min(LARGEST_ENGINE_SHARE, most)) / 100, least)
        return (least, best) if best <= most else None


def fits(dry: DryRun, card: Card, *, responses: int = 1) -> Fit:
    """Compare what each phase of a run needs with what a card has.

    With model.gradient_checkpointing auto, the plan of the result is the one with the least recomputation that fits,
    or the one with the most.

    Args:
        dry: what a dry run says of the run.
        card: of each of its ranks.
        responses: at full length, that the rollout engine must have room for side by side.
    """
    if dry.config.model.gradient_checkpointing == "auto":
        each = [fits(with_checkpointing(dry, way), card, responses=responses) for way in (False, "mlp", True)]
        return next((fit for fit in each if fit.ok), each[-1])
    found = needs(dry.memory, card, share=engine_share(dry.config), room=_room(dry, responses), samples=dry.samples)
    return Fit(dry, card, (*found, *_host_needs(dry, card)), responses)


def needs(memory: Memory, card: Card, *, share: float, room: float, samples: bool) -> Iterator[Need]:
    """Yield what a rank needs of its card.

    Args:
        memory: of the rank.
        card: that it has.
        share: of a GPU that the rollout engine takes.
        room: bytes that the engine must have for keys and values.
        samples: whether the run samples responses.
    """
    what = "the update needs" if samples else "a step needs"
    yield Need("update", memory.update, UPDATE_SHARE * card.free, f"{what} {gib(memory.update)}")
    if memory.frozen or memory.scoring:
        scored = memory.scored
        yield Need("update", scored, UPDATE_SHARE * card.free, f"reference and teacher need {gib(scored)} to score")
    if not samples:
        return
    limit = ROLLOUT_SHARE * card.free
    if not takes_share(memory, card):
        rollout = memory.rollout + (0 if memory.is_served else memory.kv_cache)
        yield Need("rollout", rollout, limit, f"the rollouts need {gib(rollout)}")
        return
    engine, taken = _beside_cache(memory) + room, share * card.total
    together = memory.kept + engine
    yield Need("rollout", together, limit, f"the rollouts need {gib(together)} with the engine and one response")
    if together <= limit:
        least, most = _shares(memory, card, room=room)
        fault = (
            f"the engine's share of the card, {share:.2f} (rollout.vllm.gpu_memory_utilization), must be from "
            f"{math.ceil(100 * least) / 100:.2f} to {math.floor(100 * most) / 100:.2f}"
        )
        yield Need("engine", engine, taken, fault)
        yield Need("share", memory.kept + taken, limit, fault)


def takes_share(memory: Memory, card: Card) -> bool:
    """Tell whether the engine takes a share of the card, as vLLM does, whose cache fills what is left of it."""
    return card.is_gpu and not memory.is_served and not memory.is_portable


def _shares(memory: Memory, card: Card, *, room: float) -> tuple[float, float]:
    """Return the least and the largest share of a card that the engine may take."""
    engine = _beside_cache(memory) + room
    return engine / card.total, (ROLLOUT_SHARE * card.free - memory.kept) / card.total


def _beside_cache(memory: Memory) -> int:
    """Return the bytes of an engine without keys and values."""
    return memory.engine_weights + ENGINE_OVERHEAD


def _room(dry: DryRun, responses: int) -> float:
    """Return the bytes of keys and values of so many responses at full length after the longest prompt."""
    return responses * dry.config.context_tokens * dry.kv_bytes_per_token


def responses_at_once(dry: DryRun, taken: float, *, tokens: float) -> float:
    """Return how many responses an engine has room for; below 1, it does not start.

    Args:
        dry: what a dry run says of the run.
        taken: bytes of each of its cards that the engine takes.
        tokens: of a response and its prompt.
    """
    return (taken - _beside_cache(dry.memory)) / (tokens * max(1, dry.kv_bytes_per_token))


def _host_needs(dry: DryRun, card: Card) -> Iterator[Need]:
    """Yield what a rank needs of host memory while it loads the model, and later, if what it has is known."""
    if card.host is None:
        return
    later = dry.memory.host + dry.memory.checkpoint_copies / dry.num_ranks
    for needed, when in ((dry.memory.loading, "while it loads the model"), (later, "while it trains")):
        yield Need("host", needed, card.host, f"a rank needs {gib(needed)} of host memory {when}")


def server_need(dry: DryRun, card: Card) -> Need:
    """Return the memory of a rollout server that has a card like this to itself."""
    needed = _beside_cache(dry.memory) + _room(dry, 1)
    fault = f"a server needs {gib(needed)} a card for its weights and one response"
    return Need("server", needed, server_share(dry.config) * card.total, fault)


def engine_share(config: Config) -> float:
    """Return the share of a card that vLLM takes, weights and CUDA graphs included."""
    return config.rollout.vllm.get("gpu_memory_utilization", ENGINE_SHARE)


def server_share(config: Config) -> float:
    """Return the share of a card that a rollout server takes; nothing else runs there."""
    return config.rollout.vllm.get("gpu_memory_utilization", SERVER_SHARE)


def card_of(gigabytes: float | None, dry: DryRun) -> Card | None:
    """Return the card that a user named in GB, or else the one that this machine has for a plan, emptied.

    None for a plan for GPUs on a machine without one. Raises UserError for no memory at all.
    """
    if gigabytes is not None:
        if gigabytes <= 0:
            raise UserError(f"--gpu-memory {gigabytes:g}: give the GB of a card, for example 80")
        return Card.of(gigabytes)
    card = Card.here(dry.num_ranks, emptied=True)
    return card if card.is_gpu == dry.is_on_gpu else None


def gib(size: float) -> str:
    """Return a number of bytes in words."""
    return f"{size / 2**30:.1f} GiB"
