"""The cards above the panels, one for each checkpoint, and the line that counts the problems."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from markupsafe import Markup

from vlm_rl.demo.numbers.lengths import Summary
from vlm_rl.demo.numbers.problem_table import DIFFICULTIES, pair_of
from vlm_rl.demo.numbers.url_state import CHANGES, FLAGS, NO_CATEGORY, VERDICTS, UrlState
from vlm_rl.demo.panels.page_state import PageState
from vlm_rl.demo.web.rendering import render
from vlm_rl.stats import Estimate


@dataclass(frozen=True, slots=True)
class _Card:
    """One checkpoint on the problems that pass the filters."""

    label: str
    slot: int
    summary: Summary
    judgement: str
    better: Mapping[str, str]  # patches of the address: the problems behind the two counts
    worse: Mapping[str, str]


def summary_html(state: PageState, *, interactive: bool = True) -> Markup:
    """Return one card per checkpoint, in its colour; `interactive` adds what can be clicked."""
    cards = [
        _Card(
            label=label,
            slot=state.colors[index],
            summary=summary,
            judgement=judgement(summary.tokens, summary.score),
            better=_problems_of(state, index, "right"),
            worse=_problems_of(state, index, "wrong"),
        )
        for index, (summary, label) in enumerate(zip(state.summaries, state.labels, strict=True))
    ]
    return render("summary", cards=cards, interactive=interactive)


def _problems_of(state: PageState, index: int, change: str) -> dict[str, str]:
    return {"change": change, "focus": state.url.keys[index], "tab": "problems", "at": ""}


def judgement(tokens: Estimate, score: Estimate) -> str:
    """Say in words what the two paired changes show; an interval that holds 0 shows no change."""
    if not tokens.has_interval:
        return "too few problems to say"
    if not tokens.excludes_zero and abs(tokens.mean) > 0:
        length = "length: no clear change"
    else:
        length = "longer" if tokens.mean > 0 else "shorter" if tokens.mean < 0 else "same length"
    if not score.excludes_zero:
        return f"{length}, accuracy: no clear change"
    return f"{length}, {'more' if score.mean > 0 else 'less'} often right"


def count_html(state: PageState, *, interactive: bool = True) -> Markup:
    """Return how many problems are shown, which filters are set, and a button that clears them."""
    if not state.table.checkpoints:
        return Markup()
    total = state.table.num_problems
    return render(
        "count",
        kept=len(state.order),
        total=total,
        noun="problem" if total == 1 else "problems",
        filters=filter_texts(state) if state.url.filtered else None,
        chosen_by=_chosen_by(state.url),
        interactive=interactive,
    )


def _chosen_by(url: UrlState) -> str:
    """Name what the problems were chosen by, where that makes the changes of the chosen ones prove nothing.

    A difficulty is the share of right samples before training, which are the baseline's own where that is step 0.
    """
    is_by_verdict = url.change or url.verdict or url.difficulty or {"no_answer", "timeout"} & {*url.flags}
    is_by_length = url.box or (url.low, url.high) != (None, None) or "cut" in url.flags
    by = ["verdicts"] if is_by_verdict else []
    by += ["lengths"] if is_by_length else []
    return " and ".join(by)


def filter_texts(state: PageState) -> list[str]:
    """Return the filters that are set, in the words of the controls."""
    url = state.url
    labels = {checkpoint.key: checkpoint.label for checkpoint in state.table.checkpoints}
    return [
        *([CHANGES[url.change]] if url.change else []),
        *([VERDICTS[url.verdict]] if url.verdict else []),
        *(FLAGS[name] for name in url.flags),
        *("no category" if name == NO_CATEGORY else name for name in url.category),
        *(DIFFICULTIES[name][1] for name in url.difficulty if name in DIFFICULTIES),
        *([] if url.low is None else [f"at least {url.low:,} tokens"]),
        *([] if url.high is None else [f"at most {url.high:,} tokens"]),
        *([_box_text(state)] if url.ranges else []),
        *([f"“{url.text}”"] if url.text else []),
        *([f"in {labels[url.focus]}"] if url.focus else []),
    ]


def _box_text(state: PageState) -> str:
    assert state.url.ranges is not None
    low, high, pair_low, pair_high = state.url.ranges
    base, pair = state.labels[0], state.labels[pair_of(state.table, state.url)]
    return f"{low:,} to {high:,} tokens at {base} and {pair_low:,} to {pair_high:,} at {pair}"
