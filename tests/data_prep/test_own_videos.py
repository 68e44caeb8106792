"""Videos in users' own data: frames as a list or a folder, with times or a rate, and what is wrong with each row."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helpers.images import encoded, noise
from tests.helpers.prepared_sets import rows_of, write_problems
from tests.helpers.videos import SHORT, video_problem
from vlm_rl.data.prompts import PromptBuilder
from vlm_rl.data.sets import load_set
from vlm_rl.data_prep.options import Options
from vlm_rl.data_prep.preparation import prepare
from vlm_rl.errors import UserError
from vlm_rl.templates import TEMPLATES

SIZES = {"clip/01.png": (112, 84), "clip/02.png": (112, 84), "clip/10.png": (112, 84), "map.png": (84, 84)}
FRAMES = [name for name in SIZES if name.startswith("clip")]
PLAIN, TIMES = Options(), {"times": "seconds"}
FINE = {"q": "What moves?", "gold": "4", "map": None, "clip": FRAMES, "seconds": [0.5, 1, 4.25]}


@pytest.fixture
def prepared(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that prepares rows with a mapping, and returns the set."""
    for number, (name, size) in enumerate({**SIZES, "wide.png": (140, 84)}.items()):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(encoded(noise(*size, number)))

    def run(rows: list[dict[str, Any]], options: Options = PLAIN, columns: Any = (), **more: Any) -> Path:
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        columns = {"question": "q", "answer": "gold", "images": "map", "frames": "clip", **dict(columns)}
        tree = {"path": "rows.jsonl", "source": "mine", "columns": columns, **more}
        (tmp_path / "mine.yaml").write_text(yaml.safe_dump(tree))
        counter = options.max_prompt_tokens and (lambda problem: 20)
        prepare("generic", tmp_path / "mine.yaml", tmp_path / "set", options, count_tokens=counter or None)
        return tmp_path / "set"

    return run


def dropped(folder: Path) -> list[tuple[str, str]]:
    lines = (folder / "dropped.jsonl").read_text().splitlines()
    return [(row["reason"], row["detail"]) for row in map(json.loads, lines)]


def test_frames_are_behind_the_videos_marker(prepared: Callable[..., Path]) -> None:
    rows = [
        FINE | {"map": ["map.png"]},
        FINE | {"map": ["map.png"], "q": "Watch <video> beside <image>!"},
        FINE | {"clip": "clip", "seconds": "[0, 1, 2]"},
        {"q": "What is 2 + 2?", "gold": "4", "map": None, "clip": None, "seconds": None},
    ]
    problems = load_set(prepared(rows, columns=TIMES))
    assert [problem.question.replace("\n", " ") for problem in problems] == [
        "<image><video> What moves?",
        "Watch <video> beside <image>!",
        "<video> What moves?",
        "What is 2 + 2?",
    ]
    clip = [encoded(noise(112, 84, number)) for number in range(3)]
    image = encoded(noise(84, 84, 3))
    assert [list(problem.images) for problem in problems] == [[image, *clip], [*clip, image], clip, []]
    assert [problem.videos for problem in problems] == [[[0.5, 1, 4.25]], [[0.5, 1, 4.25]], [[0, 1, 2]], ()]


def test_a_rate_gives_the_times(prepared: Callable[..., Path]) -> None:
    assert load_set(prepared([FINE], fps=4))[0].videos == [[0, 0.25, 0.5]]


