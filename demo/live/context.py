"""What the live panel takes from the page around it: the checkpoints shown, their colours, the problem shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vlm_rl.demo.live.grading import problem_to_grade
from vlm_rl.demo.numbers.library import key_of
from vlm_rl.demo.numbers.problem_images import images_of
from vlm_rl.demo.numbers.url_state import UrlState
from vlm_rl.demo.panels.page_state import NUM_COLORS, NUM_SLOTS, PageState, PageStates
from vlm_rl.types import IMAGE_MARKER, Problem


@dataclass(frozen=True, slots=True)
class LiveExample:
    """A stored problem to start from."""

    title: str
    question: str
    image: bytes | None
    problem: Problem | None  # what an answer is graded against, without its images

    @property
    def gold(self) -> str:
        return "" if self.problem is None else self.problem.answer

    def is_asked(self, text: str, image: bytes | None) -> bool:
        """Tell whether a question is this problem's, with its picture."""
        return self.problem is not None and text.strip() == self.question and image == self.image


@dataclass(frozen=True, slots=True)
class LiveContext:
    """The page around the panel; every method takes the query of its address."""

    states: PageStates
    keys: Mapping[str, str]  # name of a model that can be asked -> key of its checkpoint; servers have none

    def shown(self, query: str) -> list[str]:
        """Return the models whose checkpoints the page shows, in its order; of pooled seeds the first."""
        names = {key: name for name, key in self.keys.items()}
        return [names[key] for key in shown_slots(self.states.of(UrlState.parse(query))) if key in names]

    def colors(self, query: str, names: Sequence[str]) -> dict[str, str]:
        """Return a CSS colour for each model asked: that of its checkpoint on the page."""
        state = self.states.of(UrlState.parse(query))
        keys = [self.keys.get(name, name) for name in names]
        slots = asked_slots(keys, shown_slots(state), state.library.color_order(state.url.benchmark))
        return {name: f"var(--c{slots[key]})" for name, key in zip(names, keys, strict=True)}

    def problem(self, query: str) -> LiveExample | None:
        """Return the problem shown; None if no problem passes the filters, or it has several pictures."""
        state = self.states.of(UrlState.parse(query))
        if state.problem_id is None:
            return None
        base = state.table.checkpoints[0]
        record = base.responses.records(state.problem_id)[0]
        images = images_of(record, state.url.benchmark, base.sets)
        if len(images) > 1:
            return None
        question = str(record["question"] or "").replace(IMAGE_MARKER, "").strip()
        image = images[0] if images else None
        problem = problem_to_grade(record, base.results[0], base.sets)
        return LiveExample(state.problem_id, question, image, problem)


def shown_slots(state: PageState) -> dict[str, int]:
    """Return the colour of each checkpoint shown, by RUN@STEP; pooled seeds have that of the first."""
    return {
        key_of(checkpoint.runs[0], checkpoint.step): state.slots[checkpoint.key]
        for checkpoint in state.table.checkpoints
    }


def asked_slots(asked: Sequence[str], shown: Mapping[str, int], known: Sequence[str]) -> dict[str, int]:
    """Return a different colour for each of at most NUM_COLORS models.

    A model that the page shows has its colour there; the others get colours that the page does not use.
    """
    slots = {key: shown[key] for key in asked if key in shown}
    for key in asked:
        if key not in slots:
            wanted = known.index(key) % NUM_SLOTS if key in known else NUM_SLOTS
            rest = [slot for slot in range(NUM_COLORS) if slot not in slots.values()]
            free = [slot for slot in rest if slot not in shown.values()] or rest
            slots[key] = min(free, key=lambda slot: (slot - wanted) % NUM_COLORS)
    return slots
