"""The live panel: one question about one picture, asked to several models side by side while they answer.

    live = open_live(scenes, options)        # at start; live.pictures.routes() go into the application
    with gr.Tab("Live"):
        build_live(live, bridge)

A page chooses among the models that the operator named, never an address of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from importlib import resources
from typing import Any

import gradio as gr
import pyarrow as pa
import pyarrow.parquet as pq

from vlm_rl.data.images import decode_image
from vlm_rl.demo.ask_queue import MAX_COLUMNS, Desk, Limits
from vlm_rl.demo.backends import CheckpointBackend, Engine, Shelf, find_checkpoints, load_checkpoint
from vlm_rl.demo.endpoints import Endpoint, EndpointBackend
from vlm_rl.demo.live_context import Around, Example
from vlm_rl.demo.live_html import error_html, gold_html, note_html, view_html
from vlm_rl.demo.page_state import Scenes
from vlm_rl.demo.replies import Backend, Question, Settings
from vlm_rl.demo.uploads import Pictures
from vlm_rl.errors import UserError
from vlm_rl.run.directory import RunDirectory
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import IMAGE_MARKER

_NOBODY = (
    "Nobody to ask: these runs have no checkpoint on this machine. Keep checkpoints/ beside the run, or name a "
    "server at start: vlm-rl demo RUN --endpoint NAME=http://127.0.0.1:8000/v1,MODEL"
)
_HOW = "Choose a picture or an example, write a question, and ask. The answers grow here side by side."
_NUM_EXAMPLES = 12
_AT_HAND, _SHOWN = "the problem in the panel of problems", -1


@dataclass(frozen=True, slots=True)
class Live:
    """What the panel needs, opened once for all pages."""

    desk: Desk
    pictures: Pictures
    examples: Sequence[Example]
    around: Around


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """What the operator says at start."""

    endpoints: Sequence[Endpoint] = ()
    engine: Engine = "transformers"
    most_loaded: int = 2  # checkpoints in memory; with vllm one, its engines do not share a process
    limits: Limits = Limits()  # noqa: RUF009  (frozen)


def open_live(scenes: Scenes, options: LiveOptions | None = None) -> Live:
    """Look for checkpoints and example problems; nothing is loaded before somebody asks."""
    options = options or LiveOptions()
    load = partial(load_checkpoint, engine=options.engine, max_tokens=options.limits.max_tokens)
    shelf = Shelf(load, most=options.most_loaded if options.engine == "transformers" else 1)
    checkpoints = find_checkpoints(scenes.library)
    system = TEMPLATES[checkpoints[0].template if checkpoints else "think_answer"].system
    backends: list[Backend] = [CheckpointBackend(checkpoint, shelf) for checkpoint in checkpoints]
    backends += [EndpointBackend(endpoint, system=system) for endpoint in options.endpoints]
    examples = read_examples([run.directory for run in scenes.library.runs.values()])
    pictures = Pictures([example.image or b"" for example in examples])
    around = Around(scenes, {one.name: one.key for one in checkpoints})
    return Live(Desk(backends, limits=options.limits), pictures, examples, around)


def read_examples(runs: Sequence[RunDirectory], *, most: int = _NUM_EXAMPLES) -> list[Example]:
    """The first problems with one stored picture of each evaluated set, `most` in all."""
    found: dict[str, list[Example]] = {}
    for run in runs:
        with suppress(UserError, OSError, ValueError, KeyError, pa.ArrowException):
            for result in run.evals():
                if result.benchmark not in found:
                    found[result.benchmark] = _first_examples(result.benchmark, result.path)
    sets = [examples for examples in found.values() if examples]
    share = most // max(1, len(sets))
    return [example for examples in sets for example in examples[: max(1, share)]][:most]


def _first_examples(benchmark: str, path: Any) -> list[Example]:
    with pq.ParquetFile(path) as file:
        batch = next(file.iter_batches(batch_size=64, columns=["problem_id", "question", "image", "gold"]), None)
    examples: dict[str, Example] = {}
    for row in [] if batch is None else batch.to_pylist():
        if len(row["image"] or ()) == 1:
            with suppress(UserError):
                decode_image(row["image"][0], where=row["problem_id"])
                title = f"{benchmark} · {row['problem_id']}"
                question = row["question"].replace(IMAGE_MARKER, "").strip()
                examples.setdefault(title, Example(title, question, row["image"][0], row["gold"] or ""))
        if len(examples) == _NUM_EXAMPLES:
            break
    return list(examples.values())


def build_live(live: Live, bridge: gr.HTML) -> None:
    """The panel's components and events, in the gradio context of the caller; `bridge` holds the page's query."""
    names = list(live.desk.backends)
    if not names:
        gr.HTML(note_html(_NOBODY))
        return
    with gr.Row(elem_classes="live-form"):
        with gr.Column(scale=1, min_width=220):
            picture = _picture()
        with gr.Column(scale=2, min_width=300):
            example = gr.Dropdown(
                [(_AT_HAND, _SHOWN), *[(one.title, index) for index, one in enumerate(live.examples)]],
                value=None,
                label="Start from",
            )
            question = gr.Textbox(label="Question", lines=4, max_lines=10, max_length=live.desk.limits.max_question)
            gold = gr.HTML(elem_classes="live-gold")
        with gr.Column(scale=2, min_width=300):
            asked = gr.Dropdown(
                names,
                value=[],
                multiselect=True,
                max_choices=MAX_COLUMNS,
                label="Ask up to six; without a choice, the checkpoints above",
            )
            with gr.Row():
                seed = gr.Number(value=0, precision=0, minimum=0, maximum=2**31 - 1, label="Seed", min_width=90)
                heat = gr.Number(value=0, minimum=0, maximum=2, step=0.1, label="Temperature", min_width=90)
                most = gr.Number(
                    value=min(512, live.desk.limits.max_tokens),
                    precision=0,
                    minimum=1,
                    maximum=live.desk.limits.max_tokens,
                    label="Most tokens",
                    min_width=90,
                )
            with gr.Row():
                ask = gr.Button("Ask", variant="primary", elem_id="live-ask", min_width=120)
                stop = gr.Button("Stop", elem_id="live-stop", interactive=False, min_width=120)
    columns = gr.HTML(note_html(_HOW), elem_id="live-columns")
    quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "concurrency_limit": None}
    on = _Handlers(live)
    example.input(on.choose, [bridge, example], [picture, question, gold], **quiet)
    ask.click(on.ask, [bridge, picture, question, asked, seed, heat, most], [columns, ask, stop], **quiet)
    stop.click(on.stop, None, None, **quiet)


def _picture() -> gr.HTML:
    """Where a picture is dropped, pasted or chosen; its value is the token that the server gave for it."""
    files = resources.files("vlm_rl").joinpath("assets")
    return gr.HTML(
        "",
        html_template=files.joinpath("live_picture.html").read_text(encoding="utf-8"),
        js_on_load=files.joinpath("live_picture.js").read_text(encoding="utf-8"),
        elem_id="live-picture",
    )


class _Handlers:
    """What the panel's events do. Methods, since gradio gives the request to what has a signature of its own."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def choose(self, query: str, index: int | None) -> tuple[str, str, str]:
        """(picture's token, question, the right answer in words) of an example, or of the problem shown."""
        try:
            if index == _SHOWN:
                return self._at_hand(query)
        except UserError as error:
            return "", "", error_html(str(error))
        if index is None or not 0 <= index < len(self._live.examples):
            return "", "", ""
        example = self._live.examples[index]
        return f"example-{index:04d}", example.question, gold_html(example.gold)

    def _at_hand(self, query: str) -> tuple[str, str, str]:
        example = self._live.around.problem(query)
        if example is None:
            raise UserError("there is no problem with one picture in the panel of problems: choose another")
        token = "" if example.image is None else self._live.pictures.add(example.image)
        return token, example.question, gold_html(example.gold)

    def ask(
        self,
        query: str,
        token: Any,
        text: Any,
        names: Any,
        seed: Any,
        temperature: Any,
        most: Any,
        request: gr.Request,
    ) -> Iterator[tuple[Any, Any, Any]]:
        """(columns, ask button, stop button) while the answers grow."""
        busy, free = _buttons(asking=True), _buttons(asking=False)
        try:
            settings = _settings(seed, temperature, most)
            image = self._live.pictures.get(token) if isinstance(token, str) and token else None
            question = Question(str(text or ""), image)
            asked = self._asked(query, list(names or ()))
            colors = self._live.around.colors(query, asked)
            views = self._live.desk.ask(str(request.session_hash), asked, question, settings)
            with closing(views):
                shown = ""
                for view in views:
                    page = view_html(view, settings, colors=colors)
                    if page != shown:
                        yield page, *(free if view.is_over else busy)
                    shown = page
            yield gr.skip(), *free
        except UserError as error:
            yield error_html(str(error)), *free

    def _asked(self, query: str, names: list[str]) -> list[str]:
        """The models chosen, else those of the checkpoints that the page shows."""
        asked = names or self._live.around.shown(query)
        if not asked:
            raise UserError("the checkpoints above have no weights on this machine: choose others to ask")
        return asked

    def stop(self, request: gr.Request) -> None:
        self._live.desk.cancel(str(request.session_hash))


def _buttons(*, asking: bool) -> tuple[Any, Any]:
    """The state of (ask, stop)."""
    return gr.update(interactive=not asking), gr.update(interactive=asking)


def _settings(seed: Any, temperature: Any, most: Any) -> Settings:
    """Raises UserError for what is no number; the desk looks at their ranges."""
    try:
        return Settings(seed=int(seed), temperature=float(temperature), max_tokens=int(most))
    except (TypeError, ValueError, OverflowError):
        raise UserError("seed, temperature and the most tokens must be numbers") from None