@pytest.mark.parametrize("name", ["{}.png", "frame_{}.PNG", "{:04d}.png", "cut2-{}-of-12.png"])
def test_frames_of_a_folder_are_in_the_order_of_their_numbers(
    prepared: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    frames = [encoded(noise(112, 84, 50 + number)) for number in range(12)]
    (tmp_path / "long").mkdir()
    for number, data in enumerate(frames):
        (tmp_path / "long" / name.format(number)).write_bytes(data)
    (problem,) = load_set(prepared([FINE | {"clip": "long"}], fps=1))
    assert list(problem.images) == frames


def test_frames_at_other_times_are_no_duplicate(prepared: Callable[..., Path]) -> None:
    folder = prepared([FINE, FINE | {"seconds": [0.5, 1, 5]}, FINE], columns=TIMES)
    assert len(rows_of(folder)) == 2
    assert [reason for reason, _ in dropped(folder)] == ["duplicate"]


@pytest.mark.parametrize(
    ("change", "reason", "detail"),
    [
        ({"seconds": [0, 2, 2]}, "bad_video", "whose times do not increase: 2 comes after 2 seconds"),
        ({"seconds": [0, 1, -2]}, "bad_video", "with a frame at -2 seconds"),
        ({"seconds": [0, 1, None]}, "bad_video", "with a frame at None seconds"),
        ({"seconds": [0, 1]}, "bad_video", "a video of 3 frames with 2 times"),
        ({"seconds": "soon"}, "bad_video", "seconds must be a list of seconds"),
        ({"clip": FRAMES[:1], "seconds": [0]}, "bad_video", "less than two frames"),
        ({"clip": [*FRAMES[:2], "clip/03.png"]}, "image_missing", "there is no image 'clip/03.png'"),
        ({"clip": [*FRAMES[:2], "wide.png"]}, "bad_video", "differ in size: 112 x 84 and 140 x 84 pixels"),
        ({"clip": "clap"}, "image_missing", "the folder 'clap' cannot be read"),
        ({"clip": ".."}, "image_outside", "the folder '..' is outside of the data set's folder"),
        (
            {"q": "See <image>."},
            "marker_mismatch",
            "1 <image> markers .* 0 images, and 0 <video> markers but 1 videos",
        ),
    ],
)
def test_a_bad_video_drops_its_row(
    change: dict[str, Any], reason: str, detail: str, prepared: Callable[..., Path]
) -> None:
    folder = prepared([FINE, FINE | change], columns=TIMES)
    ((why, words),) = dropped(folder)
    assert why == reason
    assert re.search(detail, words), words
    assert len(rows_of(folder)) == 1


@pytest.mark.parametrize(
    ("columns", "more", "message"),
    [
        ({}, {}, "columns.frames needs the times of the frames: either columns.times or fps"),
        (TIMES, {"fps": 2}, "either columns.times or fps"),
        ({"frames": ""}, {"fps": 2}, "fps is of the frames of videos, and columns.frames is missing"),
        ({}, {"fps": 0}, "fps"),
    ],
)
def test_a_mapping_says_when_frames_are_shown(
    columns: dict[str, str], more: dict[str, Any], message: str, prepared: Callable[..., Path]
) -> None:
    with pytest.raises(UserError, match=message):
        prepared([FINE], columns=columns, **more)


def test_max_prompt_tokens_counts_pairs_of_frames(prepared: Callable[..., Path]) -> None:
    """Two pairs of 112 x 84 pixels are 2 x 12 visual tokens, of which the counter above has counted 2."""
    assert rows_of(prepared([FINE], Options(max_prompt_tokens=42), columns=TIMES))[0]["prompt_tokens"] == 42


def test_one_token_more_is_too_long(prepared: Callable[..., Path]) -> None:
    with pytest.raises(UserError, match="the prompt has 42 tokens, images expanded; the limit is 41"):
        prepared([FINE], Options(max_prompt_tokens=41), columns=TIMES)


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
def test_the_count_is_that_of_the_prompt(
    model_type: str, prepared: Callable[..., Path], family_model: Callable[[str], Path]
) -> None:
    builder = PromptBuilder(family_model(model_type), template=TEMPLATES["plain"])
    options = Options(patch_size=builder.patch_size or 14)
    folder = prepared([FINE | {"map": "map.png"}], options, columns=TIMES)
    (problem,) = load_set(folder)
    prepare(
        "generic",
        folder.parent / "mine.yaml",
        folder.parent / "counted",
        options,
        count_tokens=builder.count_unexpanded,
    )
    assert rows_of(folder.parent / "counted")[0]["prompt_tokens"] == len(builder.build(problem).ids)


@pytest.mark.parametrize("times", [[0.5], [1, 0.5, 2], "soon", [[0, 1]]])
def test_a_set_with_bad_times_is_refused(times: Any, tmp_path: Path) -> None:
    problem = replace(video_problem(SHORT), meta={"videos": [times]})
    with pytest.raises(UserError, match=r"has the videos .* at least two times in seconds, each above the last"):
        load_set(write_problems([problem], tmp_path / "bad"))
