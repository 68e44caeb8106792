"""The record of one evaluated response: the only place that names the columns of eval/<benchmark>/step-*.parquet.

Older files may lack the last columns (`LATER_COLUMNS`). A reader that needs a few columns names them, and gets those
that the file has (`run_files.stored_columns`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from typing import Any, get_type_hints

import pyarrow as pa

from vlm_rl.run.run_files import for_readers
from vlm_rl.types import Verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalRecord:
    """One response of an evaluation; its fields are the columns, in their order."""

    problem_id: str
    sample_index: int  # 0 .. k-1
    prompt_text: str  # the rendered chat
    response: str  # prefill included: the text that was graded
    length: int  # generated tokens, the end-of-sequence token included
    stop_reason: str  # "stop" or "length"
    extracted: str | None
    gold: str
    verdict: Verdict
    path: str  # the rule that decided
    reason: str
    has_box: bool  # a closed one, anywhere: whether it counts is for the verdict to say
    category: str
    image_sha256: Sequence[str]
    image: Sequence[bytes] | None  # encoded images; None if the set is too large to keep them
    question: str
    image_sizes: Sequence[str] | None = None  # "WIDTHxHEIGHT" in pixels, as the model got them
    turns: str | None = None  # of an episode (run.turn_record); None: there is no environment
    cluster: str | None = None  # shared by problems made from one (Benchmark.cluster_of); None: a cluster of one

    @property
    def correct(self) -> bool:
        """Tell whether the verdict is `correct`; all others count as wrong."""
        return self.verdict == "correct"


_COLUMN_TYPES: dict[Any, pa.DataType] = {
    str: pa.string(),
    str | None: pa.string(),
    Verdict: pa.string(),
    int: pa.int32(),
    bool: pa.bool_(),
    Sequence[str]: pa.list_(pa.string()),
    Sequence[str] | None: pa.list_(pa.string()),
    Sequence[bytes] | None: pa.list_(pa.binary()),
}
_HINTS = get_type_hints(EvalRecord)

EVAL_SCHEMA = pa.schema([(field.name, _COLUMN_TYPES[_HINTS[field.name]]) for field in fields(EvalRecord)])
READ_SCHEMA = for_readers(
    EVAL_SCHEMA, _HINTS, gaps=("stop_reason", "category", "question", "reason", "path", "image_sha256")
)
LATER_COLUMNS: dict[str, Any] = {f.name: f.default for f in fields(EvalRecord) if f.default is not MISSING}


def cluster_labels(rows: pa.Table) -> list[str]:
    """Return each row's cluster; its problem if it has none or the file is older."""
    names = rows["problem_id"].to_pylist()
    clusters = rows["cluster"].to_pylist() if "cluster" in rows.column_names else [None] * len(names)
    return [cluster or name for name, cluster in zip(names, clusters, strict=True)]
