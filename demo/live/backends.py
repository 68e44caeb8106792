"""Ask checkpoints in this process, and keep a few of them in memory."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from vlm_rl.demo.live.replies import AskSettings, IsCancelled, LiveQuestion, Replies, Reply, Stop, count_reasoning
from vlm_rl.demo.numbers.library import Library, key_of
from vlm_rl.errors import UserError
from vlm_rl.run.directory import RunDirectory
from vlm_rl.templates import Template
from vlm_rl.types import IMAGE_MARKER, Problem

PUBLISH_SECONDS = 0.1  # between two states of a column
_MAX_PROMPT_TOKENS = 4096  # the longest prompt in the engine's context, image included
_LIVE_ID = "live"  # of the question, in the key of the noise

EngineName = Literal["auto", "vllm", "transformers"]


def loading_note(engine: EngineName) -> str:
    """Return a note for the time in which a checkpoint is loaded: with vLLM that may be minutes."""
    if engine == "transformers" or find_spec("vllm") is None:
        return ""
    return "vLLM starts: on a GPU it compiles a model, one to two minutes the first time"


@dataclass(frozen=True, slots=True)
class AskableCheckpoint:
    """A model folder and how its run puts questions to it."""

    name: str
    path: Path
    key: str  # of the evaluated checkpoint, if there is one
    template: Template
    min_pixels: int
    max_pixels: int


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A checkpoint that is in memory."""

    builder: Any  # PromptBuilder
    sampler: Any  # Sampler

    def close(self) -> None:
        """Give the memory back."""
        from vlm_rl.devices import free_gpu_memory

        self.sampler.close()
        free_gpu_memory()


def find_checkpoints(library: Library) -> list[AskableCheckpoint]:
    """Return every model folder that the runs and evaluations name, by run and step, with the page's labels.

    Folders that no longer exist and runs that cannot be read are left out.
    """
    checkpoints: list[AskableCheckpoint] = []
    for name, opened in library.runs.items():
        with suppress(UserError, OSError, ValueError):
            data = opened.directory.config().data
            for step, folder in sorted(_folders(opened.directory).items()):
                if (folder / "config.json").is_file():
                    limits = data.prompt_template, data.min_pixels, data.max_pixels
                    checkpoints.append(
                        AskableCheckpoint(library.label(name, step), folder, key_of(name, step), *limits)
                    )
    return checkpoints


def _folders(run: RunDirectory) -> dict[int, Path]:
    """Return the model of each step: what training started from, what was evaluated, the run's own checkpoints."""
    evaluated = {
        result.step: Path(str(result.summary["model"])) for result in run.evals() if "model" in result.summary
    }
    return {0: Path(run.config().model.path), **evaluated, **dict(run.checkpoints())}


def load_checkpoint(checkpoint: AskableCheckpoint, *, engine: EngineName, max_tokens: int) -> LoadedModel:
    """Open tokenizer and weights. Raises UserError for a folder that is refused or cannot be opened."""
    from transformers.utils.logging import disable_progress_bar

    from vlm_rl.data.prompts import PromptBuilder
    from vlm_rl.devices import default_device, model_dtype
    from vlm_rl.model_files.model_folder import check_model_folder, context_of
    from vlm_rl.model_files.weights import check_weights
    from vlm_rl.run.checkpoint import verify_model
    from vlm_rl.run.manifest import MANIFEST
    from vlm_rl.samplers.engine_settings import EngineSettings
    from vlm_rl.samplers.factory import check_loaded, make_sampler
    from vlm_rl.samplers.tags import settle_tags

    disable_progress_bar()
    check_model_folder(checkpoint.path)
    verify_model(checkpoint.path)
    check_weights(checkpoint.path)
    builder = PromptBuilder(
        checkpoint.path,
        template=checkpoint.template,
        min_pixels=checkpoint.min_pixels,
        max_pixels=checkpoint.max_pixels,
    )
    if (checkpoint.path / MANIFEST).is_file():
        builder.spell_tags_as(checkpoint.path)
    device, context = default_device(), min(context_of(builder.config), _MAX_PROMPT_TOKENS + max_tokens)
    sampler = make_sampler(
        engine,
        EngineSettings(
            model_path=str(checkpoint.path),
            builder=builder,
            max_model_len=context,
            batch_size=1,
            dtype=model_dtype(device),
            vllm_options={} if device.type == "cpu" else {"gpu_memory_utilization": 0.85},
        ),
    )
    check_loaded(sampler, str(checkpoint.path))
    settle_tags(builder, sampler, context=context, seed=0)
    return LoadedModel(builder, sampler)


