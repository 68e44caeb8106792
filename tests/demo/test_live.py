"""The live panel: streamed answers are the sampler's, faults stay in their column, and hostile input at the door."""

from __future__ import annotations

import importlib.util
import io
import os
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("gradio", reason="the demo extra is not installed")

import gradio as gr
import httpx
import numpy as np
import torch
from fastapi import FastAPI
from PIL import Image

from tests.helpers.browser import open_page
from tests.helpers.chat_server import WORDS, ChatServer, chat_server
from tests.helpers.example_run import build_run, square_image
from tests.helpers.images import black_png
from tests.helpers.pretended_cuda import PretendedCuda
from tests.helpers.served import Served, free_port
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.demo.live.ask_queue import AskQueue, AskState, Broadcast, Limits
from vlm_rl.demo.live.backends import (
    AskableCheckpoint,
    CheckpointBackend,
    LoadedModel,
    ModelCache,
    find_checkpoints,
    load_checkpoint,
    loading_note,
    problem_of,
)
from vlm_rl.demo.live.endpoints import Endpoint, EndpointBackend, parse_endpoints
from vlm_rl.demo.live.html import columns_html
from vlm_rl.demo.live.panel import LiveOptions, build_live, open_live, read_examples
from vlm_rl.demo.live.replies import (
    AskSettings,
    IsCancelled,
    LiveQuestion,
    Replies,
    Reply,
    count_reasoning,
    split_growing,
)
from vlm_rl.demo.numbers.library import Library
from vlm_rl.demo.numbers.token_counts import TokenCounter
from vlm_rl.demo.panels.page_state import PageStates
from vlm_rl.demo.server import guarded
from vlm_rl.demo.web.uploads import MAX_BYTES, Uploads
from vlm_rl.errors import UserError
from vlm_rl.run.checkpoint import commit, saving
from vlm_rl.run.directory import RunDirectory
from vlm_rl.samplers.base import SampleRequest, SamplingParams
from vlm_rl.templates import TEMPLATES
from vlm_rl.toy.counting_squares import SQUARES
from vlm_rl.toy.tiny_model import build_tiny_model

PICTURE = square_image(["red", "blue", "green"] * 3)
QUESTION = LiveQuestion("Count the red squares.", PICTURE)
SHORT = AskSettings(seed=3, temperature=1.0, max_tokens=24)


def never() -> bool:
    return False


def checkpoint(path: Path, name: str = "tiny") -> AskableCheckpoint:
    return AskableCheckpoint(name, path, f"{name}@0", TEMPLATES["think_answer"], 3136, 100_352)


def last(states: Replies) -> Reply:
    return list(states)[-1]


def num_asking(queue: AskQueue) -> int:
    return len(queue._line)


# -- checkpoints ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded(tiny_model: Path) -> Iterator[LoadedModel]:
    model = load_checkpoint(checkpoint(tiny_model), engine="transformers", max_tokens=64)
    yield model
    model.close()


@pytest.fixture
def tiny(tiny_model: Path, loaded: LoadedModel) -> CheckpointBackend:
    return CheckpointBackend(checkpoint(tiny_model), ModelCache(lambda _: loaded, max_loaded=1))


@pytest.mark.parametrize("question", [QUESTION, LiveQuestion("2 + 2?")], ids=["picture", "text"])
@pytest.mark.parametrize("settings", [SHORT, replace(SHORT, temperature=0.0)], ids=["drawn", "greedy"])
def test_a_streamed_answer_is_the_samplers_own(tiny, loaded, tiny_model, question, settings):
    """Built here as training builds it, and generated in a batch, not streamed."""
    builder = PromptBuilder(tiny_model, template=TEMPLATES["think_answer"], min_pixels=3136, max_pixels=100_352)
    prompt = builder.build(problem_of(question))
    params = SamplingParams(settings.temperature, settings.max_tokens, 1)
    [[rollout]] = loaded.sampler.generate(SampleRequest([prompt], params, seed=settings.seed, step=0))
    reply = last(tiny.ask(question, settings, is_cancelled=never))
    assert (reply.text, reply.tokens) == (prompt.prefill + rollout.text, len(rollout.ids)) and reply.tokens > 1
    assert reply.stop == rollout.stop_reason and reply.phase == "ended" and reply.counted_by == "tokenizer"
    assert last(tiny.ask(question, settings, is_cancelled=never)) == reply, "the same seed, the same text"
    other = last(tiny.ask(question, replace(settings, seed=4), is_cancelled=never))
    assert (other == reply) is (settings.temperature == 0)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed")
def test_vllm_streams_what_it_samples(tiny_model: Path):
    cache = ModelCache(partial(load_checkpoint, engine="vllm", max_tokens=64), max_loaded=1)
    backend = CheckpointBackend(checkpoint(tiny_model), cache)
    with backend._cache.borrow(checkpoint(tiny_model), is_cancelled=never) as engine:
        assert engine is not None
        prompt = engine.builder.build(problem_of(QUESTION))
        [[rollout]] = engine.sampler.generate(SampleRequest([prompt], SamplingParams(1.0, 24, 1), seed=3, step=0))
    reply = last(backend.ask(QUESTION, SHORT, is_cancelled=never))
    assert reply.text == prompt.prefill + rollout.text and reply.tokens == len(rollout.ids)
    for _ in range(2):  # an answer that was left leaves nothing behind
        states = backend.ask(QUESTION, SHORT, is_cancelled=never)
        assert next(states).phase == "loading" and next(states).phase == "writing"
        states.close()
    assert last(backend.ask(QUESTION, SHORT, is_cancelled=never)) == reply
    backend._cache.close()


