"""The seconds of each phase, from assumptions about a card; a run's measured seconds scale them (`measured`).

a decode step     (weights + keys and values of the context) / bandwidth
reading in        2 x parameters x tokens / operations a second
forward           2 x parameters x tokens / operations a second; attention counts as in the learner's planner
forward, backward 6 x, and with gradient checkpointing 8 x
sums over ranks   bytes / (bandwidth between the cards), beside no computation
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from vlm_rl.scaling.simulator import Decoding

BANDWIDTH = 3.35e12  # bytes a second of a card's memory: NVIDIA's data sheet of the H100 SXM
OPERATIONS = 400e12  # a second, in bfloat16 products: ours, 40 % of that data sheet's 989e12
LINK = 450e9  # bytes a second from a card to others of its machine: that data sheet, one direction
NETWORK = 50e9  # to other machines: ours, a network of 400 Gbit/s for each card
MACHINE = 8  # cards
SYNC = 3.0  # seconds: ours. It copies the weights and proves them by their checksums
WAKE = 1.0  # more where an engine sleeps during the update: ours


@dataclass(frozen=True, slots=True)
class CardSpeed:
    """What is assumed of a card and of what connects cards."""

    bandwidth: float = BANDWIDTH
    operations: float = OPERATIONS
    link: float = LINK
    network: float = NETWORK


@dataclass(frozen=True, slots=True)
class PhaseRates:
    """Seconds on one card, and what scales them."""

    decoding: Decoding  # of an engine on one card
    forward: float  # of a token
    update: float  # of a token, forward and backward
    weight_bytes: int  # of all weights, which ranks send each other
    zero_stage: int
    updates: int  # optimizer steps of a step
    passes: float  # forward over a batch before its updates: old log-probs, blind ones, the reference's, a teacher's
    card: CardSpeed
    learner_scale: float = 1.0
    sync: float = SYNC
    wake: float = WAKE
    other: float = 0.0  # in no phase of these: prompts, grades, logs, saves

    def train_seconds(self, cost_per_rank: float, *, ranks: int, rows: float) -> float:
        """Return the seconds of a step's log-probs and updates.

        Args:
            cost_per_rank: of the slowest rank, all mini-batches together; a token costs 1.
            ranks: of the learner.
            rows: of a rank in a mini-batch.
        """
        computed = cost_per_rank * (self.update + self.passes * self.forward)
        return self.learner_scale * (computed + self._sent(rows, ranks) * self._pass_seconds(ranks))

    def _sent(self, rows: float, ranks: int) -> float:
        """Return how often the weights' bytes, as weights or gradients, go around in a step."""
        if ranks == 1:
            return 0.0
        if self.zero_stage == 3:  # weights gathered forward and backward, gradients summed, at each row
            return self.updates * rows * (3 + self.passes)
        if self.zero_stage == 2:  # gradients at each row, then the new weights
            return self.updates * (rows + 1)
        return self.updates * 2  # once a mini-batch

    def _pass_seconds(self, ranks: int) -> float:
        rate = self.card.link if ranks <= MACHINE else self.card.network
        return self.weight_bytes * (ranks - 1) / ranks / rate


def assumed_rates(
    card: CardSpeed,
    *,
    parameters: int,
    all_parameters: int,
    kv_bytes: float,
    itemsize: int,
    is_checkpointed: bool,
    zero_stage: int,
    updates: int,
    passes: float,
) -> PhaseRates:
    """Return the seconds that follow from assumptions about a card.

    Args:
        card: the assumptions.
        parameters: of the language model, which a token passes.
        all_parameters: with a vision tower.
        kv_bytes: of a token's keys and values.
        itemsize: bytes of a number.
        is_checkpointed: activations are computed again.
        zero_stage: train.zero_stage.
        updates: optimizer steps of a step.
        passes: forward passes over a batch before them; a teacher's counts by its size.
    """
    forward = 2 * parameters / card.operations
    return PhaseRates(
        decoding=Decoding(
            step=itemsize * parameters / card.bandwidth, context=kv_bytes / card.bandwidth, reading=forward
        ),
        forward=forward,
        update=(4 if is_checkpointed else 3) * forward,
        weight_bytes=itemsize * all_parameters,
        zero_stage=zero_stage,
        updates=updates,
        passes=passes,
        card=card,
    )


def with_decode_rate(rates: PhaseRates, tokens_a_second: float, *, places: int, context: float) -> PhaseRates:
    """Return rates at which an engine on one card samples so many tokens a second with all its places taken.

    Args:
        rates: the others.
        tokens_a_second: what is known.
        places: responses that it samples at once.
        context: mean tokens of each, its prompt included.
    """
    seconds = rates.decoding.step + places * context * rates.decoding.context
    return replace(rates, decoding=rates.decoding.times(places / seconds / tokens_a_second))


def with_learner_rate(rates: PhaseRates, tokens_a_second: float) -> PhaseRates:
    """Return rates at which a card takes so many tokens a second through forward and backward."""
    seconds = 1 / tokens_a_second
    return replace(rates, update=seconds, forward=rates.forward * seconds / rates.update)


def described(card: CardSpeed) -> Mapping[str, str]:
    """Return each assumption about a card in words, with its source."""
    return {
        "memory": f"{card.bandwidth / 1e12:g} TB/s (the H100 SXM's data sheet, unless given)",
        "products": f"{card.operations / 1e12:g} TFLOP/s in bfloat16 (ours: 40 % of that data sheet, unless given)",
        "between cards": (
            f"{card.link / 1e9:g} GB/s within {MACHINE} cards, {card.network / 1e9:g} GB/s beyond (ours)"
        ),
    }
