"""A few annotated rows of every benchmark, made to its authors' file layout, and where the real samples are."""

from __future__ import annotations

import base64
import json
import pickle
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vlm_rl.data.images import encode_png
from vlm_rl.evaluation.benchmarks.registry import BENCHMARKS

REAL_FILES = {  # below the folder of sample data
    "mathvista": "mathvista/*.json",
    "mathvision": "mathvision/testmini.jsonl",
    "mathverse": "mathverse/*.json",
    "logicvista": "logicvista/dataset_90.json",
    "wemath": "wemath/testmini.json",
    "dynamath": "dynamath/trial*/dataset.json",
    "aime24": "text_math/aime24.jsonl",
    "amc23": "text_math/amc23.jsonl",
    "minerva": "text_math/minerva_math.jsonl",
    "olympiadbench": "text_math/olympiadbench_100.jsonl",
}


def vista(pid: str, gold: str, kind: str, *choices: str, **more: Any) -> dict[str, Any]:
    return {
        "pid": pid,
        "question": "How many are there?",
        "image": f"images/{pid}.jpg",
        "choices": list(choices) or None,
        "unit": None,
        "precision": None,
        "answer": gold,
        "question_type": "multi_choice" if choices else "free_form",
        "answer_type": kind,
        "metadata": {
            "task": "geometry problem solving",
            "skills": ["geometry reasoning", "algebraic reasoning"],
            "source": "Geometry3K",
            "language": "english",
            "category": "math-targeted-vqa",
            "context": "geometry diagram",
            "grade": "high school",
        },
        **more,
    }


def vision(number: str, gold: str, *options: str, **more: Any) -> dict[str, Any]:
    return {
        "id": number,
        "question": "Which one fits?\n<image1>",
        "options": list(options),
        "answer": gold,
        "image": f"images/{number}.jpg",
        "level": 2,
        "subject": "counting",
        **more,
    }


def verse(number: str, gold: str, question: str, kind: str = "free-form") -> dict[str, Any]:
    return {
        "sample_index": number,
        "problem_index": number,
        "problem_version": "Text Only",
        "question": question,
        "question_for_eval": question,
        "answer": gold,
        "question_type": kind,
        "metadata": {"subject": "Plane Geometry", "subfield": "Angle"},
    }


def logic(gold: str, question: str) -> dict[str, Any]:
    return {
        "imagename": "1.png",
        "question": question,
        "answer": gold,
        "reasoning": "so",
        "skill": ["inductive"],
        "capability": ["diagram"],
    }


def we_math(problem: str, key: str, gold: str) -> dict[str, Any]:
    return {
        "ID": problem,
        "split": "testmini",
        "knowledge concept": "Angles",
        "question": "Which one?",
        "option": "A. 300, 400; B. 400, 300; C. both; D. none",
        "answer": gold,
        "image_path": f"2steps/{problem}.png",
        "key": key,
    }


def dyna(gold: str, kind: str, question: str = "How long?") -> dict[str, Any]:
    return {
        "question": question,
        "image": "image/1.png",
        "answer": gold,
        "answer_type": kind,
        "subject": "algebra",
        "level": "high school",
    }


LETTERED = "Which? (A) yes (B) no (C) both (D) none"

# benchmark -> file -> rows, in the layout that its authors publish
ROWS: dict[str, dict[str, list[Any] | dict[str, Any]]] = {
    "mathvista": {
        "testmini.json": {
            row["pid"]: row
            for row in (
                vista("1", "3", "integer"),
                vista("2", "1.2", "float", precision=1.0),
                vista("3", "0.21", "float", precision=2.0, unit="cm"),
                vista("4", "[0, 2, 7]", "list"),
                vista("5", "two", "text", "three", "two", "eleven"),  # the shortest option is right
                vista("6", "102", "text", "97", "102", "107", "122"),
                vista("7", "7", "text", "5", "7", "7"),  # an option that occurs twice
                vista("8", "yes", "text", "yes", "no"),
                vista("9", "12", "integer"),
            )
        }
    },
    "mathvision": {
        "testmini.jsonl": [
            vision("1", "60"),
            vision("2", "B", "$1$", r"$2\frac{1}{2}$", "$3$", "$4$", "$5$"),
            vision("3", "D", *"ABCDE"),
            vision("4", "(3,-4)", subject="analytic geometry"),
            vision("5", "1:2"),
            vision("6", "7.5", level=4),
        ]
    },
    "mathverse": {
        "testmini_text_only.json": [
            verse("1", "9", "Find x."),
            verse("2", "D", "The size is ()\nChoices:\nA:40°\nB:60°\nC:120°\nD:140°", "multi-choice"),
            verse("3", r"$\frac{1}{2}$", "Find y."),
        ]
    },
    "logicvista": {
        "dataset.json": {
            "v1_0": logic("B", LETTERED),
            "v1_1": logic("A, C", LETTERED),
            "v1_2": logic("3", "How many?"),
            "v1_3": logic("D", LETTERED),
            "v1_4": logic("", "Published without an answer?"),
        }
    },
    "wemath": {
        "testmini.json": [
            *(
                we_math("2steps_1", f"2steps_{part}", gold)
                for part, gold in zip(("1", "2", "multi"), "ABC", strict=True)
            ),
            *(
                we_math("3steps_2", f"3steps_{part}", gold)
                for part, gold in zip(("1", "2", "3", "multi"), "DABC", strict=True)
            ),
        ]
    },
    "dynamath": {
        f"trial{trial}/dataset.json": {
            "1": dyna(f"{trial}.5", "float"),
            "2": dyna("ABCD"[trial % 4], "multiple choice", LETTERED),
            "3": dyna("even", "text"),
            "4": dyna(f"{2 * trial}.094", "float"),
        }
        for trial in (1, 2, 10)
    },
    "aime24": {"aime24.jsonl": [{"id": 60, "problem": "P", "solution": "s", "answer": "073", "url": "u"}]},
    "amc23": {"amc23.jsonl": [{"id": number, "problem": "P", "answer": 27.0 + number} for number in range(3)]},
    "minerva": {
        "minerva.jsonl": [
            {"idx": 0, "problem": "P", "solution": r"It is \boxed{1.6} cm", "type": "Astronomy"},
            {"idx": 1, "problem": "Q", "answer": ["0.01\n", "0.02\n"], "type": "Physics"},
        ]
    },
    "olympiadbench": {
        "olympiadbench.jsonl": [
            {
                "id": 1606,
                "subfield": "Algebra",
                "question": "P",
                "final_answer": ["1, 2"],
                "is_multiple_answer": True,
                "unit": None,
                "answer_type": "Numerical",
                "error": None,
            },
            {
                "id": 1607,
                "subfield": "Geometry",
                "question": "Q",
                "final_answer": ["0.5"],
                "is_multiple_answer": False,
                "unit": "cm",
                "answer_type": "Numerical",
                "error": "1e-1",
            },
        ]
    },
}


