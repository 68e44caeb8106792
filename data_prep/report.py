"""A prepared set's own page: what is in it, what was left out and why, and 24 random problems to look at."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vlm_rl.data_prep.prepared_set import DATA, read_set_manifest
from vlm_rl.report.html import Section, data_uri, escape, page_html
from vlm_rl.types import IMAGE_MARKER

CONTACTS = 24
_EXAMPLES = 5  # shown of each drop reason
_MOST = 20  # bars of one table

_STYLE = """<style>
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
.reason { margin: 14px 0 2px; font-weight: 600; }
</style>"""


def write_report(folder: Path, *, seed: int = 0) -> Path:
    """Write report.html beside a prepared set's data.parquet, from its own files alone."""
    manifest, rows = read_set_manifest(folder), _light_rows(folder)
    name = f"{manifest.get('source', 'a prepared set')}"
    sections = [
        _ledger(manifest),
        _contents(rows),
        _numbers(rows, manifest),
        _contact_sheet(folder, len(rows), seed),
        _left_out(folder, manifest),
        _made_of(manifest),
    ]
    page = page_html(
        title=f"Prepared set: {name}",
        header=_STYLE + _header(name, manifest),
        sections=sections,
        footer="Written by vlm-rl prepare.",
    )
    file = folder / "report.html"
    file.write_text(page, encoding="utf-8")
    return file


def _light_rows(folder: Path) -> list[dict[str, Any]]:
    """Every row without its pictures."""
    import pyarrow.parquet as pq

    columns = ["question", "answer_type", "source", "category", "difficulty", "prompt_tokens", "originals", "choices"]
    return pq.read_table(folder / DATA, columns=columns).to_pylist()


def _header(name: str, manifest: Mapping[str, Any]) -> str:
    kept, rows_in = manifest.get("kept", 0), manifest.get("rows_in", 0)
    published = manifest.get("published_rows") or []
    whole = ""
    if published and rows_in not in published and manifest.get("options", {}).get("limit") is None:
        whole = f" The published set has {' or '.join(f'{number:,}' for number in published)} rows: this is a part."
    if missing := manifest.get("notes", {}).get("annotations_only"):
        whole += (
            f" {missing:,} come without their pictures, which were not there: answers to them can be scored, but no "
            "model can be run on them."
        )
    banner = ""
    if manifest.get("test_only"):
        banner = "<div class='banner'><b>BENCHMARK</b> Its rows are marked test-only: the trainer refuses them.</div>"
    return (
        f"{banner}<h1>{escape(name)}: {kept:,} problems</h1>"
        f"<p class='lead'>{rows_in:,} rows in, {kept:,} kept.{whole}</p>"
    )


def _ledger(manifest: Mapping[str, Any]) -> Section:
    dropped, notes = manifest.get("dropped", {}), manifest.get("notes", {})
    body = _bars("Rows", [("kept", manifest.get("kept", 0)), *sorted(dropped.items(), key=lambda item: -item[1])])
    body += _bars("Changed or flagged in kept rows", sorted(notes.items()))
    return Section("Rows", "In = kept + dropped, by reason.", f"<div class='grid'>{body}</div>")


def _contents(rows: Sequence[Mapping[str, Any]]) -> Section:
    def counted(key: str) -> list[tuple[str, int]]:
        return Counter(str(row[key]) or "(none)" for row in rows).most_common()

    options = Counter(len(row["choices"]) for row in rows if row["answer_type"] == "choice")
    body = "".join(
        [
            _bars("Answer type", counted("answer_type")),
            _bars("Source", counted("source")),
            _bars("Options of a choice (0: only in the picture)", [(str(k), n) for k, n in sorted(options.items())]),
            _bars("Category", counted("category")),
        ]
    )
    return Section("Contents", "Kept problems by what they ask for.", f"<div class='grid'>{body}</div>")


def _numbers(rows: Sequence[Mapping[str, Any]], manifest: Mapping[str, Any]) -> Section:
    originals = [original for row in rows for original in row["originals"]]
    sides = [max(original["width"], original["height"]) for original in originals]
    rates = [row["difficulty"] for row in rows]
    tokens = [row["prompt_tokens"] for row in rows if row["prompt_tokens"] >= 0]
    counted = manifest.get("counted_with") or {}
    body = "".join(
        [
            _bars("Pass rate", _rate_bins(rates)),
            _bars("Pictures of a problem", [(str(k), n) for k, n in sorted(_picture_counts(rows).items())]),
            _bars("Longer side of the original picture, pixels", _bins(sides)),
            _bars("Original format", Counter(original["format"] for original in originals).most_common()),
            _bars(f"Prompt length, tokens ({escape(str(counted.get('tokenizer', 'not named')))})", _bins(tokens))
            if tokens
            else "",
            _bars("Question length, characters", _bins([len(row["question"]) for row in rows])),
        ]
    )
    return Section("Sizes", "How much there is to look at and to read.", f"<div class='grid'>{body}</div>")


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
    """Counts in ranges that double, from the first that holds a value to the last."""
    counts = Counter(max(value - 1, 0).bit_length() for value in values)
    if not counts:
        return []
    spans = range(min(counts), max(counts) + 1)
    return [(f"{2 ** (k - 1) + 1 if k > 0 else 0:,} to {2**k:,}", counts[k]) for k in spans]


