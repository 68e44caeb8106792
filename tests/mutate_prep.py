"""Break data preparation in one place at a time, and run the test that must notice.

    python tests/mutate_prep.py             # all of them: a quarter of an hour
    python tests/mutate_prep.py overlap     # the breaks whose name holds this word

As tests/mutate.py does for the mathematics: a break that its test does not notice is an error. Not
collected by pytest.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from mutate import ROOT, Break


@dataclass(frozen=True)
class PrepBreak(Break):
    """One wrong line of a module in data_prep, and what notices it."""

    test: str  # file of tests, and a word of the test's name


B = PrepBreak
IMAGES, TRAIN = "../vlm_rl/images", "../vlm_rl/data"
BREAKS = (
    # markers and golds
    B("marker: more than pictures", "rows", "if found == num_images:", "if found >= num_images:",
      "data_prep disagree"),
    B("marker: one for several pictures", "rows", "{IMAGE_MARKER * num_images}", "{IMAGE_MARKER}",
      "data_prep prepended"),
    B("marker: mended in silence", "rows", '"markers_prepended": True', '"markers": True', "data_prep counts_close"),
    B("marker: MathVision's second one too", "vision_benchmarks", ", count=1)", ")", "data_prep merged"),
    B("gold: first of two boxes", "golds", "len(found) > 1", "len(found) > 2", "data_prep unwrapped"),
    B("gold: form feed kept", "golds", r'.replace("\x0crac", r"\frac")', "", "data_prep unwrapped"),
    B("gold: 073 kept", "golds", "return str(int(text)) if", "return text if", "sources numbers_as_golds"),
    B("type: thousands are a list", "golds", r"(\d+|\d{1,3}(,\d{3})+)", r"(\d+)", "data_prep follows_from"),
    B("type: letters end at D", "golds", r"\(?([A-J])\)?\.?", r"\(?([A-D])\)?\.?", "data_prep follows_from"),
    B("options: any order", "golds", "mark[1] != LETTERS[len(run)]", "False", "data_prep choices_are_read"),
    B("DAPO: wrapper stays", "dapo", 'PREFIX.sub("", prompt)', "prompt", "data_prep removed_exactly"),
    B("DAPO: last line stays", "dapo", 'SUFFIX.sub("", ', "str(", "data_prep removed_exactly"),
    B("DAPO: majority of golds", "dapo", "len(copies.golds) > 1", "len(copies.golds) > 2", "sources over_batches"),
    B("DAPO: copies miscounted", "dapo", "count=total - 1", "count=total", "sources over_batches"),
    B("DAPO: AIME is for training", "dapo", '{"test_only": True} if copies', "{} if copies", "data_prep marked_test"),
    B("pass rate: -1 is a rate", "training_sources", "if 0 <= rate <= 1 else -1.0", "", "sources test_pass_rates"),
    B("MathVista: no precision", "vision_benchmarks", 'meta["precision"]', 'meta["digits"]', "sources mathvista_on"),
    B("DynaMath: tolerance of text", "vision_benchmarks", '{"tolerance": 0.001} if kind == "float" else {}', "{}",
      "data_prep tolerance"),
    # pictures
    B("grid: most pixels not kept to", IMAGES, "fitted_w > high:", "fitted_w > 2 * high:", "images grid"),
    B("grid: least pixels not kept to", IMAGES, "fitted_w < low:", "fitted_w < low // 2:", "images grid"),
    B("grid: other patches", "pictures", "factor=grid.factor)\n    if", "factor=28)\n    if",
      "prepare other_patches"),
    B("picture: alpha on black", IMAGES, "(255, 255, 255, 255)", "(0, 0, 0, 255)", "images on_white"),
    B("picture: cut PNG", IMAGES, "if _PNG_END not in data:", "if False:", "images every_cut"),
    B("picture: first frame", IMAGES, '"n_frames", 1) > 1', '"n_frames", 1) > 9', "bad_input byte_equal"),
    B("picture: sideways", IMAGES, "_to_rgb(_upright(image))", "_to_rgb(image)", "images orientation"),
    B("picture: bytes unlimited", IMAGES, "len(data) > limits.max_bytes", "False", "images byte_limits"),
    B("picture: pixels unlimited", IMAGES, "width * height > limits.max_pixels", "False", "images byte_limits"),
    B("picture: any aspect", IMAGES, ">= MAX_ASPECT *", "> 999 * MAX_ASPECT *", "images bad_images"),
    B("picture: tiny ones of benchmarks go", "pictures", "TEST_LIMITS if test_only else", "", "data_prep scaled_up"),
    B("picture: metadata kept", "pictures", " and decoded.is_plain", "", "bad_input odd_pictures"),
    B("picture: JPEG as PNG", "pictures", 'if decoded.format == "JPEG"', "if False", "prepare own_kind"),
    B("picture: outside the folder", "image_files", "if not path.is_relative_to(base):", "if False:",
      "data_prep virl_rows"),
    B("zip: a link is a file", "image_files", "stat.S_ISLNK(info.external_attr >> 16) or ", "", "bad_input attack"),
    B("zip: any ratio", "image_files", " or info.file_size > MAX_RATIO * max(info.compress_size, 64)", "",
      "bad_input implausibly"),
    B("tar: a link is a file", "image_files", "if not info.isreg():", "if info.isdir():", "bad_input attack"),
    # filters
    B("filter: control tokens pass", "filters", "if token in problem.question:", "if False:",
      "data_prep counts_close"),
    B("filter: unknown pass rates go", "filters", "rate >= 0 and not", "not", "prepare pass_rates"),
    B("filter: bounds excluded", "filters", "<= rate <=", "< rate <", "prepare pass_rates"),
    B("filter: types not excluded", "filters", "in options.exclude_types:", "in ():", "prepare pass_rates"),
    B("filter: bad golds train", "filters", 'raise RowError("gold_unverified", detail, known=True)', "pass",
      "data_prep fail_the_grader"),
    B("filter: bad golds of benchmarks go", "filters", "if not problem.test_only:\n            detail",
      "if True:\n            detail", "data_prep fail_the_grader"),
    B("filter: one verdict for two rules", "filters", "problem.choices, rules)", "problem.choices)", "prepare rules"),
    B("filter: picture tokens twice", "shards", "grid.factor**2 - 1 for", "grid.factor**2 for",
      "prepare prompt_lengths"),
    B("filter: at the limit is over it", "shards", "tokens > task.max", "tokens >= task.max",
      "prepare prompt_lengths"),
    B("filter: long benchmark rows go", "shards", "if not problem.test_only:\n            detail",
      "if True:\n            detail", "prepare long_prompts_of"),
    B("duplicate: the first goes", "filters", "copies[1:])\n", "copies[:-1])\n", "prepare conflicts"),
    B("duplicate: benchmarks folded", "filters", "if not row.test_only:\n            groups",
      "if True:\n            groups",
      "prepare benchmarks_keep"),
    B("conflict: one stays", "filters", "known=True)) for index in copies)", "known=True)) for index in copies[1:])",
      "prepare conflicts"),
    B("near: only equal hashes", "filters", "<= NEAR_BITS for a, b in pairs", "<= 0 for a, b in pairs",
      "prepare conflicts"),
    B("near: any picture", "filters", "<= NEAR_BITS for a, b in pairs", "<= 256 for a, b in pairs",
      "prepare conflicts"),
    B("near: whatever the gold", "filters", " or normalised(row.answer) != normalised(other.answer)", "",
      "prepare conflicts"),
    B("text: signs ignored", "filters", r"|[{}]", r"|[{}+-]", "prepare keeps_signs"),
    B("overlap: 14 words", "overlap", "WORDS = 13", "WORDS = 14", "prepare thirteen_words"),
    B("overlap: short text, any picture", "overlap", " if _same_pictures(phashes, self.pictures[row])]", "]",
      "prepare overlap_with"),
    B("overlap: trade phrases count", "overlap", "sharing[digest] <= common", "True", "prepare phrases"),
    B("overlap: all white is alike", "overlap", "or int(phash, 16) == 0:", ":", "prepare overlap_with"),
    B("overlap: equal pictures only", "overlap", "distance[nearest] <= NEAR_BITS", "distance[nearest] <= 0",
      "prepare overlap_with"),
    B("overlap: kept rows dropped", "assemble", "if options.keep_overlap:", "if False:", "prepare overlap_with"),
    # counts, strictness, shards, manifest
    B("strict: known properties stop it", "prepare", "item is not None and not item.known:", "item is not None:",
      "data_prep known_property"),
    B("strict: a worker's finds ignored", "prepare", "self._check_strict(bad)", "pass", "bad_input strict_names"),
    B("strict: a reused shard's finds ignored", "prepare",
      "self._check_strict(next((i for i in record.items if isinstance(i, Dropped) and not i.known), None))", "pass",
      "prepare finished_shards_hold"),
    B("ids: repeated ones stay", "assemble", "seen.add(row.id)", "pass", "data_prep counts_close"),
    B("limit: one more", "assemble", "len(chosen) == options.limit:", "len(chosen) > options.limit:",
      "prepare limit_counts"),
    B("resume: damage not noticed", "shards", '!= tree["sha256"]:', '== "":', "prepare another_plan"),
    B("resume: other limits not noticed", "prepare", '_LATER_OPTIONS = ("strict"', '_LATER_OPTIONS = ("max_pixels"',
      "prepare another_plan"),
    B("resume: finished shards made again", "prepare", "if record is not None:", "if record is False:",
      "prepare killed"),
    B("resume: no checksum recorded", "shards", "record.sha256 = sha256(parquet)", 'record.sha256 = ""',
      "prepare killed"),
    B("lock: not taken", "workspace", "fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)", "pass",
      "prepare do_not_mix"),
    B("manifest: another checksum", "prepared_set", "{DATA: sha256(folder / DATA)}", '{DATA: ""}',
      "data_prep counts_close"),
    B("manifest: sources not hashed", "inputs", '"sha256": sha256(file)}', '"sha256": ""}', "prepare made_of"),
    # mixes and what training refuses
    B("mix: quota of a source", "mix", "<= plan.quotas.get", "< plan.quotas.get", "mix quotas"),
    B("mix: quota of a set", "mix", "return rows[: part.quota]", "return rows", "mix quotas"),
    B("mix: equal shares", "mix", "left * weights[index] / total", "left / len(open_sets)", "mix shares"),
    B("mix: one seed", "mix", r'f"{seed}\0{identity}"', 'f"{identity}"', "mix repeats"),
    B("mix: any pixel limits", "mix", "if facts.get(key) != manifests[0].get(key):", "if False:", "mix not_fit"),
    B("mix: benchmarks allowed", "mix", 'if facts.get("test_only"):', "if False:", "mix not_fit"),
    B("train: benchmarks allowed", TRAIN, "problem.test_only and not config.allow_test_rows", "False",
      "data benchmark_are_refused"),
    B("train: other pixel limits", TRAIN, "recorded[key] != wanted:", "False:", "data pixel_limits"),
    B("train: other patches", TRAIN, "if recorded != patch_size:", "if False:", "prepare other_patches"),
)  # fmt: skip


def fails(copy: Path, file: str, word: str) -> bool:
    """Whether a test of this word fails there. Raises SystemExit if there is none, or if it was skipped."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/test_{file}.py", "-k", word],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 5 or " skipped" in done.stdout.splitlines()[-1]:
        raise SystemExit(f"tests/test_{file}.py -k '{word}': no such test, or it was skipped\n{done.stdout}")
    return done.returncode != 0


def main(word: str = "") -> int:
    chosen, unnoticed = [one for one in BREAKS if word in one.name], 0
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        for folder in ("vlm_rl", "tests", "data_prep"):
            shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        words: dict[str, set[str]] = defaultdict(set)
        for one in chosen:
            file, test = one.test.split()
            words[file].add(test)
        for file, tests in words.items():
            if fails(copy, file, " or ".join(sorted(tests))):
                raise SystemExit(f"tests/test_{file}.py fails without any break")
        for one in chosen:
            path = copy / "data_prep" / f"{one.file}.py"
            source = path.read_text(encoding="utf-8")
            if one.right not in source:
                raise SystemExit(f"{one.name}: {one.file} no longer holds {one.right!r}")
            path.write_text(source.replace(one.right, one.wrong), encoding="utf-8")
            noticed = fails(copy, *one.test.split())
            path.write_text(source, encoding="utf-8")
            unnoticed += not noticed
            print(f"{one.name:<40} {one.test if noticed else 'NOT NOTICED by ' + one.test}", flush=True)
    print(f"{unnoticed} of {len(chosen)} breaks unnoticed")
    return int(unnoticed > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