class ModelCache:
    """At most `max_loaded` checkpoints in memory; the least recently used one makes room.

    A borrowed checkpoint belongs to its borrower alone, so a question to more than fit takes them in turn.
    """

    def __init__(self, load: Callable[[AskableCheckpoint], LoadedModel], *, max_loaded: int) -> None:
        assert max_loaded > 0
        self._load, self._max_loaded = load, max_loaded
        self._changed = threading.Condition()
        self._idle: OrderedDict[tuple[str, int], LoadedModel] = OrderedDict()  # the last used last
        self._busy: set[tuple[str, int]] = set()
        self._loading = threading.Lock()  # loaders of models share global state

    @contextmanager
    def borrow(self, checkpoint: AskableCheckpoint, *, is_cancelled: IsCancelled) -> Iterator[LoadedModel | None]:
        """Lend the checkpoint, loaded first where it is not; None if cancelled while waiting for a place."""
        key = _stamp(checkpoint.path)
        is_ours, loaded = self._claim(key, is_cancelled)
        if not is_ours:
            yield None
            return
        try:
            if loaded is None:
                with self._loading:
                    loaded = self._load(checkpoint)
            yield loaded
        finally:
            with self._changed:
                self._busy.discard(key)
                if loaded is not None:
                    self._idle[key] = loaded
                self._changed.notify_all()

    def close(self) -> None:
        """Drop what nobody uses."""
        with self._changed:
            while self._idle:
                self._drop_oldest()

    def _claim(self, key: tuple[str, int], is_cancelled: IsCancelled) -> tuple[bool, LoadedModel | None]:
        """Wait until the key is free and there is room: (whether it is ours now, the model if it is in memory)."""
        with self._changed:
            while not is_cancelled():
                if key not in self._busy and (key in self._idle or self._make_room()):
                    self._busy.add(key)
                    return True, self._idle.pop(key, None)
                self._changed.wait(0.1)
        return False, None

    def _make_room(self) -> bool:
        while self._idle and len(self._idle) + len(self._busy) >= self._max_loaded:
            self._drop_oldest()
        return len(self._busy) < self._max_loaded

    def _drop_oldest(self) -> None:
        _, loaded = self._idle.popitem(last=False)
        loaded.close()


class CheckpointBackend:
    """A Backend (demo/live/replies.py): a checkpoint here, with the prompt and banned ids of its training."""

    def __init__(self, checkpoint: AskableCheckpoint, cache: ModelCache, *, note: str = "") -> None:
        """Take what to say while the checkpoint is loaded."""
        self.name, self.template = checkpoint.name, checkpoint.template
        self._checkpoint, self._cache, self._note = checkpoint, cache, note

    def ask(self, question: LiveQuestion, settings: AskSettings, *, is_cancelled: IsCancelled) -> Replies:
        """See Backend.ask."""
        yield Reply("loading", note=self._note)
        with self._cache.borrow(self._checkpoint, is_cancelled=is_cancelled) as loaded:
            if loaded is None:
                yield Reply("ended", stop="cancelled")
            else:
                yield from _answer(loaded, question, settings, is_cancelled)


def _answer(loaded: LoadedModel, question: LiveQuestion, settings: AskSettings, is_cancelled: IsCancelled) -> Replies:
    from vlm_rl.samplers.base import SampleRequest, SamplingParams

    builder = loaded.builder
    prompt = builder.build(problem_of(question))
    params = SamplingParams(temperature=settings.temperature, max_tokens=settings.max_tokens, responses=1)
    ids: list[int] = []

    def state(stop: Stop) -> Reply:
        return Reply(
            "ended" if stop else "writing",
            text=builder.prefill + builder.decode(ids),
            tokens=len(ids),
            reasoning_tokens=count_reasoning(ids, builder.decode, prefill=builder.prefill),
            stop=stop,
        )

    published = 0.0
    with closing(loaded.sampler.stream(SampleRequest([prompt], params, seed=settings.seed, step=0))) as tokens:
        for token in tokens:
            ids.append(token)
            if is_cancelled():
                yield state("cancelled")
                return
            if time.monotonic() - published > PUBLISH_SECONDS:
                yield state("")
                published = time.monotonic()
    yield state("stop" if ids[-1] in builder.eos_ids else "length")


def problem_of(question: LiveQuestion) -> Problem:
    """Return the question as the prompt builder takes it. Raises UserError if markers and images disagree."""
    text, images = question.text, () if question.image is None else (question.image,)
    if text.count(IMAGE_MARKER) > len(images):
        raise UserError(f"the question says {IMAGE_MARKER} more often than there are pictures: take that out")
    if images and IMAGE_MARKER not in text:
        text = f"{IMAGE_MARKER}\n{text}"
    return Problem(_LIVE_ID, text, images, "", "text")


def _stamp(path: Path) -> tuple[str, int]:
    """Return a key that changes when a different checkpoint is put into the same folder."""
    newest = max((file.stat().st_mtime_ns for file in path.glob("*.safetensors")), default=0)
    return str(path.resolve()), newest