@pytest.mark.parametrize(
    ("engine", "is_installed", "is_told"),
    [("vllm", True, True), ("auto", True, True), ("auto", False, False), ("transformers", True, False)],
)
def test_who_waits_for_vllm_is_told_why(tiny_model, loaded, monkeypatch, engine, is_installed, is_told):
    monkeypatch.setattr("vlm_rl.demo.live.backends.find_spec", lambda name: object() if is_installed else None)
    cache = ModelCache(lambda _: loaded, max_loaded=1)
    backend = CheckpointBackend(checkpoint(tiny_model), cache, note=loading_note(engine))
    states = backend.ask(QUESTION, SHORT, is_cancelled=never)
    first, second = next(states), next(states)
    states.close()
    assert ("compiles a model" in first.note) is is_told and second.note == ""
    column = columns_html(AskState(0, (backend.name,), (first,)), SHORT, colors={backend.name: "red"}, grades={})
    assert ("compiles a model" in column) is is_told


def test_cancelling_ends_the_generation(tiny, loaded, monkeypatch):
    """No forward pass is made after it, neither for a cancelled answer nor for one whose reader has left."""
    passes = 0
    forward = type(loaded.sampler)._forward

    def counted(*arguments, **keywords):
        nonlocal passes
        passes += 1
        return forward(*arguments, **keywords)

    monkeypatch.setattr(type(loaded.sampler), "_forward", counted)
    many = replace(SHORT, max_tokens=64)
    states = tiny.ask(QUESTION, many, is_cancelled=lambda: passes >= 5)
    reply = last(states)
    assert reply.stop == "cancelled" and reply.tokens == passes == 5 and reply.text
    states = tiny.ask(QUESTION, many, is_cancelled=never)
    assert [next(states).phase, next(states).phase] == ["loading", "writing"]
    states.close()
    assert passes == 6


def test_a_question_that_does_not_fit_or_holds_markers_is_refused(tiny):
    with pytest.raises(UserError, match="more often than there are pictures"):
        last(tiny.ask(LiveQuestion("what <image>?"), SHORT, is_cancelled=never))
    with pytest.raises(UserError, match="above the sampler's context"):
        last(tiny.ask(QUESTION, replace(SHORT, max_tokens=5000), is_cancelled=never))
    assert problem_of(LiveQuestion("a <image> b", PICTURE)).question == "a <image> b"
    assert problem_of(QUESTION).question == "<image>\nCount the red squares."


