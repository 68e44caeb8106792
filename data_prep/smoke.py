"""Small prepared sets out of real sample files, and a tiny model to train on them: a check of the whole way.

    python -m vlm_rl.data_prep.smoke ../shared/data runs/smoke-data
    vlm-rl train configs/smoke.yaml

The samples are a few rows of MathVision, DynaMath, We-Math, LogicVista and of DAPO's validation file, each
in its authors' layout. No row of theirs has several pictures, nor a format beyond JPEG and PNG: such
rows are built from a sample picture. All of them are benchmarks, so a run on them is stamped CONTAMINATED
and its scores mean nothing.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from vlm_rl.data.sets import load_set
from vlm_rl.data_prep.options import Options
from vlm_rl.data_prep.prepare import prepare
from vlm_rl.errors import UserError
from vlm_rl.toy.tiny_model import build_tiny_model

BENCHMARKS = ("mathvision", "dynamath", "wemath", "logicvista")
ROWS = 12  # of each set
MAX_PIXELS = 50_176  # 64 visual tokens: cheap on a CPU

SAMPLES = """\
  mathvision/  MathLLMs/MathVision: testmini.jsonl, images/
  dynamath/    DynaMath: trial1/, trial2/, ... each with dataset.json and image/
  wemath/      We-Math: testmini.json, 2steps/, 3steps/
  logicvista/  LogicVista: dataset.json, images/
  dapo_math/   BytedTsinghua-SIA/AIME-2024, DAPO's validation file: aime-2024.parquet"""

VIRL_COLUMNS = pa.schema(
    {
        "question": pa.string(),
        "answer": pa.string(),
        "PassRate_32BTrained": pa.float64(),
        "PassRate_7BBase": pa.float64(),
        "category": pa.string(),
        "source": pa.string(),
        "qid": pa.string(),
        "image": pa.list_(pa.string()),
    }
)


def prepare_smoke(samples: Path, out: Path, *, rows: int = ROWS, max_pixels: int = MAX_PIXELS) -> list[Path]:
    """Prepare every sample set below the new folder `out`, and the model out/tiny; returns the sets.

    Raises UserError if the samples are not there or `out` exists.
    """
    if out.exists():
        raise UserError(f"{out}: already exists; remove it or choose another folder")
    missing = [name for name in (*BENCHMARKS, "dapo_math") if not (samples / name).is_dir()]
    if missing:
        raise UserError(
            f"{samples}: no folder {missing[0]!r} there. The samples (make smoke SAMPLES=...) are a folder that you "
            f"fill with public sets, or the first rows of them, as their authors publish them:\n{SAMPLES}\n"
            "Without it there is no smoke run; `make quickstart` goes the whole way on pictures that it draws itself."
        )
    options = Options(max_pixels=max_pixels, limit=rows)
    sets = []
    for name in BENCHMARKS:
        prepare(name, samples / name, out / name, options)
        sets.append(out / name)
    plain, blank = split_dapo(samples / "dapo_math" / "aime-2024.parquet", out / "raw")
    prepare("dapo", plain, out / "text", options)
    prepare("dapo", blank, out / "text_blank", replace(options, text_image="blank"))
    picture = min((samples / "mathvision" / "images").iterdir())
    write_dressed_virl(out / "raw" / "dressed", picture)
    prepare("virl39k", out / "raw" / "dressed", out / "dressed", Options(max_pixels=max_pixels))
    sets += [out / name for name in ("text", "text_blank", "dressed")]
    questions = [problem.question for path in sets for problem in load_set(path)]
    build_tiny_model(out / "tiny", tokenizer_texts=questions)
    return sets


def split_dapo(file: Path, out: Path) -> tuple[Path, Path]:
    """Two files in DAPO's own schema, each with the rows of every other distinct problem of `file`."""
    table = pq.read_table(file)
    texts = [prompt[0]["content"] for prompt in table["prompt"].to_pylist()]
    number = {text: index for index, text in enumerate(dict.fromkeys(texts))}
    out.mkdir(parents=True, exist_ok=True)
    halves = []
    for half, name in enumerate(("text.parquet", "text_blank.parquet")):
        mine = pa.array([number[text] % 2 == half for text in texts])
        pq.write_table(table.filter(mine), out / name)
        halves.append(out / name)
    return halves[0], halves[1]


# -- rows in ViRL39K's layout -----------------------------------------------------------------------


def write_virl(folder: Path, rows: Sequence[Mapping[str, Any]], images: Mapping[str, bytes]) -> Path:
    """A data set in ViRL39K's layout; a row needs only what it wants to say."""
    (folder / "images").mkdir(parents=True)
    for name, data in images.items():
        (folder / "images" / name).write_bytes(data)
    full = [
        {
            "question": "How many?",
            "answer": r"\boxed{1}",
            "PassRate_32BTrained": 1.0,
            "PassRate_7BBase": -1.0,
            "category": "Spatial Reasoning",
            "source": "Processed",
            "qid": f"Processed-{index}",
            "image": [],
            **row,
        }
        for index, row in enumerate(rows)
    ]
    pq.write_table(pa.Table.from_pylist(full, schema=VIRL_COLUMNS), folder / "39Krelease.parquet")
    return folder


def write_dressed_virl(folder: Path, sample: Path) -> Path:
    """One row per unusual format of the picture `sample`, and one row with all of them."""
    images = dressed(Image.open(sample))
    names = [f"images/{name}" for name in images]
    rows = [{"question": f"<image>What does {Path(name).stem} show?", "image": [name]} for name in names]
    rows.append({"question": "Compare " + " with ".join(["<image>"] * len(names)), "image": names})
    return write_virl(folder, rows, images)


def dressed(image: Image.Image) -> dict[str, bytes]:
    """File name -> the same picture in a format or mode that no sample has."""
    rgb = image.convert("RGB")
    half_clear = rgb.convert("RGBA")
    half_clear.putalpha(128)
    return {
        "plain.webp": _save(rgb, "WEBP"),
        "palette.png": _save(rgb.quantize(64), "PNG"),
        "cmyk.jpg": _save(rgb.convert("CMYK"), "JPEG"),
        "clear.png": _save(half_clear, "PNG"),
        "grey.png": _save(rgb.convert("L"), "PNG"),
    }


def _save(image: Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def main() -> int:
    parser = argparse.ArgumentParser(description="Prepare the smoke run's sets and its tiny model.")
    parser.add_argument("samples", type=Path, help=f"folder with {', '.join((*BENCHMARKS, 'dapo_math'))}")
    parser.add_argument("out", type=Path, help="new folder for the prepared sets and the model")
    options = parser.parse_args()
    try:
        sets = prepare_smoke(options.samples, options.out)
    except UserError as error:
        print(f"smoke: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: {', '.join(path.name for path in sets)} and the model tiny")
    return 0


if __name__ == "__main__":
    sys.exit(main())