ROWS["humaneval_plus"] = {
    "HumanEvalPlus.jsonl": [
        {
            "task_id": "HumanEval/7",
            "prompt": 'def double(x: float) -> float:\n    """ Return twice x. """\n',
            "entry_point": "double",
            "canonical_solution": "    return 2 * x\n",
            "base_input": [[1], [0.1]],
            "plus_input": [[-3], [10**30]],
            "atol": 0,
            "contract": "",
        },
        {
            "task_id": "HumanEval/32",
            "prompt": "def find_zero(xs: list):\n    # a root of the polynomial\n",
            "entry_point": "find_zero",
            "canonical_solution": "    return -xs[0] / xs[1]\n",
            "base_input": [[[1, 2]]],
            "plus_input": [[[-6, 3]]],
            "atol": 0.0001,
            "contract": "",
        },
    ]
}
ROWS["mbpp_plus"] = {
    "MbppPlus.jsonl": [
        {
            "task_id": "Mbpp/2",
            "prompt": '"""\nWrite a function to find the shared elements of two lists.\n"""\n',
            "entry_point": "similar_elements",
            "canonical_solution": "def similar_elements(a, b):\n    return tuple(set(a) & set(b))\n",
            "base_input": [[[3, 4, 5, 6], [5, 7, 4, 10]]],
            "plus_input": [[[1, 2], [3]]],
            "atol": 0,
            "contract": "",
            "assertion": "assert ...",
        },
        {
            "task_id": "Mbpp/252",
            "prompt": '"""\nWrite a function to convert complex numbers to polar coordinates.\n"""\n',
            "entry_point": "convert",
            "canonical_solution": "import cmath\ndef convert(z):\n    return cmath.polar(z)\n",
            "base_input": [["(1+0j)"], ["(4+3j)"]],
            "plus_input": [],
            "atol": 0,
            "contract": "",
            "assertion": "assert ...",
        },
    ]
}


def hidden(tests: list[dict[str, str]]) -> str:
    """Return tests as LiveCodeBench publishes its hidden ones."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(tests)))).decode()


def contest(number: str, date: str, public: list[Any], private: list[Any], **more: Any) -> dict[str, Any]:
    kind = "functional" if "starter_code" in more else "stdin"
    shown, kept = ([{"input": i, "output": o, "testtype": kind} for i, o in part] for part in (public, private))
    return {
        "question_title": f"Problem {number}",
        "question_content": f"Solve {number}.",
        "platform": "leetcode" if kind == "functional" else "atcoder",
        "question_id": number,
        "contest_id": "c1",
        "contest_date": f"{date}T00:00:00",
        "starter_code": "",
        "difficulty": "easy",
        "public_test_cases": json.dumps(shown),
        "private_test_cases": hidden(kept),
        "metadata": "{}",
        **more,
    }


ROWS["livecodebench"] = {
    "test.jsonl": [contest("abc1", "2023-05-01", [("1 2\n", "3\n")], [("5 5\n", "10\n"), ("0 -1\n", "-1\n")])],
    "test2.jsonl": [
        contest(
            "2808",
            "2023-09-01",
            [("[3, 1]\n2", "[1, 3, 2]")],
            [("[]\n7", "[7]")],
            starter_code="class Solution:\n    def f(self, nums: List[int], k: int) -> List[int]:\n        ",
            metadata='{"func_name": "f"}',
        )
    ],
}


def write_annotations(benchmark: str, folder: Path) -> list[Path]:
    """Write the made rows of a benchmark below a folder and return their files."""
    files = []
    for name, rows in ROWS[benchmark].items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        path.write_text(lines if path.suffix == ".jsonl" else json.dumps(rows), encoding="utf-8")
        files.append(path)
    return files


def write_images(benchmark: str, folder: Path) -> None:
    """Write an image of its own for every made row that names one, where the row's benchmark looks for it."""
    for name, rows in ROWS[benchmark].items():
        place = (folder / name).parent / BENCHMARKS[benchmark].files.image_folder
        for row in rows.values() if isinstance(rows, dict) else rows:
            if file := next((row[column] for column in ("image", "image_path", "imagename") if column in row), None):
                path = place / file
                path.parent.mkdir(parents=True, exist_ok=True)
                seed = len(list(folder.rglob("*")))
                noise = np.random.default_rng(seed).integers(0, 256, (56, 84, 3), dtype=np.uint8)
                path.write_bytes(encode_png(Image.fromarray(noise)))