class Model:
    """A sampler that notes when it is loaded and dropped."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name
        log.append(f"load {name}")

    def close(self) -> None:
        self.log.append(f"drop {self.name}")


def test_the_cache_drops_the_least_recently_used(tmp_path):
    log: list[str] = []
    cache = ModelCache(lambda wanted: LoadedModel(None, Model(log, wanted.name)), max_loaded=2)
    for name in "abacb":
        with cache.borrow(checkpoint(tmp_path / name, name), is_cancelled=never):
            pass
    assert log == ["load a", "load b", "drop b", "load c", "drop a", "load b"]
    with (
        cache.borrow(checkpoint(tmp_path / "b", "b"), is_cancelled=never),
        cache.borrow(checkpoint(tmp_path / "c", "c"), is_cancelled=never),
        cache.borrow(checkpoint(tmp_path / "b", "b"), is_cancelled=lambda: True) as none,
    ):
        assert none is None and len(log) == 6, "a borrowed one is its borrower's alone"
    cache.close()
    assert log[6:] == ["drop c", "drop b"]


def test_a_dropped_checkpoint_is_out_of_memory(tiny_model):
    model = load_checkpoint(checkpoint(tiny_model), engine="transformers", max_tokens=64)
    weight = weakref.ref(next(iter(model.sampler._model.parameters())))
    assert weight() is not None
    model.close()
    assert weight() is None


def test_a_gpu_has_the_room_of_a_dropped_checkpoint_back():
    log: list[str] = []
    model = LoadedModel(None, Model(log, "a"))
    with PretendedCuda(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "empty_cache", lambda: log.append("freed"))
        model.close()
    assert log == ["load a", "drop a", "freed"]


def test_a_checkpoint_that_does_not_load_gives_its_place_back(tmp_path):
    def fail(_: AskableCheckpoint) -> LoadedModel:
        raise UserError("broken")

    cache = ModelCache(fail, max_loaded=1)
    for _ in range(2):
        with pytest.raises(UserError, match="broken"), cache.borrow(checkpoint(tmp_path), is_cancelled=never):
            pass


def test_a_different_model_in_the_same_folder_is_loaded_anew(tmp_path):
    log: list[str] = []
    cache = ModelCache(lambda wanted: LoadedModel(None, Model(log, wanted.name)), max_loaded=2)
    weights = tmp_path / "model.safetensors"
    for when in (1, 1, 2):
        weights.touch()
        os.utime(weights, (when, when))
        with cache.borrow(checkpoint(tmp_path, "m"), is_cancelled=never):
            pass
    assert log == ["load m", "load m"]


def test_the_models_of_a_run_are_its_base_and_its_checkpoints(tmp_path, tiny_model):
    run = build_run(tmp_path / "luspo", steps=2, num_problems=3)
    assert find_checkpoints(Library([run.path])) == [], "models/tiny is not here"
    text = (run.path / "config.yaml").read_text()
    (run.path / "config.yaml").write_text(text.replace("models/tiny", str(tiny_model)))
    folder = run.path / "checkpoints" / "step-000002"
    folder.mkdir(parents=True)
    for name in ("config.json", "MANIFEST.json"):
        (folder / name).write_text("{}")
    checkpoints = find_checkpoints(Library([run.path]))
    assert [(known.name, known.key, known.path) for known in checkpoints] == [
        ("step 0", "luspo@0", tiny_model),
        ("step 2", "luspo@2", folder),
    ]
    assert (checkpoints[0].template, checkpoints[0].max_pixels) == (TEMPLATES["think_answer"], 1_003_520)
    broken = build_run(tmp_path / "broken", steps=1, num_problems=1)
    (broken.path / "config.yaml").write_text("algorithm: [")
    both = Library([broken.path, run.path])
    assert [known.name for known in find_checkpoints(both)] == ["luspo · step 0", "luspo · step 2"]
    assert list(both.labels("toy-test").values()) == [
        "luspo · step 0",
        "luspo · step 1 · best",
        "luspo · step 2",
    ]
    examples = read_examples([RunDirectory(tmp_path / "none"), run])
    assert (
        len(examples) == 3 and examples[0].title.startswith("toy-test · ") and "<image>" not in examples[0].question
    )


def test_an_example_may_have_no_question(tmp_path):
    run = build_run(tmp_path / "run", steps=1, num_problems=2, eval_steps=(0,))
    [result] = run.evals()
    rows = [row | {"question": None} for row in result.rows().to_pylist()]
    run.write_eval(result.benchmark, 0, rows, result.summary)
    assert [example.question for example in read_examples([run])] == ["", ""]


# -- reasoning and answer ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "grows", "ended"),
    [
        ("", (None, ""), (None, "")),
        ("<thi", ("", ""), (None, "<thi")),
        ("<think>a", ("a", ""), ("a", "")),
        ("<think>a</", ("a", ""), ("a</", "")),
        ("<think>a</think>b", ("a", "b"), ("a", "b")),
        ("a \ufffd", (None, "a"), (None, "a \ufffd")),
        ("1 < 2", (None, "1 < 2"), (None, "1 < 2")),
    ],
)
def test_the_parts_of_a_text_that_grows(text, grows, ended):
    assert split_growing(text, is_over=False) == grows
    assert split_growing(text, is_over=True) == ended


def test_reasoning_is_counted_in_the_models_own_tokens(loaded):
    builder = loaded.builder
    head, tail = "<think>one two three</think>", "<answer>7</answer>"
    ids = builder.encode_response(head + tail).tolist()
    expected = len(builder.tokenizer.encode(head, add_special_tokens=False))
    assert count_reasoning(ids, builder.decode) == expected < len(ids)
    assert count_reasoning(ids[: expected - 1], builder.decode) == expected - 1, "an open block is all reasoning"
    counter = TokenCounter(Path(builder.tokenizer.name_or_path) / "tokenizer.json")
    stored = counter.split([head + tail], np.array([len(ids)]))
    assert stored.reasoning_R.tolist() == [expected], "the browser of saved results counts alike"
    assert count_reasoning(builder.encode_response("no block").tolist(), builder.decode) == 0
    assert count_reasoning([1, 2, 3], lambda some: "abc"[: len(some)], prefill="<think>") == 3
    letters = "x</think>y</think>z"
    assert count_reasoning(range(len(letters)), lambda some: letters[: len(some)]) == letters.index("z")


# -- endpoints ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server() -> Iterator[ChatServer]:
    with chat_server() as running:
        yield running


def endpoint(server: ChatServer, behaviour: str, *, model: str = "m", key: str = "") -> EndpointBackend:
    system = TEMPLATES["think_answer"].system
    return EndpointBackend(Endpoint("far", server.url(behaviour), model, key), system=system)


def test_an_endpoint_is_asked_the_same_and_streams(server):
    reply = last(endpoint(server, "good", model="").ask(QUESTION, SHORT, is_cancelled=never))
    assert reply.text == "".join(WORDS) and (reply.tokens, reply.counted_by, reply.stop) == (9, "server", "stop")
    thought = len("onetwo three ")  # the characters' share of 9 tokens: 13 of 13 + 12
    assert (
        reply.reasoning_tokens == round(9 * thought / (thought + len("so \\boxed{3}"))) and not reply.is_split_exact
    )
    body = server.asked[-1]
    assert (body["model"], body["seed"], body["temperature"], body["max_tokens"]) == ("only", 3, 1.0, 24)
    assert body["repetition_penalty"] == 1.0 and body["messages"][0]["content"] == TEMPLATES["think_answer"].system
    picture, text = body["messages"][1]["content"]
    assert text == {"type": "text", "text": QUESTION.text}
    assert picture["image_url"]["url"].startswith("data:image/png;base64,iVBOR"), "the pixels, and no address"


def test_half_of_a_surrogate_pair_is_a_question_mark_on_the_page(server):
    reply = last(endpoint(server, "half").ask(QUESTION, SHORT, is_cancelled=never))
    page = columns_html(AskState(0, ["a"], [reply]), SHORT, colors={"a": "red"}, grades={})
    assert reply.text == "<think>a\ud800</think>4" and "a?" in page and page.encode()


def test_reasoning_that_a_server_keeps_apart(server):
    reply = last(endpoint(server, "apart").ask(QUESTION, SHORT, is_cancelled=never))
    assert split_growing(reply.text, is_over=True) == ("hm <b>", "four")
    assert (reply.tokens, reply.reasoning_tokens, reply.is_split_exact, reply.stop) == (12, 10, True, "length")


def test_counts_that_cannot_be_are_not_believed(server):
    reply = last(endpoint(server, "counts").ask(QUESTION, SHORT, is_cancelled=never))
    assert (reply.tokens, reply.counted_by, reply.stop) == (1, "estimate", "stop")


def test_a_server_of_the_bare_standard_is_asked_again_and_the_column_says_so(server):
    reply = last(endpoint(server, "plain").ask(QUESTION, SHORT, is_cancelled=never))
    assert reply.stop == "stop" and "own top-k and repetition penalty" in reply.note
    assert "repetition_penalty" not in server.asked[-1] and "repetition_penalty" in server.asked[-2]


@pytest.mark.parametrize(
    ("behaviour", "model", "text", "note"),
    [
        ("refuse", "m", "", "the server answered 400: no <i>such</i> model"),
        ("fault", "m", "half", "the server reports: engine died with Bearer ***"),
        ("two", "", "", "the server does not name one model (2 listed): say which with --endpoint far=URL,model"),
    ],
)
def test_a_servers_fault_is_reported_and_what_came_is_kept(server, behaviour, model, text, note):
    backend = endpoint(server, behaviour, model=model, key="sesame")
    reply = last(backend.ask(QUESTION, SHORT, is_cancelled=never))
    assert (reply.phase, reply.text, reply.stop) == ("failed", text, "") and reply.note.startswith(note)
    assert "sesame" not in repr(reply)


def test_an_answer_is_cancelled_and_left(server):
    states = endpoint(server, "endless").ask(QUESTION, SHORT, is_cancelled=never)
    assert [next(states).phase, next(states).phase] == ["loading", "writing"]
    states.close()
    asked = iter([False] * 8)
    reply = last(endpoint(server, "endless").ask(QUESTION, SHORT, is_cancelled=lambda: next(asked, True)))
    assert (reply.phase, reply.stop) == ("ended", "cancelled") and reply.text.startswith("and and")


@pytest.mark.parametrize(
    ("words", "keys", "message"),
    [
        (["http://127.0.0.1/v1"], [], "not a plain http|NAME=URL"),
        (["a=ftp://h/v1"], [], "not a plain http"),
        (["a=http://u:sesame@h/v1"], [], "a key goes into an environment variable"),
        (["a=http://h/v1?key=sesame"], [], "--endpoint a=URL is not a plain http"),
        (["a=http://h:99999/v1"], [], "not a plain http"),
        (["a=http://h/v1", "a=http://h/v1"], [], "is taken"),
        (["<b>=http://h/v1"], [], "not made of letters"),
        (["a=http://h/v1"], ["b=HOME"], "no --endpoint of this name"),
        (["a=http://h/v1"], ["a=NOT_SET_AT_ALL"], "--endpoint-key a: .* NOT_SET_AT_ALL is not set"),
        (["a=http://h/v1"], ["a=sk-sesame"], "--endpoint-key a must be the name of an environment variable"),
        (["a=http://h/v1"], ["sk-sesame"], "must have the form NAME=VARIABLE"),
    ],
)
def test_endpoints_that_cannot_be_meant(words, keys, message):
    with pytest.raises(UserError, match=message) as caught:
        parse_endpoints(words, keys)
    assert "sesame" not in str(caught.value)


def test_endpoints_as_the_operator_names_them(monkeypatch):
    monkeypatch.setenv("TEACHER_KEY", "sesame")
    teacher, local = parse_endpoints(
        ["teacher=https://h/v1/,Qwen/Qwen2.5-VL", "local=http://[::1]:8000/v1"], ["teacher=TEACHER_KEY"]
    )
    assert (teacher.url, teacher.model, teacher.key) == ("https://h/v1", "Qwen/Qwen2.5-VL", "sesame")
    assert (local.url, local.model, local.key) == ("http://[::1]:8000/v1", "", "") and "sesame" not in repr(teacher)


def wait_for(condition: Callable[[], bool], *, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


# -- one at a time --------------------------------------------------------------------------------------


class Teller:
    """A backend that says words as fast as it is told to."""

    def __init__(self, name: str, words: Sequence[str] = ("<think>", "hm", "</think>", "4"), *, pause: float = 0.0):
        self.name, self.words, self.pause = name, words, pause
        self.said = 0

    def ask(self, question: LiveQuestion, settings: AskSettings, *, is_cancelled: IsCancelled) -> Replies:
        for count in range(1, min(len(self.words), settings.max_tokens) + 1):
            if is_cancelled():
                yield Reply("ended", "".join(self.words[: count - 1]), count - 1, stop="cancelled")
                return
            self.said += 1
            time.sleep(self.pause)
            yield Reply("writing", "".join(self.words[:count]), count, 1)
        stop = "stop" if settings.max_tokens >= len(self.words) else "length"
        yield Reply("ended", "".join(self.words[: settings.max_tokens]), count, 1, stop=stop)


class Broken(Teller):
    def ask(self, question: LiveQuestion, settings: AskSettings, *, is_cancelled: IsCancelled) -> Replies:
        yield Reply("writing", "I", 1)
        raise RuntimeError("<b>no memory</b>\nsecond line")


def slow_teller(name: str) -> Teller:
    return Teller(name, ["<think>", *["word "] * 2000], pause=0.02)


def test_one_broken_column_does_not_disturb_the_others(capfd):
    queue = AskQueue([Teller("a"), Broken("b"), Teller("c")])
    view = list(queue.ask("page", ["a", "b", "c"], LiveQuestion("4?"), SHORT))[-1]
    assert [reply.phase for reply in view.replies] == ["ended", "failed", "ended"] and view.is_over
    assert view.replies[0].text == view.replies[2].text == "<think>hm</think>4"
    assert view.replies[1].text == "I" and view.replies[1].note == "RuntimeError: <b>no memory</b>"
    assert "Traceback" in capfd.readouterr().err, "the operator sees why"
    wait_for(lambda: num_asking(queue) == 0)


class Lingering(Teller):
    """Closes its connection for a while after its last word."""

    def ask(self, question: LiveQuestion, settings: AskSettings, *, is_cancelled: IsCancelled) -> Replies:
        yield from super().ask(question, settings, is_cancelled=is_cancelled)
        time.sleep(0.3)


def test_a_page_that_is_told_the_end_may_ask_again_at_once():
    queue = AskQueue([Lingering("a")])
    told = queue.ask("page", ["a"], LiveQuestion("?"), SHORT)
    assert next(state for state in told if state.is_over).replies[0].stop == "stop"
    assert list(queue.ask("page", ["a"], LiveQuestion("?"), SHORT))[-1].replies[0].stop == "stop"


def test_pages_wait_in_line_and_one_page_asks_once(monkeypatch):
    first, second = slow_teller("a"), Teller("b")
    queue = AskQueue([first, second], limits=Limits(max_waiting=1))
    ours = queue.ask("one", ["a"], LiveQuestion("?"), replace(SHORT, max_tokens=4000))
    assert next(ours).ahead == 0
    with pytest.raises(UserError, match="still asking"):
        next(queue.ask("one", ["b"], LiveQuestion("?"), SHORT))
    theirs = queue.ask("two", ["b"], LiveQuestion("?"), SHORT)
    assert next(theirs).ahead == 1 and second.said == 0
    with pytest.raises(UserError, match="in line already"):
        next(queue.ask("three", ["b"], LiveQuestion("?"), SHORT))
    queue.cancel("one")
    assert list(ours)[-1].replies[0].stop == "cancelled"
    said = first.said
    assert list(theirs)[-1].replies[0].stop == "stop"
    wait_for(lambda: num_asking(queue) == 0)
    assert first.said == said < 4000
    waiting, running = (queue.ask(page, ["a"], LiveQuestion("?"), replace(SHORT, max_tokens=4000)) for page in "xy")
    assert next(running).ahead == 0 and next(waiting).ahead == 1
    queue.cancel("x")
    assert list(waiting)[-1].replies[0].stop == "cancelled", "one that waits can be cancelled too"
    running.close()  # the page is gone
    wait_for(lambda: num_asking(queue) == 0)


class Deaf(Teller):
    """Begins to answer, and hangs until the test is over, cancelled or not."""

    def __init__(self, name: str, end: threading.Event) -> None:
        super().__init__(name)
        self._end = end

    def ask(self, question: LiveQuestion, settings: AskSettings, *, is_cancelled: IsCancelled) -> Replies:
        yield Reply("writing", "I", 1)
        self._end.wait()


class Clock:
    """Stands still until the first column has ended of the page whose turn it is, however busy the machine is."""

    sleep = staticmethod(time.sleep)

    def __init__(self, queue: AskQueue) -> None:
        self._queue, self._read, self._stood = queue, time.monotonic(), 0.0

    def monotonic(self) -> float:
        before, self._read = self._read, time.monotonic()
        if self._queue._line and not self._queue._line[0][1]._replies[0].is_over:
            self._stood += self._read - before
        return self._read - self._stood


def test_no_page_waits_for_ever_for_a_model_that_hangs(monkeypatch):
    """The page that asked it keeps what the others said; the next page is told, since two questions never compute."""
    end = threading.Event()
    queue = AskQueue([Teller("a"), Deaf("b", end)], limits=Limits(max_seconds=0.3))
    monkeypatch.setattr("vlm_rl.demo.live.ask_queue.time", Clock(queue))
    ours = list(queue.ask("one", ["a", "b"], LiveQuestion("?"), SHORT))[-1]
    assert [(reply.phase, reply.text) for reply in ours.replies] == [("ended", "<think>hm</think>4"), ("failed", "I")]
    assert ours.replies[1].note == "no end after 0:00: stopped"
    with pytest.raises(UserError, match=r"ahead of yours has not ended for 0:01: its model hangs"):
        list(queue.ask("two", ["a"], LiveQuestion("?"), SHORT))
    end.set()
    wait_for(lambda: num_asking(queue) == 0)
    assert list(queue.ask("two", ["a"], LiveQuestion("?"), SHORT))[-1].replies[0].phase == "ended"


def test_nothing_is_generated_for_a_page_that_is_gone(monkeypatch):
    teller = slow_teller("a")
    broadcast = Broadcast([teller], LiveQuestion("?"), replace(SHORT, max_tokens=4000))
    broadcast.start()
    wait_for(lambda: teller.said > 0)
    monkeypatch.setattr("vlm_rl.demo.live.ask_queue.ABANDONED_SECONDS", 0.2)
    wait_for(lambda: broadcast.is_over)
    assert teller.said < 200


@pytest.mark.parametrize(
    ("names", "text", "changes", "message"),
    [
        ([], "?", {}, "choose 1 to 6"),
        (["http://evil/v1"], "?", {}, "of the models in the list"),
        (["a", "a"], "?", {}, "choose 1 to 6"),
        (["a"], "  ", {}, "write a question"),
        (["a"], "x" * 101, {}, "101 characters; at most 100"),
        (["a"], "?", {"max_tokens": 65}, "1 to 64 tokens, not 65"),
        (["a"], "?", {"temperature": -1.0}, "between 0 and 2"),
        (["a"], "?", {"temperature": float("nan")}, "between 0 and 2"),
        (["a"], "?", {"seed": -1}, "the seed must"),
    ],
)
def test_what_a_page_may_not_ask(names, text, changes, message):
    queue = AskQueue([Teller("a")], limits=Limits(max_tokens=64, max_question=100))
    with pytest.raises(UserError, match=message):
        next(queue.ask("page", names, LiveQuestion(text), replace(SHORT, **changes)))
    assert num_asking(queue) == 0


def test_two_models_of_one_name_are_the_operators_mistake():
    with pytest.raises(UserError, match="the same name"):
        AskQueue([Teller("a"), Teller("a")])


def test_settings_and_estimates_are_told():
    estimated = Reply("writing", "x", 7, 2, "estimate", is_split_exact=False)
    page = columns_html(AskState(0, ["a"], [estimated]), SHORT, colors={"a": "red"}, grades={})
    assert "seed 3 · temperature 1 · at most 24 tokens" in page
    assert "≈ 7" in page and "reasoning ≈ 2 · answer ≈ 5" in page and "estimated" in page


# -- pictures -----------------------------------------------------------------------------------------


def encoded(size: tuple[int, int], kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, "teal").save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty"),
        (b"GIF89a" + bytes(20), "not a PNG, JPEG or WEBP"),
        (b"<svg onload=alert(1)>", "not a PNG, JPEG or WEBP"),
        (black_png(20_000), "far more pixels"),
        (black_png(9000), "9000x9000"),
        (encoded((56, 56))[:60], "truncated"),
        (encoded((64, 64), "JPEG")[:300], "cannot be decoded"),
        (encoded((10, 10)), "each side must have 28 pixels"),
        (encoded((6000, 28)), "aspect"),
    ],
    ids=["empty", "gif", "svg", "bomb", "9000", "cut", "half-jpeg", "tiny", "strip"],
)
def test_hostile_pictures_are_refused_at_the_door(data, message):
    pictures = Uploads()
    with pytest.raises(UserError, match=f"your picture.*{message}"):
        pictures.add(data)


def test_pictures_stay_in_memory_for_a_while_and_lose_their_metadata(monkeypatch):
    pictures = Uploads([PICTURE])
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "a secret place"  # turned by a quarter, with a description
    data = encoded((60, 90), "JPEG", exif=exif)
    token = pictures.add(data)
    assert b"a secret place" in data and b"a secret place" not in pictures.preview(token)
    assert Image.open(io.BytesIO(pictures.preview(token))).size == (90, 60)
    assert pictures.get("example-0000") == PICTURE
    tokens = [pictures.add(encoded((30, 30))) for _ in range(16)]
    assert pictures.get(tokens[0])
    with pytest.raises(UserError, match="choose it again"):
        pictures.get(token)
    monkeypatch.setattr("vlm_rl.demo.web.uploads._KEPT_SECONDS", -1.0)
    with pytest.raises(UserError, match="choose it again"):
        pictures.get(tokens[0])


# -- the panel in a browser -----------------------------------------------------------------------------


class Page(Served):
    """The panel alone, behind the demo's guard."""

    def __init__(self, live) -> None:
        with gr.Blocks(title="live", analytics_enabled=False) as blocks, gr.Tab("Live"):
            build_live(live, gr.HTML("", visible=False))
        self.queue = live.queue
        super().__init__(guarded(blocks, FastAPI(openapi_url=None, routes=list(live.uploads.routes()))))


