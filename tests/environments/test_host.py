"""Whatever an environment does, an episode gets an answer, within the limits of tokens, images and time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.episodes import png
from vlm_rl.config import EnvironmentConfig
from vlm_rl.data.images import open_packed
from vlm_rl.data.prompts import PromptBuilder, StartError
from vlm_rl.data.turns import Shown, TurnWriter, open_images
from vlm_rl.environments.calls import written
from vlm_rl.environments.host import EpisodeHost, HostedEpisode
from vlm_rl.environments.script import play
from vlm_rl.errors import UserError
from vlm_rl.samplers.base import TurnAnswer
from vlm_rl.templates import TEMPLATES
from vlm_rl.types import EpisodeStart, Observation, Problem

OWN = "tests.helpers.own_environment"
PICTURE = png(np.random.default_rng(0), 168, 168)
PROBLEM = Problem("p", "<image>How many?", (PICTURE,), "3", "integer")


@pytest.fixture(scope="module")
def builder(tiny_model: Path) -> PromptBuilder:
    return PromptBuilder(tiny_model, template=TEMPLATES["think_answer"])


@contextmanager
def hosted(builder: PromptBuilder, name: str, **settings: Any) -> Iterator[EpisodeHost]:
    own = "." in name
    config = EnvironmentConfig(name=name, allow_class=own, **{"workers": 1, **settings})
    host = EpisodeHost(config, builder, grade=lambda problem, text: f"boxed{{{problem.answer}}}" in text)
    try:
        yield host
    finally:
        host.close()
        builder.instructions = ""


@pytest.fixture(scope="module")
def bad(builder: PromptBuilder) -> Iterator[EpisodeHost]:
    with hosted(builder, f"{OWN}.Bad", timeout=1.5, max_observed_tokens=200) as host:
        yield host


@pytest.fixture(scope="module")
def bad_start(builder: PromptBuilder) -> Iterator[EpisodeHost]:
    with hosted(builder, f"{OWN}.BadBeginning", timeout=1.5, max_observed_tokens=200) as host:
        yield host


def builder_pngs(builder: PromptBuilder, pictures: Sequence[bytes]) -> tuple[bytes, ...]:
    return TurnWriter(builder).fit(pictures).packed


def opened(host: EpisodeHost, builder: PromptBuilder, g: int = 0, *, step: int = 0) -> HostedEpisode:
    return host.episodes([PROBLEM], seed=0, step=step).open(0, g, builder.build(PROBLEM))


def say(episode: HostedEpisode, builder: PromptBuilder, text: str) -> TurnAnswer:
    ids = builder.tokenizer.encode(text, add_special_tokens=False)
    return episode.answer(text, np.array([*ids, builder.eos_ids[0]], np.int32)).result(timeout=60)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("raise", "ValueError: no such thing"),
        ("quit", "SystemExit: 5"),
        ("exit", "ended with exit code 3"),
        ("hang", "no answer within 1.5 s"),
        ("sleep", "no answer within 1.5 s"),
        ("long", "too long to be shown"),
        ("broken", "cannot be shown"),
        ("huge", "cannot be shown"),
        ("number", "neither an Observation nor Done"),
        ("memory", "MemoryError"),
        ("half a character", "ValueError: no ?"),
    ],
)
def test_a_bad_environment_gives_an_error_turn_and_the_episode_goes_on(
    text: str, told: str, bad: EpisodeHost, builder: PromptBuilder
) -> None:
    episode, begun = opened(bad, builder, step=hash(text) % 1000), time.monotonic()
    first, answer, after = (say(episode, builder, said) for said in ("go", text, "go"))
    assert time.monotonic() - begun < 40, "a class that hangs is not waited for twice"
    assert not isinstance(answer, str)
    observation, observed, _ = answer
    assert told in observation.error
    assert observation.text.startswith("Error: ")
    assert len(observed.ids) <= 200
    for number, counted in ((1, first), (2, after)):  # the turn that failed does not count
        assert not isinstance(counted, str)
        assert counted[0].text.startswith(f"turn {number} of p: ")


def test_control_tokens_of_an_environment_do_not_reach_the_ids(bad: EpisodeHost, builder: PromptBuilder) -> None:
    answer = say(opened(bad, builder), builder, "control")
    assert not isinstance(answer, str)
    control = {builder.tokenizer.convert_tokens_to_ids(token) for token in ("<|im_start|>", "<|image_pad|>")}
    assert sum(int(i) in control for i in answer[1].ids) == 2, "the template's own <|im_start|>, twice"


def test_half_a_character_is_a_question_mark(bad: EpisodeHost, builder: PromptBuilder) -> None:
    """JSON may hold one, and a class that echoes an argument returns it; no file may hold it."""
    answer = say(opened(bad, builder, step=11), builder, "half shown")
    assert not isinstance(answer, str)
    assert (answer[0].text, answer[0].tool, answer[0].error) == ("no ?", "?", "")


def test_playing_an_episode_again_has_time_for_all_its_turns(bad: EpisodeHost, builder: PromptBuilder) -> None:
    """Three turns of .7 s, then a neighbour ends their process: the fourth turn's limit is 1.5 s for itself."""
    episode, other = opened(bad, builder, step=12), opened(bad, builder, g=2, step=12)
    for _ in range(2):
        say(episode, builder, "slow")
    say(other, builder, "exit")
    answer = say(episode, builder, "slow")
    assert not isinstance(answer, str)
    assert answer[0].text.startswith("turn 3 of p: ")


