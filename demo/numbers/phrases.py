"""Phrases of reasoning: which checkpoint checks, turns back or looks again more often than the baseline.

A response counts once for a phrase, however often it says it. A word is found as a word: "wait" is not in "waiter".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vlm_rl.demo.numbers.problem_table import ProblemTable
from vlm_rl.stats import Estimate, estimate

# What reasoners say when they look again, check, turn back or conclude.
PHRASES = (
    "wait", "hmm", "actually", "let me check", "let me verify", "double-check", "alternatively", "another way",
    "on second thought", "try again", "mistake", "look at the image", "look again", "in the image", "step by step",
    "so the answer is", "therefore", "i think", "assume",
)  # fmt: skip
MIN_SHARE = 0.02  # a phrase that no checkpoint says in at least this share of its responses is left out
MAX_SHOWN = 10


@dataclass(frozen=True, slots=True)
class PhraseUse:
    """How often one checkpoint says a phrase, against the baseline, over the kept problems."""

    phrase: str
    checkpoint: int  # its place in the table
    count: int  # responses that say it
    num: int  # responses
    change: Estimate  # of the share of a problem's responses, paired by problem


def phrase_uses(table: ProblemTable, keep_P: np.ndarray) -> list[list[PhraseUse]]:
    """Return for each phrase what every checkpoint beside the baseline makes of it.

    The phrases whose use differs most come first, at most MAX_SHOWN.
    """
    uses = []
    for place, phrase in enumerate(PHRASES):
        shares_CP = [_share_P(table, index, place) for index in range(len(table.checkpoints))]
        if max((float(share_P[keep_P].mean()) for share_P in shares_CP), default=0.0) < MIN_SHARE:
            continue
        uses.append(
            [
                PhraseUse(
                    phrase,
                    index,
                    count=int(_said_R(table, index, place)[table.inside(index, keep_P)].sum()),
                    num=int(table.inside(index, keep_P).sum()),
                    change=estimate(
                        (shares_CP[index] - shares_CP[0])[keep_P], clusters=table.cluster_P[keep_P], bounds=(-1, 1)
                    ),
                )
                for index in range(1, len(table.checkpoints))
            ]
        )
    return sorted(uses, key=_largest_change, reverse=True)[:MAX_SHOWN]


def _largest_change(uses: Sequence[PhraseUse]) -> float:
    return max((abs(use.change.mean) for use in uses), default=0.0)


def _said_R(table: ProblemTable, index: int, place: int) -> np.ndarray:
    return table.checkpoints[index].responses.says_R(PHRASES)[:, place]


def _share_P(table: ProblemTable, index: int, place: int) -> np.ndarray:
    """Return the share of each problem's responses that say the phrase, in the table's order of problems."""
    responses = table.checkpoints[index].responses
    return responses.mean_P(_said_R(table, index, place))[table.row_CP[index]]
