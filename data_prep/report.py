"""The page about a prepared set: what is in it, what was left out and why, and 24 random problems to look at."""

from __future__ import annotations

import json
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from markupsafe import Markup

from vlm_rl.data.sets import read_manifest
from vlm_rl.data_prep.prepared_set import DATA
from vlm_rl.report.html import PageSection, data_uri, macros, page, write_page
from vlm_rl.types import IMAGE_MARKER, name_videos

CONTACTS = 24
_EXAMPLES = 5  # shown of each drop reason
_MOST = 20  # bars of one table

_STYLE = """
.sheet { display: grid; grid-template-columns: repeat(auto-fill, minmax(250px, 1fr)); gap: 12px; }
.sheet .card { display: flex; flex-direction: column; gap: 6px; }
.sheet img { width: 100%; max-height: 220px; object-fit: contain; background: #fff; border-radius: 6px; }
.sheet .question { max-height: 24em; overflow: auto; font-size: 13px; margin: 0;
  /* a shade at the lower end, which the end of the text covers: there is more to scroll to */
  background: linear-gradient(transparent, var(--surface) 70%) bottom / 100% 3em no-repeat local,
    linear-gradient(transparent, var(--grid)) bottom / 100% 1.5em no-repeat scroll; }
.sheet .gold { margin: auto 0 0; }
.grid { display: block; columns: 2 420px; column-gap: 12px; }
.grid > .card { break-inside: avoid; margin: 0 0 12px; }
.facts { display: grid; grid-template-columns: fit-content(45%) minmax(0, 1fr); gap: 4px 18px; }
.facts dt { color: var(--muted); } .facts dd { margin: 0; overflow-wrap: anywhere; }
.reason { margin: 14px 0 2px; font-weight: 600; }
"""
_PARTS = macros("vlm_rl.data_prep", "parts.html")
_SET = macros("vlm_rl.data_prep", "prepared_set.html")


def write_report(folder: Path, *, name: str = "", seed: int = 0) -> Path:
    """Write report.html beside a prepared set's data.parquet, from its own files alone, and return it.

    `name` is the set's, where the folder is not yet at its place.
    """
    manifest, rows = read_manifest(folder), _light_rows(folder)
    name = name or folder.name
    sections = [
        _ledger(manifest),
        _contents(rows),
        _sizes(rows, manifest),
        _contact_sheet(folder, len(rows), seed),
        _left_out(folder, manifest),
        _made_of(manifest),
    ]
    text = page(
        title=f"Prepared set: {name}",
        header=_header(name, manifest),
        sections=sections,
        footer="Written by vlm-rl prepare.",
        styles=[_STYLE],
    )
    return write_page(text, folder / "report.html")


def _light_rows(folder: Path) -> list[dict[str, Any]]:
    """Return every row without its pictures."""
    import pyarrow.parquet as pq

    columns = ["question", "answer_type", "source", "category", "difficulty", "prompt_tokens", "originals", "choices"]
    return pq.read_table(folder / DATA, columns=columns).to_pylist()


def _header(name: str, manifest: Mapping[str, Any]) -> Markup:
    rows_in, published = manifest.get("rows_in", 0), manifest.get("published_rows") or []
    is_part = published and rows_in not in published and manifest.get("options", {}).get("limit") is None
    return _SET.header(
        name,
        str(manifest.get("source", "")),
        manifest.get("kept", 0),
        rows_in,
        published if is_part else [],
        manifest.get("notes", {}).get("annotations_only", 0),
        manifest.get("test_only", False),
    )


def _ledger(manifest: Mapping[str, Any]) -> PageSection:
    dropped, notes = manifest.get("dropped", {}), manifest.get("notes", {})
    counts = [("kept", manifest.get("kept", 0)), *sorted(dropped.items(), key=lambda item: -item[1])]
    tables = {"Rows": counts, "Changed or flagged in kept rows": sorted(notes.items())}
    return PageSection("Rows", "In = kept + dropped, by reason.", _tables(tables))


def _contents(rows: Sequence[Mapping[str, Any]]) -> PageSection:
    def counted(key: str) -> list[tuple[str, int]]:
        return Counter(str(row[key]) or "(none)" for row in rows).most_common()

    options = Counter(len(row["choices"]) for row in rows if row["answer_type"] == "choice")
    tables = {
        "Answer type": counted("answer_type"),
        "Source": counted("source"),
        "Options of a choice (0: only in the picture)": [(str(k), n) for k, n in sorted(options.items())],
        "Category": counted("category"),
    }
    return PageSection("Contents", "Kept problems by what they ask for.", _tables(tables))


def _sizes(rows: Sequence[Mapping[str, Any]], manifest: Mapping[str, Any]) -> PageSection:
    originals = [original for row in rows for original in row["originals"]]
    sides = [max(original["width"], original["height"]) for original in originals]
    tokens = [row["prompt_tokens"] for row in rows if row["prompt_tokens"] >= 0]
    tokenizer = (manifest.get("counted_with") or {}).get("tokenizer", "not named")
    tables = {
        f"Tokens of a prompt, images included ({tokenizer})": _bins(tokens),
        "Question length, characters": _bins([len(row["question"]) for row in rows]),
        "Pass rate": _rate_bins([row["difficulty"] for row in rows]),
        "Pictures of a problem": [(str(k), n) for k, n in sorted(_picture_counts(rows).items())],
        "Longer side of the original picture, pixels": _bins(sides),
        "Original format": Counter(original["format"] for original in originals).most_common(),
    }
    return PageSection(
        "Sizes",
        "How much there is to look at and to read.",
        _tables(tables, [("Tokens of a prompt", _tokens(tokens))]),
    )