def test_importing_a_class_takes_none_of_the_time_of_its_answers(
    builder: PromptBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither in the second of two processes, nor in one that takes the place of another."""
    wait = f"import os, time\nif os.path.exists({str(tmp_path / 'slow')!r}): time.sleep(2.2)"
    (tmp_path / "heavy_world.py").write_text(f"{wait}\nfrom {OWN} import Bad\n")
    monkeypatch.syspath_prepend(tmp_path)
    with hosted(builder, "heavy_world.Bad", timeout=1.5, workers=2) as host:
        (tmp_path / "slow").touch()
        first, second = opened(host, builder), opened(host, builder, g=1)
        ids = np.array([builder.eos_ids[0]], np.int32)
        asked = [episode.answer(text, ids) for episode, text in ((first, "exit"), (second, "go"))]
        ended, answer = (future.result(timeout=60) for future in asked)
        again = say(first, builder, "go")
    assert not isinstance(ended, str) and "ended with exit code 3" in ended[0].error
    for each in (answer, again):
        assert not isinstance(each, str) and each[0].text.startswith("turn 1 of p: ")


def test_waiting_for_a_place_is_not_waiting_for_an_answer(builder: PromptBuilder) -> None:
    """Five programs of 0.7 s, one at a time, with a limit of 3.4 s for each."""
    program = written("python", {"code": "import time; time.sleep(0.7); print(7)"}, "fenced")
    with hosted(builder, "python", options={"seconds": 3.2}, timeout=3.4) as host:
        episodes = [opened(host, builder, g) for g in range(5)]
        ids = np.array([builder.eos_ids[0]], np.int32)
        asked = [episode.answer(program, ids) for episode in episodes]
        answers = [future.result(timeout=60) for future in asked]
    assert [answer[0].text for answer in answers if not isinstance(answer, str)] == ["7"] * 5
    late = pytest.raises(UserError, match=r"options\.seconds is 10, and environment\.timeout 5")
    with late, hosted(builder, "python", timeout=5.0):
        pass


def test_an_own_environment_repeats_itself_by_its_seed(bad: EpisodeHost, builder: PromptBuilder) -> None:
    """Also where its process is new: the earlier turns are played again."""

    def texts(step: int) -> list[str]:
        episode = opened(bad, builder, step=step)
        said = []
        for text in ("one", "exit", "two", "three"):
            answer = say(episode, builder, text)
            assert not isinstance(answer, str)
            said.append(answer[0].text)
        assert say(episode, builder, "four") == "enough"
        return said

    assert texts(7) == texts(7)
    assert texts(7) != texts(8)


def test_a_class_that_cannot_be_used_is_refused(builder: PromptBuilder) -> None:
    cases = {f"{OWN}.Missing": "Missing", f"{OWN}.Sync": "async def reset", "no.such.Thing": "python -m vlm_rl"}
    for name, told in cases.items():
        with pytest.raises(UserError, match=told), hosted(builder, name):
            pass
    with (
        pytest.raises(UserError, match="unexpected keyword"),
        hosted(builder, f"{OWN}.Counter", options={"least": 1}),
    ):
        pass


def test_what_is_shown_first_ends_the_prompt_that_all_responses_share(builder: PromptBuilder) -> None:
    with hosted(builder, f"{OWN}.Beginning", max_observed_tokens=120, max_images=1, max_pixels=28 * 28 * 9) as host:
        plain = builder.build(PROBLEM)
        prompt, again, other = (host.build(PROBLEM, seed=seed) for seed in (0, 0, 1))
        start = prompt.start
        assert start is not None and again.start is not None and other.start is not None
        assert (start.text, start.images) == (again.start.text, again.start.images)
        assert start.text != other.start.text, "another seed, another start"
        assert f"How many?{builder.template.suffix}\n\n{start.text}" in prompt.text
        assert prompt.text.count(start.text) == 1
        assert prompt.start_tokens == len(prompt.ids) - len(plain.ids) <= 120
        (_, shown), (packed,) = prompt.images, open_packed(start.images)
        assert shown.tobytes() == packed.tobytes()
        assert shown.width * shown.height <= 28 * 28 * 9
        assert len(prompt.vision["image_grid_thw"]) == 2
        asked = host.episodes([PROBLEM], seed=0, step=3)
        told = [say(asked.open(0, g, prompt), builder, "seven")[0] for g in range(2)]
        assert isinstance(told[0], Observation) and isinstance(told[1], Observation)
        assert told[0].text == told[1].text, "each response's own environment begins alike"
        full = asked.open(0, 2, prompt)
        assert (full.num_observed, full.num_images) == (prompt.start_tokens, 1), "what is shown first counts"


def test_a_prompt_with_a_start_is_what_the_model_s_own_processor_makes(builder: PromptBuilder) -> None:
    """The words hold no control token and no marker, so that the processor may be given them as they are."""
    pictures = (png(np.random.default_rng(1), 84, 56), png(np.random.default_rng(2), 56, 56))
    for problem in (PROBLEM, Problem("t", "How many?", (), "3", "integer")):
        start = EpisodeStart("A board.", builder_pngs(builder, pictures), "")
        prompt = builder.build(problem, start=start)
        image = [{"type": "image"}]
        text = {"type": "text", "text": f"How many?{builder.template.suffix}\n\nA board."}
        messages = [
            {"role": "system", "content": builder.as_content(builder.template.system)},
            {"role": "user", "content": [*image * len(problem.images), text, *image * 2]},
        ]
        processor: Any = builder.processor
        chat = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert prompt.text == chat + builder.template.prefill
        made = processor(text=[prompt.text], images=list(prompt.images), return_tensors="np", do_resize=False)
        assert prompt.ids.tolist() == made["input_ids"][0].tolist()
        assert np.array_equal(prompt.vision["image_grid_thw"], made["image_grid_thw"])
        assert np.array_equal(prompt.vision["pixel_values"], made["pixel_values"])


@pytest.mark.parametrize(
    ("question", "told"),
    [
        ("raise", "failed: ValueError: no such world"),
        ("exit", "failed: its process ended with exit code 3"),
        ("hang", r"failed: no answer within 1\.5 s"),
        ("number", "failed: TypeError: reset returned int, neither an Observation nor None"),
        ("refuse", "failed: no world is left"),
        ("long", r"shows 1,000,000 characters, more than environment\.max_observed_tokens \(200\)"),
        ("wide", r"shows \d+ tokens, more than environment\.max_observed_tokens \(200\)"),
        ("broken", "cannot be shown: image 0"),
        ("many", r"shows 5 images, more than environment\.max_images \(4\)"),
    ],
)
def test_a_bad_start_is_told_with_the_environment_and_the_problem(
    question: str, told: str, bad_start: EpisodeHost
) -> None:
    problem = replace(PROBLEM, question=question, images=())
    with pytest.raises(StartError, match=rf"environment {OWN}\.BadBeginning: reset of problem 'p' {told}"):
        bad_start.build(problem, seed=0)


def test_a_reset_that_shows_something_else_ends_the_run(bad_start: EpisodeHost, builder: PromptBuilder) -> None:
    problem = replace(PROBLEM, question="later", images=())
    prompt = bad_start.build(problem, seed=0)
    assert prompt.text.count("world") == 1
    episode = bad_start.episodes([problem], seed=0, step=0).open(0, 0, prompt)
    with pytest.raises(UserError, match=rf"{OWN}\.BadBeginning: reset of problem 'p' shows something else"):
        say(episode, builder, "hello")


def test_an_empty_start_is_none(bad_start: EpisodeHost, builder: PromptBuilder) -> None:
    problem = replace(PROBLEM, question="nothing", images=())
    prompt = bad_start.build(problem, seed=0)
    assert prompt.start is None
    assert prompt.text == builder.build(problem).text
    seeds = {bad_start.episodes([problem], seed=0, step=0).open(0, g, prompt).seed for g in range(2)}
    assert len(seeds) == 2, "a seed for each response, as where reset returns None"


def test_what_is_observed_has_limits(builder: PromptBuilder) -> None:
    call = written("image_zoom_in_tool", {"bbox_2d": [0, 0, 56, 56]}, "fenced")
    with hosted(builder, "zoom", max_images=1, max_observed_tokens=80, max_pixels=28 * 28 * 9) as host:
        episode = opened(host, builder)
        answers = [say(episode, builder, call) for _ in range(4)]
    assert not isinstance(answers[0], str)
    assert len(answers[0][1].images) == 1
    observed = [answer for answer in answers if not isinstance(answer, str)]
    assert sum(len(answer[1].ids) for answer in observed) <= 80
    assert "no more than 1 images" in observed[1][0].error
    assert answers[-1] == "observed_tokens", "not even an error has room"


def test_quick_answers_are_made_side_by_side_and_only_the_model_s_pixels_are_kept(builder: PromptBuilder) -> None:
    """Each picture is decoded once both are being decoded, which one thread could not do."""
    both = threading.Barrier(2)
    call = written("image_zoom_in_tool", {"bbox_2d": [0, 0, 168, 168]}, "fenced")
    with hosted(builder, "zoom", max_pixels=28 * 28 * 4) as host:
        host.quick_places = asyncio.Semaphore(2)  # whatever this machine has
        fit = host.writer.fit

        def fit_together(images: Sequence[bytes]) -> Shown:
            both.wait(30)
            return fit(images)

        host.writer.fit = fit_together  # type: ignore[method-assign]
        ids = np.array([builder.eos_ids[0]], np.int32)
        asked = [opened(host, builder, g).answer(call, ids) for g in range(2)]
        for answer in (future.result(timeout=60) for future in asked):
            assert not isinstance(answer, str)
            observation, observed, images = answer
            assert observation.images is observed.images
            (image,), (again,) = images, open_images(observed)
            assert image.width * image.height <= 28 * 28 * 4
            assert image.tobytes() == again.tobytes()


def test_python_runs_inside_the_sandbox(builder: PromptBuilder) -> None:
    def program(code: str) -> str:
        return written("python", {"code": code}, "fenced")

    with hosted(builder, "python", options={"seconds": 2.0}, max_observed_tokens=4000) as host:
        episode = opened(host, builder)
        answers = [
            say(episode, builder, program(code))
            for code in ("print(6 * 7)", "1 / 0", "import time; time.sleep(60)", "print('x' * 5000)")
        ]
        last = say(episode, builder, program("print(1)"))
    shown = [answer[0] for answer in answers if not isinstance(answer, str)]
    assert (shown[0].text, shown[0].error) == ("42", "")
    assert "ZeroDivisionError" in shown[1].error
    assert shown[2].error
    assert "3000 characters are left out" in shown[3].text
    assert not isinstance(last, str)
    assert "no calls are left" in last[0].error


def test_a_wrong_answer_gets_a_second_try(builder: PromptBuilder) -> None:
    with hosted(builder, "answer_check", options={"tries": 3}) as host:
        episode = opened(host, builder)
        answers = [say(episode, builder, text) for text in (r"\boxed{4}", r"\boxed{3}")]
        hopeless = opened(host, builder)
        others = [say(hopeless, builder, r"\boxed{4}") for _ in range(3)]
    assert not isinstance(answers[0], str)
    assert "3" not in answers[0][0].text, "nothing of the right answer is said"
    assert answers[1] == "done"
    assert [isinstance(answer, str) for answer in others] == [False, False, True]


def test_a_script_plays_with_the_real_environment(builder: PromptBuilder) -> None:
    call = f"<think> look</think>\n{written('image_zoom_in_tool', {'bbox_2d': [0, 0, 56, 56]}, 'fenced')}"
    said = [call, r"<think> seen</think><answer>\boxed{3}</answer>"]
    with hosted(builder, "zoom") as host:
        prompt = builder.build(PROBLEM)
        rollout = play(host, builder, PROBLEM, prompt, said)
        assert [turn.text for turn in rollout.turns] == said
        assert len(rollout.observed) == 1
        with pytest.raises(ValueError, match="ends the episode at turn 1"):
            play(host, builder, PROBLEM, prompt, [said[1], said[1]])


def test_the_prompt_says_what_may_be_called(builder: PromptBuilder) -> None:
    with hosted(builder, "zoom"):
        assert "image_zoom_in_tool" in builder.build(PROBLEM).text
    with hosted(builder, "zoom", instructions="Look twice."):
        text = builder.build(PROBLEM).text
        assert "Look twice." in text
        assert "image_zoom_in_tool" not in text
