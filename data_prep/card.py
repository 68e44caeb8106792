"""README.md of a prepared set: a data set card, whose YAML header `datasets` and the hub read.

    write_card(Path("data/my_set"), source_card=Path("raw/README.md"))

It says where the rows come from, what was dropped and why, whether they were compared with benchmarks, and which
column holds what. `datasets.load_dataset("data/my_set")` then opens the set as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import vlm_rl
from vlm_rl.data.sets import read_manifest
from vlm_rl.data_prep.merge_shards import LEAKED
from vlm_rl.data_prep.prepared_set import DATA, schema
from vlm_rl.errors import UserError
from vlm_rl.types import AnswerType
from vlm_rl.untrusted.plain_files import read_small
from vlm_rl.untrusted.yaml_text import read_yaml

CARD = "README.md"

_MEANINGS = {
    "id": "unique in this set",
    "question": "with one `<image>` for each image and one `<video>` for each video, in order",
    "images": "and the frames of videos, on the pixel grid of the model, see `patch_size` below",
    "answer": "the gold, without `\\boxed{}`",
    "answer_type": f"one of {', '.join(get_args(AnswerType))}",
    "choices": "texts of the options A, B, C, ...",
    "source": "where the row comes from",
    "category": "as the source names it",
    "difficulty": "pass rate of a reference model from 0 to 1; -1: unknown",
    "meta": "JSON: `test_only`, `tolerance`, `unit`, `videos` (the seconds of each one's frames), ...",
    "prompt_tokens": "tokens of the rendered prompt; -1: not counted",
    "originals": "size, format and hashes of each image before preparation",
}


def write_card(folder: Path, *, licence: str = "") -> Path:
    """Write README.md beside a prepared set's manifest, from that alone, and return it.

    Args:
        folder: the prepared set.
        licence: the source's, as its own card names it; "" if that is not known.
    """
    import yaml

    manifest = read_manifest(folder)
    header = yaml.safe_dump(_header(manifest, licence), sort_keys=False, allow_unicode=True)
    text = "\n".join(_body(manifest, licence))
    (folder / CARD).write_text(f"---\n{header}---\n\n{text}\n", encoding="utf-8")
    return folder / CARD


def licence_of(source: Path) -> str:
    """Return the licence that the card beside a source's files names, or "" if there is none."""
    card = (source if source.is_dir() else source.parent) / CARD
    try:
        text = read_small(card) if card.is_file() else ""
        header = read_yaml(text.split("---\n", 2)[1]) if text.startswith("---\n") else {}
    except (OSError, ValueError, IndexError, UserError):
        return ""
    licence = header.get("license") if isinstance(header, dict) else None
    names = licence if isinstance(licence, list) else [licence]
    return ", ".join(name for name in names if isinstance(name, str))


def _header(manifest: Mapping[str, Any], licence: str) -> dict[str, Any]:
    has_images = _has_images(manifest)
    split = "test" if manifest.get("test_only") else "train"
    header = {
        "pretty_name": f"{manifest.get('source', 'a data set')}, prepared by vlm-rl",
        "license": licence.lower() if licence and "," not in licence else "unknown",
        "task_categories": ["visual-question-answering" if has_images else "question-answering"],
        "tags": ["vlm-rl"],
        "configs": [{"config_name": "default", "data_files": [{"split": split, "path": DATA}]}],
    }
    return header | ({"source_datasets": [manifest["hub"]]} if manifest.get("hub") else {})


def _has_images(manifest: Mapping[str, Any]) -> bool:
    return "images" in manifest.get("notes", {}) or any(map(_has_images, manifest.get("parts", ())))


def _body(manifest: Mapping[str, Any], licence: str) -> Iterator[str]:
    kept, rows_in = manifest.get("kept", 0), manifest.get("rows_in", 0)
    yield f"# {manifest.get('source', 'A data set')}, prepared by vlm-rl"
    yield f"\n{kept:,} problems with checkable answers, from {rows_in:,} rows.\n"
    yield from _source(manifest, licence)
    yield from ("", "## Rows", "", "| | rows |", "|---|---:|", f"| read | {rows_in:,} |", f"| kept | {kept:,} |")
    yield from (f"| dropped: {reason} | {count:,} |" for reason, count in manifest.get("dropped", {}).items())
    yield from (f"| changed or flagged: {what} | {count:,} |" for what, count in manifest.get("notes", {}).items())
    yield from ("", "## Contamination", "", *_contamination(manifest))
    yield from ("", "## Columns", "", "| column | type | holds |", "|---|---|---|")
    yield from (f"| {column.name} | {_type_name(column.type)} | {_MEANINGS[column.name]} |" for column in schema())
    yield from (
        "",
        "## How it was made",
        "",
        f"By `vlm-rl prepare` {vlm_rl.__version__}. manifest.json has all of it.",
    )
    yield from ("", "| setting | value |", "|---|---|")
    facts = {**manifest.get("options", {}), **(manifest.get("counted_with") or {})}
    facts["grader_version"] = manifest.get("grader_version")
    yield from (f"| {name} | {_cell(value)} |" for name, value in facts.items() if value not in (None, "", [], {}))


def _source(manifest: Mapping[str, Any], licence: str) -> Iterator[str]:
    yield "## Source\n"
    if hub := manifest.get("hub"):
        at = f" at `{manifest['revision']}`" if manifest.get("revision") else ""
        yield f"- [{hub}](https://huggingface.co/datasets/{hub}){at}"
    for part in manifest.get("parts", ()):
        yield f"- {part['taken']:,} rows of the prepared set {_cell(part['name'])} (sha256 `{part['sha256']}`)"
    for file in manifest.get("files", ()):
        yield f"- {_cell(file['name'])}, {file['bytes']:,} bytes" + (
            f", sha256 `{file['sha256']}`" if "sha256" in file else ""
        )
    yield f"- licence: {_cell(licence)}" if licence else "- licence: not known; that of the source applies"


def _contamination(manifest: Mapping[str, Any]) -> Iterator[str]:
    if "parts" in manifest:
        for part in manifest["parts"]:
            yield from (f"- {_cell(part['name'])}: {line.removeprefix('- ')}" for line in _contamination(part))
    elif manifest.get("test_only"):
        yield "**These are rows of a benchmark. Training on them makes every score on it worthless.**"
    else:
        yield _comparison(manifest)


def _comparison(manifest: Mapping[str, Any]) -> str:
    options = manifest.get("options", {})
    if not options.get("against"):
        return "Not compared with any benchmark (`--against SET` does)."
    names, dropped = ", ".join(options["against"]), manifest.get("dropped", {}).get(LEAKED, 0)
    what = "were found and kept" if options.get("keep_overlap") else "were dropped"
    count = manifest.get("notes", {}).get(LEAKED, 0) if options.get("keep_overlap") else dropped
    return f"Compared with {names}: {count:,} rows that share text or images with it {what}."


def _type_name(kind: Any) -> str:
    text = str(kind)
    return "list of images" if "bytes" in text else "list of objects" if "struct" in text else _PLAIN.get(text, text)


_PLAIN = {"string": "text", "int32": "integer", "double": "number", "list<element: string>": "list of texts"}


def _cell(value: Any) -> str:
    """Return a value as the text of a cell of a table, on one line."""
    return " ".join(str(value).split()).replace("|", "\\|")
