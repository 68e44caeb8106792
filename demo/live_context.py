"""What the live panel takes from the page around it: the checkpoints shown, their colours, the problem at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vlm_rl.demo.library import key_of
from vlm_rl.demo.page_state import NUM_COLORS, NUM_SLOTS, Scene, Scenes
from vlm_rl.demo.pictures import images_of
from vlm_rl.demo.url_state import View
from vlm_rl.types import IMAGE_MARKER


@dataclass(frozen=True, slots=True)
class Example:
    """A stored problem to start from."""

    title: str
    question: str
    image: bytes | None
    gold: str


@dataclass(frozen=True, slots=True)
class Around:
    """The page at a view, which every method takes as the address's query."""

    scenes: Scenes
    keys: Mapping[str, str]  # name of a model that can be asked -> key of its checkpoint; servers have none

    def shown(self, query: str) -> list[str]:
        """The models whose checkpoints the page shows, in its order; of pooled seeds the first one."""
        names = {key: name for name, key in self.keys.items()}
        return [names[key] for key in shown_slots(self.scenes.of(View.parse(query))) if key in names]

    def colors(self, query: str, names: Sequence[str]) -> dict[str, str]:
        """A CSS colour for each model asked: that of its checkpoint on the page."""
        scene = self.scenes.of(View.parse(query))
        keys = [self.keys.get(name, name) for name in names]
        slots = asked_slots(keys, shown_slots(scene), scene.library.color_order(scene.view.benchmark))
        return {name: f"var(--c{slots[key]})" for name, key in zip(names, keys, strict=True)}

    def problem(self, query: str) -> Example | None:
        """The problem shown; None where no problem passes the filters, or it has several pictures."""
        scene = self.scenes.of(View.parse(query))
        if scene.problem_id is None:
            return None
        base = scene.table.checkpoints[0]
        record = base.responses.records(scene.problem_id)[0]
        images = images_of(record, scene.view.benchmark, base.sets)
        if len(images) > 1:
            return None
        question = str(record["question"] or "").replace(IMAGE_MARKER, "").strip()
        image = images[0] if images else None
        return Example(scene.problem_id, question, image, str(record["gold"] or ""))


def shown_slots(scene: Scene) -> dict[str, int]:
    """RUN@STEP of each checkpoint shown -> its colour; pooled seeds are represented by the first one."""
    return {key_of(one.runs[0], one.step): scene.slots[one.key] for one in scene.table.checkpoints}


def asked_slots(asked: Sequence[str], shown: Mapping[str, int], known: Sequence[str]) -> dict[str, int]:
    """A colour of its own for each of at most NUM_COLORS: the page's where it is shown there, else one free there."""
    slots = {key: shown[key] for key in asked if key in shown}
    for key in asked:
        if key not in slots:
            wanted = known.index(key) % NUM_SLOTS if key in known else NUM_SLOTS
            rest = [slot for slot in range(NUM_COLORS) if slot not in slots.values()]
            free = [slot for slot in rest if slot not in shown.values()] or rest
            slots[key] = min(free, key=lambda slot: (slot - wanted) % NUM_COLORS)
    return slots