@pytest.fixture(scope="module")
def page(tiny_model, server, tmp_path_factory) -> Iterator[Page]:
    """Two tiny models of one run, a third whose weights are cut, and a server that never stops."""
    folder = tmp_path_factory.mktemp("live")
    run = build_run(folder / "luspo", steps=2, num_problems=4)
    text = (run.path / "config.yaml").read_text()
    (run.path / "config.yaml").write_text(text.replace("models/tiny", str(tiny_model)))
    second = build_tiny_model(folder / "other", seed=1, tokenizer_texts=SQUARES.tokenizer_texts())
    root = run.path / "checkpoints"
    for step in (1, 2):
        with saving(root, step=step) as work:
            shutil.copytree(second, work, dirs_exist_ok=True)
            commit(work, root, step=step, info={})
    weights = run.path / "checkpoints" / "step-000002" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    endpoints = [Endpoint(name, server.url(name), "m") for name in ("endless", "good", "hostile", "broken")]
    endpoints.append(Endpoint("down", f"http://127.0.0.1:{free_port()}/v1", "m"))
    shown = Page(open_live(PageStates(Library([run.path])), LiveOptions(endpoints)))
    yield shown
    shown.stop()


def choose(page, *names: str) -> None:
    """Ask exactly these."""
    box = page.get_by_label("Models to ask")
    for _ in range(page.locator(".live-form .token").count()):
        box.press("Backspace")
    for name in names:
        box.click()
        page.get_by_role("option", name=name, exact=True).click()
    page.keyboard.press("Escape")