def _bars(title: str, items: Sequence[tuple[str, int]]) -> str:
    """A table of counts with a bar each; the long tail is summed up, without a bar that would dwarf the others."""
    if not items:
        return ""
    shown, rest = list(items[:_MOST]), items[_MOST:]
    if rest:
        shown.append((f"{len(rest)} more", sum(count for _, count in rest)))
    largest = max(count for _, count in items[:_MOST])
    lines = ""
    for index, (label, count) in enumerate(shown):
        bar = f"<i style='width:{100 * count / largest:.1f}%'></i>" if count and index < _MOST else ""
        lines += f"<tr><td>{escape(label)}</td><td class='number'>{count:,}</td><td class='bar'>{bar}</td></tr>"
    return f"<figure class='card bars'><figcaption>{title}</figcaption><table>{lines}</table></figure>"


def _contact_sheet(folder: Path, num_rows: int, seed: int) -> Section:
    chosen = sorted(random.Random(seed).sample(range(num_rows), min(CONTACTS, num_rows)))
    cards = "".join(_contact(row) for row in _rows_at(folder, chosen))
    return Section(
        "Random problems",
        f"{len(chosen)} of {num_rows:,}, drawn with seed {seed}: picture (as the model gets it), text, gold.",
        f"<div class='sheet'>{cards}</div>",
    )


def _rows_at(folder: Path, indices: Sequence[int]) -> list[dict[str, Any]]:
    """Whole rows, of which only the row groups that hold them are read."""
    import pyarrow.parquet as pq

    found, first, wanted = [], 0, list(indices)
    with pq.ParquetFile(folder / DATA) as file:
        for group in range(file.num_row_groups):
            count = file.metadata.row_group(group).num_rows
            here = [index - first for index in wanted if first <= index < first + count]
            if here:
                found += file.read_row_group(group).take(here).to_pylist()
            first += count
    return found


def _contact(row: Mapping[str, Any]) -> str:
    pictures = ""
    for image in row["images"]:
        address = data_uri(image["bytes"], max_side=400)
        pictures += f"<img src='{address}' alt=''>" if address else "<p class='quiet'>does not open</p>"
    question = row["question"].replace(IMAGE_MARKER, "▣" if len(row["images"]) > 1 else "").strip()
    rate = f"<span class='chip'>pass rate {row['difficulty']:.2f}</span>" if row["difficulty"] >= 0 else ""
    return (
        f"<div class='card'>{pictures}<p class='question'>{escape(question)}</p>"
        f"<p class='gold'>gold <b>{escape(row['answer'])}</b></p>"
        f"<div class='head'><span class='chip'>{escape(row['answer_type'])}</span>{rate}</div>"
        f"<p class='quiet'>{escape(row['id'])} · {escape(row['category'] or row['source'])}</p></div>"
    )


def _left_out(folder: Path, manifest: Mapping[str, Any]) -> Section:
    file = folder / "dropped.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    examples = [json.loads(line) for line in lines]
    body = ""
    for reason, count in sorted(manifest.get("dropped", {}).items(), key=lambda item: -item[1]):
        mine = [example for example in examples if example.get("reason") == reason][:_EXAMPLES]
        body += f"<p class='reason'>{escape(reason)}: {count:,}</p>" + _table(
            ["row", "why"], [[example["where"], example["detail"]] for example in mine]
        )
    matches = [example for example in examples if example.get("kept")]
    if matches:
        body += f"<p class='reason'>kept although they overlap a benchmark: {len(matches):,}</p>" + _table(
            ["row", "why"], [[match["where"], match["detail"]] for match in matches[:_EXAMPLES]]
        )
    return Section(
        "Left out", "Examples of every reason; dropped.jsonl has more.", body or "<p>No row was dropped.</p>"
    )


def _made_of(manifest: Mapping[str, Any]) -> Section:
    options = [[key, json.dumps(value)] for key, value in sorted(manifest.get("options", {}).items())]
    files = [
        [str(entry["name"]), f"{entry['bytes']:,} bytes", str(entry.get("sha256", ""))]
        for entry in manifest.get("files", [])
    ]
    facts = [[key, str(manifest[key])] for key in ("hub", "revision", "grader_version") if manifest.get(key)]
    facts += [[f"counted_with {key}", str(value)] for key, value in manifest.get("counted_with", {}).items()]
    body = _table(["file", "size", "sha256"], files) + _table(["option", "value"], [*facts, *options])
    return Section("Made of", "What was read, and with which options.", body)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return ""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class='scroll'><table><tr>{top}</tr>{body}</table></div>"
