"""Made-up rows of the public benchmarks, each in its authors' layout, for where the real samples are not at hand.

samples/mathvision/testmini.jsonl, images/        samples/wemath/testmini.json, 2steps/image/
samples/dynamath/trial1/, trial2/                 samples/logicvista/dataset.json, images/
samples/dapo_math/aime-2024.parquet               (DAPO's validation file: every problem several times)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

NUM_ROWS = 12  # of each benchmark
DAPO_PROMPT = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n{}\n\n"
    'Remember to put your answer on its own line after "Answer:".'
)


def write_samples(folder: Path) -> Path:
    """Write all five sample sets below the folder and return it."""
    rng = np.random.default_rng(0)
    _write_mathvision(folder / "mathvision", rng)
    for trial in (1, 2):
        _write_dynamath_trial(folder / "dynamath" / f"trial{trial}", rng, trial)
    _write_wemath(folder / "wemath", rng)
    _write_logicvista(folder / "logicvista", rng)
    _write_dapo(folder / "dapo_math" / "aime-2024.parquet")
    return folder


def _write_mathvision(folder: Path, rng: np.random.Generator) -> None:
    rows = []
    for index in range(NUM_ROWS):
        _draw(folder / "images" / f"{index}.jpg", rng)
        rows.append(
            {
                "id": str(index),
                "question": f"Which picture follows number {index}?\n<image1>",
                "options": ["A", "B", "C", "D", "E"] if index % 2 else [],
                "answer": "C" if index % 2 else str(index),
                "solution": None,
                "level": 1 + index % 5,
                "subject": "counting",
                "image": f"images/{index}.jpg",
            }
        )
    (folder / "testmini.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def _write_dynamath_trial(folder: Path, rng: np.random.Generator, trial: int) -> None:
    rows = {}
    for number in range(1, NUM_ROWS + 1):
        _draw(folder / "image" / f"image{number}.png", rng)
        rows[str(number)] = {
            "question": f"What is the period of function {number} in variant {trial}? Answer with a number.",
            "answer": f"{number}.{trial}",
            "image": f"image/image{number}.png",
            "answer_type": "float",
            "subject": "analytic geometry",
            "level": "high school",
        }
    _write_json(folder / "dataset.json", rows)


def _write_wemath(folder: Path, rng: np.random.Generator) -> None:
    rows = []
    for number in range(1, NUM_ROWS + 1):
        _draw(folder / "2steps" / "image" / f"{number}-1.png", rng)
        rows.append(
            {
                "ID": f"2steps_{number}",
                "split": "testmini",
                "knowledge concept": "Conversion Rates and Calculations Between Length Units",
                "question": f"According to the diagram, side {number} is ( ) m long",
                "option": f"A. {number}00;B. {number}000;C. {number};D. 0; E. No correct answer",
                "answer": "B",
                "image_path": f"2steps/image/{number}-1.png",
                "key": f"2steps_{number}",
                "question number": number,
                "knowledge concept description": "1 kilometer (km) = 1000 meters (m)",
            }
        )
    _write_json(folder / "testmini.json", rows)


def _write_logicvista(folder: Path, rng: np.random.Generator) -> None:
    rows = {}
    for index in range(NUM_ROWS):
        _draw(folder / "images" / f"v1_{index}.png", rng)
        rows[f"v1_{index}"] = {
            "imagename": f"v1_{index}.png",
            "question": f"Which choice (A, B, C, or D) continues pattern {index}?",
            "answer": "ABCD"[index % 4],
            "reasoning": "The square moves one field each time.",
            "skill": ["inductive"],
            "broad_capability": ["diagram"],
            "specific_capability": ["sequence pattern"],
            "imagesource": "made up",
            "sourcelink": "",
            "liscenced": "false",
        }
    _write_json(folder / "dataset.json", rows)


def _write_dapo(file: Path) -> None:
    """Write 24 problems, each of them twice."""
    rows: list[dict[str, Any]] = []
    for index in range(4 * NUM_ROWS):
        problem = f"Find the remainder when {index % 24 + 100}^2 is divided by 7."
        rows.append(
            {
                "data_source": "math_dapo",
                "prompt": [{"content": DAPO_PROMPT.format(problem), "role": "user"}],
                "ability": "MATH",
                "reward_model": {"ground_truth": str((index % 24 + 100) ** 2 % 7), "style": "rule-lighteval/MATH_v2"},
                "extra_info": {"index": index % 24, "raw_problem": problem, "split": None},
            }
        )
    file.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(rows), file)


def _draw(path: Path, rng: np.random.Generator) -> None:
    """Draw a picture like no other: a grid of coloured fields, 120 pixels wide and 90 high."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = rng.integers(0, 256, (3, 4, 3), dtype=np.uint8)
    Image.fromarray(np.kron(fields, np.ones((30, 30, 1), np.uint8))).save(path)


def _write_json(path: Path, tree: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(tree))