def fill(page, *, tokens: int, temperature: float = 0.0, seed: int = 0) -> None:
    page.get_by_label("Max tokens").fill(str(tokens))
    page.get_by_label("Temperature").fill(str(temperature))
    page.get_by_label("Seed").fill(str(seed))


@pytest.mark.slow
def test_two_checkpoints_answer_side_by_side_and_the_broken_one_says_so(page):
    with open_page(page.url) as visit:
        tab = visit.page
        tab.wait_for_selector("#live-ask")
        tab.get_by_label("Start from").click()
        tab.get_by_role("option").first.click()
        tab.wait_for_selector("#live-picture img:not([hidden])")
        assert "red squares" in tab.get_by_label("Question").input_value()
        choose(tab, "step 0", "step 1", "step 2")
        fill(tab, tokens=40, temperature=1.0, seed=5)
        tab.click("#live-ask")
        tab.wait_for_selector(".live-status b:text-is('done')")
        assert tab.locator(".live-card .title").all_inner_texts() == ["step 0", "step 1", "step 2"]
        phases = [card.get_attribute("class").split()[-1] for card in tab.locator("article.live-card").all()]
        assert phases == ["ended", "ended", "failed"]
        assert "seed 5 · temperature 1 · at most 40 tokens" in tab.inner_text(".live-status")
        assert "step 2" not in tab.inner_text(".live-card.failed .live-note") and tab.inner_text(
            ".live-card.failed .live-note"
        )
        counts = [int(text) for text in tab.locator(".live-card.ended .live-counts b").all_inner_texts()]
        assert len(counts) == 2 and all(0 < count <= 40 for count in counts)
        texts = [card.inner_text() for card in tab.locator(".live-card.ended").all()]
        for seed in (6, 5):
            fill(tab, tokens=40, temperature=1.0, seed=seed)
            tab.click("#live-ask")
            tab.wait_for_selector(f".live-status:has-text('seed {seed}') b:text-is('done')")
        assert [card.inner_text() for card in tab.locator(".live-card.ended").all()] == texts, (
            "the same seed, the same text"
        )
        assert all(request.startswith(page.url) for request in visit.requests)
        assert visit.failures == [] and tab.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.slow
