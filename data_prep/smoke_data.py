"""Make the data of the smoke run: small prepared sets from real sample files, and a tiny model to train on them.

    python -m vlm_rl.data_prep.smoke_data ../shared/data runs/smoke-data
    vlm-rl train configs/smoke.yaml

The samples are a few rows of MathVision, DynaMath, We-Math, LogicVista and of DAPO's validation file, each
in its authors' layout. None of their rows has several images or a format other than JPEG and PNG, so such rows
are made from a sample image. All of them are benchmarks: a run on them is stamped CONTAMINATED and its scores
mean nothing.
"""

from __future__ import annotations

import argparse
import io
import sys
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from vlm_rl.data.sets import load_set
from vlm_rl.data_prep.options import Options
from vlm_rl.data_prep.preparation import prepare
from vlm_rl.errors import UserError
from vlm_rl.toy.tiny_model import build_tiny_model
from vlm_rl.toy.virl_layout import write_virl

BENCHMARKS = ("mathvision", "dynamath", "wemath", "logicvista")
ROWS = 12  # of each set
MAX_PIXELS = 50_176  # 64 visual tokens: cheap on a CPU

SAMPLES = """\
  mathvision/  MathLLMs/MathVision: testmini.jsonl, images/
  dynamath/    DynaMath: trial1/, trial2/, ... each with dataset.json and image/
  wemath/      We-Math: testmini.json, 2steps/, 3steps/
  logicvista/  LogicVista: dataset.json, images/
  dapo_math/   BytedTsinghua-SIA/AIME-2024, DAPO's validation file: aime-2024.parquet"""


def make_smoke_data(samples: Path, out: Path) -> list[Path]:
    """Prepare some rows of every sample set, make the model out/tiny, and return the sets.

    Args:
        samples: the folder of SAMPLES.
        out: the new folder.

    Raises UserError if the samples are not there or `out` exists.
    """
    if out.exists():
        raise UserError(f"{out}: already exists; remove it or choose a different folder")
    missing = [name for name in (*BENCHMARKS, "dapo_math") if not (samples / name).is_dir()]
    if missing:
        raise UserError(
            f"{samples}: no folder {missing[0]!r} there. The samples (make smoke SAMPLES=...) are a folder that you "
            f"fill with public sets, or the first rows of them, as their authors publish them:\n{SAMPLES}\n"
            "Without it there is no smoke run; `make quickstart` needs no files: it draws its own images."
        )
    dapo = min((samples / "dapo_math").rglob("aime-2024.parquet"), default=None)  # the hub has it in data/
    images = samples / "mathvision" / "images"
    sample = min(images.glob("*"), default=None)
    if dapo is None or sample is None:
        absent = f"{samples / 'dapo_math'}: no aime-2024.parquet" if dapo is None else f"{images}: no image"
        raise UserError(f"{absent} there. The samples are:\n{SAMPLES}")
    options = Options(max_pixels=MAX_PIXELS, limit=ROWS)
    sets = []
    for name in BENCHMARKS:
        prepare(name, samples / name, out / name, options)
        sets.append(out / name)
    plain, blank = split_dapo(dapo, out / "raw")
    prepare("dapo", plain, out / "text", options)
    prepare("dapo", blank, out / "text_blank", replace(options, text_image="blank"))
    write_unusual_formats(out / "raw" / "formats", sample)
    prepare("virl39k", out / "raw" / "formats", out / "formats", Options(max_pixels=MAX_PIXELS))
    sets += [out / name for name in ("text", "text_blank", "formats")]
    questions = [problem.question for path in sets for problem in load_set(path)]
    build_tiny_model(out / "tiny", tokenizer_texts=questions)
    return sets


def split_dapo(file: Path, out: Path) -> tuple[Path, Path]:
    """Split `file` into two files of DAPO's own schema, each with every other distinct problem."""
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


def write_unusual_formats(folder: Path, sample: Path) -> Path:
    """Write a set in ViRL39K's layout: a row per unusual format of the image `sample`, and a row with all of them."""
    images = unusual_formats(Image.open(sample))
    names = [f"images/{name}" for name in images]
    rows = [{"question": f"<image>What does {Path(name).stem} show?", "image": [name]} for name in names]
    rows.append({"question": "Compare " + " with ".join(["<image>"] * len(names)), "image": names})
    return write_virl(folder, rows, images)


def unusual_formats(image: Image.Image) -> dict[str, bytes]:
    """Return the same image, by file name, in formats and modes that no sample has."""
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
    """Run the command line above; returns its exit status."""
    parser = argparse.ArgumentParser(description="Prepare the smoke run's sets and its tiny model.")
    parser.add_argument("samples", type=Path, help=f"folder with {', '.join((*BENCHMARKS, 'dapo_math'))}")
    parser.add_argument("out", type=Path, help="new folder for the prepared sets and the model")
    options = parser.parse_args()
    try:
        sets = make_smoke_data(options.samples, options.out)
    except UserError as error:
        print(f"smoke_data: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: {', '.join(path.name for path in sets)} and the model tiny")
    return 0


if __name__ == "__main__":
    sys.exit(main())