def _tokens(counts: Sequence[int]) -> str:
    """Return the tokens of the prompts in words."""
    if not counts:
        return "not counted; vlm-rl prepare --tokenizer MODEL counts them"
    return f"median {statistics.median(counts):,.0f}, mean {statistics.mean(counts):,.0f}, at most {max(counts):,}"


def _picture_counts(rows: Iterable[Mapping[str, Any]]) -> Counter[int]:
    return Counter(len(row["originals"]) for row in rows)


def _rate_bins(rates: Sequence[float]) -> list[tuple[str, int]]:
    known = Counter(min(int(rate * 10), 9) if rate < 1 else 10 for rate in rates if rate >= 0)
    if not known:
        return [("unknown", len(rates))]
    names = [f"{i / 10:.1f} to below {(i + 1) / 10:.1f}" for i in range(10)] + ["exactly 1"]
    unknown = sum(rate < 0 for rate in rates)
    return [(name, known[index]) for index, name in enumerate(names)] + ([("unknown", unknown)] if unknown else [])


def _bins(values: Sequence[int]) -> list[tuple[str, int]]:
    """Return counts in ranges that double, from the first that holds a value to the last."""
    counts = Counter(max(value - 1, 0).bit_length() for value in values)
    if not counts:
        return []
    spans = range(min(counts), max(counts) + 1)
    return [(f"{2 ** (k - 1) + 1 if k > 0 else 0:,} to {2**k:,}", counts[k]) for k in spans]


def _bars(title: str, items: Sequence[tuple[str, int]]) -> Markup:
    """Return a table of counts with a bar each; the long tail is one row, whose bar would dwarf the others."""
    largest = max(count for _, count in items[:_MOST])
    rows = [(name, f"{count:,}", count / largest if count else None) for name, count in items[:_MOST]]
    if rest := items[_MOST:]:
        rows.append((f"{len(rest)} more", f"{sum(count for _, count in rest):,}", None))
    return _PARTS.bars(rows, caption=title)


def _tables(tables: Mapping[str, Sequence[tuple[str, int]]], facts: Sequence[tuple[str, str]] = ()) -> Markup:
    """Return counts as bars; those of a single value are text, since its bar could only be full."""
    single = [(title, f"{items[0][0]} ({items[0][1]:,})") for title, items in tables.items() if len(items) == 1]
    bars = [_bars(title, items) for title, items in tables.items() if len(items) > 1]
    return _SET.facts([*facts, *single]) + _PARTS.grid(bars, [], "")


def _contact_sheet(folder: Path, num_rows: int, seed: int) -> PageSection:
    chosen = sorted(random.Random(seed).sample(range(num_rows), min(CONTACTS, num_rows)))
    return PageSection(
        "Random problems",
        f"{len(chosen)} of {num_rows:,}, drawn with seed {seed}: picture (as the model gets it), text, gold.",
        _SET.sheet([_contact(row) for row in _rows_at(folder, chosen)]),
    )


def _rows_at(folder: Path, indices: Sequence[int]) -> list[dict[str, Any]]:
    """Return whole rows; only the row groups that hold them are read."""
    import pyarrow.parquet as pq

    rows, first, wanted = [], 0, list(indices)
    with pq.ParquetFile(folder / DATA) as file:
        for group in range(file.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            here = [index - first for index in wanted if first <= index < first + count]
            if here:
                rows += file.read_row_group(group).take(here).to_pylist()
            first += count
    return rows


def _contact(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row as it is shown: its pictures as addresses, its image markers as a sign or gone."""
    marker = "▣" if len(row["images"]) > 1 else ""
    addresses = [data_uri(image["bytes"], max_side=400) for image in row["images"]]
    question = name_videos(row["question"], json.loads(row["meta"]).get("videos", ()))
    return {**row, "addresses": addresses, "question": question.replace(IMAGE_MARKER, marker).strip()}


def _left_out(folder: Path, manifest: Mapping[str, Any]) -> PageSection:
    file = folder / "dropped.jsonl"
    # Not splitlines: JSON leaves U+2028 and the like in a text as they are.
    lines = file.read_text(encoding="utf-8").split("\n") if file.is_file() else []
    examples = [json.loads(line) for line in lines if line]
    body = Markup()
    for reason, count in sorted(manifest.get("dropped", {}).items(), key=lambda item: -item[1]):
        body += _examples(reason, count, [example for example in examples if example.get("reason") == reason])
    matches = [example for example in examples if example.get("kept")]
    if matches:
        body += _examples("kept although they overlap a benchmark", len(matches), matches)
    caption = "Examples of every reason; dropped.jsonl has more."
    return PageSection("Left out", caption, body or _PARTS.missing("No row was dropped."))


def _examples(reason: str, count: int, examples: Sequence[Mapping[str, Any]]) -> Markup:
    rows = [[example["where"], example["detail"]] for example in examples[:_EXAMPLES]]
    return _SET.reason(reason, count) + (_PARTS.table(["row", "why"], rows) if rows else "")


def _made_of(manifest: Mapping[str, Any]) -> PageSection:
    options = [[key, json.dumps(value)] for key, value in sorted(manifest.get("options", {}).items())]
    files = [
        [str(entry["name"]), f"{entry['bytes']:,} bytes", str(entry.get("sha256", ""))]
        for entry in manifest.get("files", [])
    ]
    facts = [[key, str(manifest[key])] for key in ("hub", "revision", "grader_version") if manifest.get(key)]
    facts += [[f"counted_with {key}", str(value)] for key, value in manifest.get("counted_with", {}).items()]
    body = Markup()
    if files:
        body += _PARTS.table(["file", "size", "sha256"], files)
    if facts or options:
        body += _PARTS.table(["option", "value"], [*facts, *options])
    return PageSection("Made of", "What was read, and with which options.", body)