def test_servers_that_are_down_broken_or_hostile_harm_no_other_column(page):
    with open_page(page.url) as visit:
        tab = visit.page
        tab.wait_for_selector("#live-ask")
        tab.get_by_label("Question").fill("How many?")
        names = ["down", "broken", "hostile", "good"]
        choose(tab, *names)
        fill(tab, tokens=40)
        tab.click("#live-ask")
        tab.wait_for_selector(".live-status b:text-is('done')")
        cards = dict(zip(names, tab.locator("article.live-card").all(), strict=True))
        phases = [card.get_attribute("class").split()[-1] for card in cards.values()]
        assert phases == ["failed", "failed", "ended", "ended"]
        assert "connection failed" in cards["down"].inner_text()
        assert "answered 500" in cards["broken"].inner_text()
        assert "3" in cards["good"].inner_text()
        shown = cards["hostile"].inner_text()
        assert "<script>window.pwned=1</script>" in shown and "onerror=window.pwned=1" in shown
        assert tab.evaluate("window.pwned") is None
        assert cards["hostile"].locator("script, img, a[href^='javascript'], iframe").count() == 0
        assert all(request.startswith(page.url) for request in visit.requests) and visit.failures == []


@pytest.mark.slow
def test_stop_ends_what_is_generated_and_so_does_leaving(page, server):
    with open_page(page.url) as visit:
        tab = visit.page
        tab.wait_for_selector("#live-ask")
        tab.get_by_label("Question").fill("Tell me everything.")
        choose(tab, "endless", "step 0")
        fill(tab, tokens=4000, temperature=1.0)
        broken = server.broken.count("endless")
        endless_writes = "document.querySelector('.live-card')?.classList.contains('writing')"
        tab.click("#live-ask")
        tab.wait_for_function(endless_writes)
        tab.wait_for_function("Number(document.querySelector('.live-counts b').innerText.replace(/\\D/g, '')) > 20")
        assert tab.is_disabled("#live-ask")
        tab.click("#live-stop")
        tab.wait_for_selector(".live-status b:text-is('done')")
        endless, untrained = tab.locator(".live-card .chip").all_inner_texts()
        assert endless == "stopped by you"
        assert untrained in ("stopped by you", "finished"), "which may draw its end before the click arrives"
        assert "≈" in tab.locator(".live-counts").first.inner_text(), "an estimate is called one"
        wait_for(lambda: num_asking(page.queue) == 0)
        wait_for(lambda: server.broken.count("endless") == broken + 1)
        assert tab.is_enabled("#live-ask") and tab.is_disabled("#live-stop")
        tab.click("#live-ask")
        tab.wait_for_function(endless_writes)
        assert num_asking(page.queue) == 1
    wait_for(lambda: server.broken.count("endless") == broken + 2, seconds=60)  # the page is gone
    wait_for(lambda: num_asking(page.queue) == 0, seconds=60)


