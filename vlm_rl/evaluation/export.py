"""`vlm-rl eval export`: our records in the formats of VLMEvalKit and lmms-eval, for these to score.

VLMEvalKit reads a table of index, question, answer, prediction (TSV here); the options stay inside the question, as
the model saw them. lmms-eval writes one JSON object per line with doc_id, doc, target, resps and filtered_resps.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vlm_rl.errors import UserError
from vlm_rl.run.eval_record import READ_SCHEMA
from vlm_rl.run.run_files import read_records, write_atomically

Record = Mapping[str, Any]

_COLUMNS = ["problem_id", "sample_index", "question", "gold", "response", "extracted", "verdict", "category"]


def export_records(options: argparse.Namespace) -> Path:
    """Write the records of one Parquet file in the chosen format. Raises UserError if they cannot be read."""
    advice = "give a Parquet file of vlm-rl eval"
    rows = read_records(options.records, _COLUMNS, READ_SCHEMA, later=(), advice=advice).to_pylist()
    if not rows:
        raise UserError(f"{options.records}: holds no records; run the evaluation again")
    text = FORMATS[options.to](rows)
    write_atomically(options.out, lambda path: path.write_text(text, encoding="utf-8", newline=""))
    print(f"{options.out}: {len(rows)} rows for {options.to}")
    return options.out


def vlmevalkit_table(rows: Sequence[Record]) -> str:
    """Return a TSV with a header; a set with several samples has a column `sample` as well."""
    several = any(row["sample_index"] for row in rows)
    buffer = io.StringIO()
    writer = csv.writer(buffer, delimiter="\t", lineterminator="\n")
    writer.writerow(["index", "question", "answer", "prediction", "category", *(["sample"] if several else [])])
    for row in rows:
        cells = [row["problem_id"], row["question"], row["gold"], row["response"], row["category"] or ""]
        writer.writerow([*cells, *([row["sample_index"]] if several else [])])
    return buffer.getvalue()


def lmms_eval_lines(rows: Sequence[Record]) -> str:
    """Return one object per problem; its samples are the inner list of `resps`, as that tool writes repeats."""
    samples: dict[str, list[Record]] = {}
    for row in rows:
        samples.setdefault(row["problem_id"], []).append(row)
    lines = []
    for number, (name, group) in enumerate(samples.items()):
        first = group[0]
        doc = {"id": name, "question": first["question"], "answer": first["gold"], "category": first["category"]}
        tree = {
            "doc_id": number,
            "doc": doc,
            "target": first["gold"],
            "resps": [[row["response"] for row in group]],
            "filtered_resps": [row["extracted"] or "" for row in group],
            "acc": sum(row["verdict"] == "correct" for row in group) / len(group),
        }
        lines.append(json.dumps(tree, ensure_ascii=False))
    return "\n".join(lines) + "\n"


FORMATS = {"vlmevalkit": vlmevalkit_table, "lmms-eval": lmms_eval_lines}
