"""The live panel: one question about one picture, asked to several models side by side while they answer.

    live = open_live(states, options)        # at start; live.uploads.routes() go into the application
    with gr.Tab("Live"):
        build_live(live, bridge)

A page chooses among the models that the operator named, never an address of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import gradio as gr

from vlm_rl.data.images import decode_image
from vlm_rl.demo.live.ask_queue import MAX_COLUMNS, AskQueue, AskState, Limits
from vlm_rl.demo.live.backends import (
    CheckpointBackend,
    EngineName,
    ModelCache,
    find_checkpoints,
    load_checkpoint,
    loading_note,
)
from vlm_rl.demo.live.context import LiveContext, LiveExample
from vlm_rl.demo.live.endpoints import Endpoint, EndpointBackend
from vlm_rl.demo.live.grading import grade_reply, problem_to_grade
from vlm_rl.demo.live.html import columns_html, gold_html, live_error_html, live_note_html
from vlm_rl.demo.live.replies import AskSettings, Backend, LiveQuestion
from vlm_rl.demo.panels.page_state import UNREADABLE, PageStates
from vlm_rl.demo.web.theme import asset
from vlm_rl.demo.web.uploads import Uploads
from vlm_rl.errors import UserError
from vlm_rl.run.directory import EvalResult, RunDirectory
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import IMAGE_MARKER, Grade, Problem

_NOBODY = (
    "There is no model to ask: these runs have no checkpoint on this machine. Keep checkpoints/ beside the run, or "
    "name a server at start: vlm-rl demo RUN --endpoint NAME=http://127.0.0.1:8000/v1,MODEL"
)
_HOW = "Choose a picture or an example, write a question, and ask. The answers grow here side by side."
_NUM_EXAMPLES = 12
_SHOWN_PROBLEM, _SHOWN = "the problem shown in Problems", -1


@dataclass(frozen=True, slots=True)
class Live:
    """What the panel needs, opened once for all pages."""

    queue: AskQueue
    uploads: Uploads
    examples: Sequence[LiveExample]
    context: LiveContext


@dataclass(frozen=True, slots=True)
class LiveOptions:
    """What the operator chooses at start."""

    endpoints: Sequence[Endpoint] = ()
    engine: EngineName = "transformers"
    max_loaded: int = 2  # checkpoints in memory; with vllm 1, since its engines do not share a process
    limits: Limits = Limits()  # noqa: RUF009  (frozen)


def open_live(states: PageStates, options: LiveOptions | None = None) -> Live:
    """Look for checkpoints and example problems; nothing is loaded before somebody asks."""
    options = options or LiveOptions()
    load = partial(load_checkpoint, engine=options.engine, max_tokens=options.limits.max_tokens)
    cache = ModelCache(load, max_loaded=options.max_loaded if options.engine == "transformers" else 1)
    checkpoints = find_checkpoints(states.library)
    system = (checkpoints[0].template if checkpoints else TEMPLATES["think_answer"]).system
    note = loading_note(options.engine)
    backends: list[Backend] = [CheckpointBackend(checkpoint, cache, note=note) for checkpoint in checkpoints]
    backends += [EndpointBackend(endpoint, system=system) for endpoint in options.endpoints]
    examples = read_examples([run.directory for run in states.library.runs.values()])
    uploads = Uploads([example.image or b"" for example in examples])
    context = LiveContext(states, {checkpoint.name: checkpoint.key for checkpoint in checkpoints})
    return Live(AskQueue(backends, limits=options.limits), uploads, examples, context)


def read_examples(runs: Sequence[RunDirectory]) -> list[LiveExample]:
    """Return the first problems with exactly one stored picture of each benchmark, at most 12 in all."""
    by_benchmark: dict[str, list[LiveExample]] = {}
    for run in runs:
        with suppress(*UNREADABLE):
            sets = run.config().data.eval
            for result in run.evals():
                if result.benchmark not in by_benchmark:
                    by_benchmark[result.benchmark] = _first_examples(result, sets)
    stored = [examples for examples in by_benchmark.values() if examples]
    share = _NUM_EXAMPLES // max(1, len(stored))
    return [example for examples in stored for example in examples[: max(1, share)]][:_NUM_EXAMPLES]


def _first_examples(result: EvalResult, sets: Sequence[str]) -> list[LiveExample]:
    examples: dict[str, LiveExample] = {}
    for row in result.first_rows(64, ["problem_id", "question", "image", "gold"]).to_pylist():
        if len(row["image"] or ()) == 1:
            with suppress(UserError):
                decode_image(row["image"][0], where=row["problem_id"])
                title = f"{result.benchmark} · {row['problem_id']}"
                question = str(row["question"] or "").replace(IMAGE_MARKER, "").strip()
                problem = problem_to_grade(row, result, sets)
                examples.setdefault(title, LiveExample(title, question, row["image"][0], problem))
        if len(examples) == _NUM_EXAMPLES:
            break
    return list(examples.values())


def build_live(live: Live, bridge: gr.HTML) -> None:
    """Make the panel's components and events in the caller's gradio context; `bridge` holds the page's query."""
    names = list(live.queue.backends)
    if not names:
        gr.HTML(live_note_html(_NOBODY))
        return
    with gr.Row(elem_classes="live-form"):
        with gr.Column(scale=1, min_width=220):
            picture = _upload()
        with gr.Column(scale=2, min_width=300):
            example = gr.Dropdown(
                [(_SHOWN_PROBLEM, _SHOWN), *[(example.title, index) for index, example in enumerate(live.examples)]],
                value=None,
                label="Start from",
            )
            question = gr.Textbox(label="Question", lines=4, max_lines=10, max_length=live.queue.limits.max_question)
            gold = gr.HTML(elem_classes="live-gold")
        with gr.Column(scale=2, min_width=300):
            asked = gr.Dropdown(
                names,
                value=[],
                multiselect=True,
                max_choices=MAX_COLUMNS,
                label="Models to ask, up to six (default: the checkpoints above)",
            )
            with gr.Row():
                seed = gr.Number(value=0, precision=0, minimum=0, maximum=2**31 - 1, label="Seed", min_width=90)
                temperature = gr.Number(value=0, minimum=0, maximum=2, step=0.1, label="Temperature", min_width=90)
                max_tokens = gr.Number(
                    value=min(512, live.queue.limits.max_tokens),
                    precision=0,
                    minimum=1,
                    maximum=live.queue.limits.max_tokens,
                    label="Max tokens",
                    min_width=90,
                )
            with gr.Row():
                ask = gr.Button("Ask", variant="primary", elem_id="live-ask", min_width=120)
                stop = gr.Button("Stop", elem_id="live-stop", interactive=False, min_width=120)
    columns = gr.HTML(live_note_html(_HOW), elem_id="live-columns")
    quiet: dict[str, Any] = {"show_progress": "hidden", "api_visibility": "private", "concurrency_limit": None}
    quiet["preprocess"] = False  # the queue checks what is asked, and says in words what is wrong
    on = _Handlers(live)
    example.input(on.choose, [bridge, example], [picture, question, gold], **quiet)
    ask.click(
        on.ask, [bridge, picture, question, asked, seed, temperature, max_tokens], [columns, ask, stop], **quiet
    )
    stop.click(on.stop, None, None, **quiet)