@pytest.mark.slow
def test_hostile_uploads_are_refused_in_words_and_a_good_one_is_shown(page, tmp_path):
    bad = {
        "bomb.png": black_png(20_000), "shot.png": black_png(9000),
        "page.png": b"<html>", "big.png": bytes(9 * 2**20),
    }  # fmt: skip
    with open_page(page.url) as visit:
        tab = visit.page
        tab.wait_for_selector("#live-ask")
        told = ["far more pixels", "9000x9000", "not a PNG", "larger than 8 MiB"]
        for (name, data), words in zip(bad.items(), told, strict=True):
            (tmp_path / name).write_bytes(data)
            tab.set_input_files("#live-picture input", tmp_path / name)
            tab.wait_for_function(
                f"document.querySelector('#live-picture .live-error').innerText.includes('{words}')"
            )
            assert tab.locator("#live-picture img[hidden]").count() == 1
        (tmp_path / "good.jpg").write_bytes(encoded((120, 80), "JPEG"))
        tab.set_input_files("#live-picture input", tmp_path / "good.jpg")
        tab.wait_for_selector("#live-picture img:not([hidden])")
        tab.wait_for_function("document.querySelector('#live-picture img').naturalWidth == 120")
        tab.get_by_label("Question").fill("<script>window.pwned = 1</script>")
        choose(tab, "good", "step 0")
        fill(tab, tokens=8)
        tab.click("#live-ask")
        tab.wait_for_selector(".live-status b:text-is('done')")
        assert tab.locator(".live-card .chip").first.inner_text() == "finished"
        tab.click(".live-clear")
        tab.wait_for_selector("#live-picture .live-hint:not([hidden])")
        assert tab.evaluate("window.pwned") is None and visit.failures == []
        assert all(request.startswith(page.url) for request in visit.requests)


def test_the_pictures_routes_are_guarded(page):
    with httpx.Client(base_url=page.url, trust_env=False) as client:
        picture = encoded((40, 40))
        assert "token" in client.post("live/picture", content=picture).json()
        assert (
            client.post("live/picture", content=picture, headers={"Origin": "http://evil.example"}).status_code == 403
        )
        assert client.post("live/picture", content=picture, headers={"Host": "evil.example"}).status_code == 403
        assert client.post("live/picture", content=bytes(MAX_BYTES + 1)).status_code == 413
        assert client.post("live/picture", content=iter([picture])).status_code == 413, "chunked: of unknown size"
        assert client.post("gradio_api/upload", content=picture).status_code == 404
        for name in ("example-9999", "..%2f..%2fetc%2fpasswd", "x" * 50):
            assert client.get(f"live/picture/{name}").status_code == 404
        shown = client.get("live/picture/example-0000")
        assert shown.status_code == 200 and shown.headers["content-type"] == "image/jpeg"
        assert shown.headers["x-content-type-options"] == "nosniff"