def _upload() -> gr.HTML:
    """Return where a picture is dropped, pasted or chosen; its value is the token that the server gave for it."""
    return gr.HTML(
        "",
        html_template=asset("upload.html"),
        js_on_load=asset("upload.js"),
        elem_id="live-picture",
    )


class _Handlers:
    """What the panel's events do.

    They are methods, since gradio passes the request only to functions whose own signature asks for it.
    """

    def __init__(self, live: Live) -> None:
        self._live = live

    def choose(self, query: str, index: int | str | None) -> tuple[str, str, str]:
        """Return (picture's token, question, right answer as HTML) of an example, or of the problem shown."""
        try:
            if index == _SHOWN:
                return self._shown_problem(query)
        except UNREADABLE as error:
            return "", "", live_error_html(str(error))
        if not isinstance(index, int) or not 0 <= index < len(self._live.examples):
            return "", "", ""
        example = self._live.examples[index]
        return f"example-{index:04d}", example.question, gold_html(example.gold)

    def _shown_problem(self, query: str) -> tuple[str, str, str]:
        example = self._live.context.problem(query)
        if example is None:
            raise UserError("the panel Problems shows none with exactly one picture: choose a different one")
        token = "" if example.image is None else self._live.uploads.add(example.image)
        return token, example.question, gold_html(example.gold)

    def ask(
        self,
        query: str,
        token: Any,
        text: Any,
        names: Any,
        seed: Any,
        temperature: Any,
        max_tokens: Any,
        request: gr.Request,
    ) -> Iterator[tuple[Any, Any, Any]]:
        """Yield (columns, ask button, stop button) while the answers grow."""
        busy, free = _buttons(asking=True), _buttons(asking=False)
        try:
            settings = _settings(seed, temperature, max_tokens)
            image = self._live.uploads.get(token) if isinstance(token, str) and token else None
            question = LiveQuestion(str(text or ""), image)
            asked = self._asked(query, list(names or ()))
            colors = self._live.context.colors(query, asked)
            states = self._live.queue.ask(str(request.session_hash), asked, question, settings)
            problem = self._problem_asked(query, question)
            grades: dict[str, Grade] = {}
            with closing(states):
                shown = ""
                for state in states:
                    if problem is not None:
                        grades |= self._new_grades(problem, state, grades)
                    page = columns_html(state, settings, colors=colors, grades=grades)
                    if page != shown:
                        yield page, *(free if state.is_over else busy)
                    shown = page
            yield gr.skip(), *free
        except UNREADABLE as error:
            yield live_error_html(str(error)), *free

    def _problem_asked(self, query: str, question: LiveQuestion) -> Problem | None:
        """Return the stored problem whose question and picture these are, so that its gold is the right answer."""
        shown = self._live.context.problem(query)
        known = [example for example in (shown, *self._live.examples) if example is not None]
        return next((e.problem for e in known if e.is_asked(question.text, question.image)), None)

    def _new_grades(self, problem: Problem, state: AskState, known: Mapping[str, Grade]) -> dict[str, Grade]:
        """Return the grade of each answer that has ended by itself and has none yet."""
        backends = self._live.queue.backends
        return {
            name: grade_reply(problem, reply.text, backends[name].template)
            for name, reply in zip(state.names, state.replies, strict=True)
            if name not in known and reply.phase == "ended" and reply.stop == "stop"
        }

    def _asked(self, query: str, names: list[str]) -> list[str]:
        """Return the models chosen, else those of the checkpoints that the page shows."""
        asked = names or self._live.context.shown(query)
        if not asked:
            raise UserError("the checkpoints above have no weights on this machine: choose others to ask")
        return asked

    def stop(self, request: gr.Request) -> None:
        self._live.queue.cancel(str(request.session_hash))


def _buttons(*, asking: bool) -> tuple[Any, Any]:
    """Return the state of (ask, stop)."""
    return gr.update(interactive=not asking), gr.update(interactive=asking)


def _settings(seed: Any, temperature: Any, max_tokens: Any) -> AskSettings:
    """Read the page's fields as numbers; the queue checks their ranges. Raises UserError for other text."""
    try:
        return AskSettings(seed=round(seed), temperature=float(temperature), max_tokens=round(max_tokens))
    except (TypeError, ValueError, OverflowError):
        raise UserError("seed, temperature and max tokens must be numbers") from None
