"""What `vlm-rl prepare PATH` does before it prepares: find the tables, guess the mapping, show both with examples."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path

from vlm_rl.data_prep.readers.find_data import find_data
from vlm_rl.data_prep.readers.generic import GenericSet
from vlm_rl.data_prep.readers.guess import guess
from vlm_rl.data_prep.readers.hub import locate, newest_commit
from vlm_rl.data_prep.readers.image_files import ImageFile, TarMember, ZipMember
from vlm_rl.data_prep.readers.sample import SAMPLE_ROWS
from vlm_rl.data_prep.readers.sources import SOURCES
from vlm_rl.data_prep.records import DroppedRow, UsableRow
from vlm_rl.untrusted.plain_files import check_utf8_name
from vlm_rl.untrusted.visible_text import replace_invisible

EXAMPLES = 3
_MAX_TEXT = 600  # characters of a question or an answer that an example shows


def map_own_data(
    named: str,
    *,
    split: str,
    revision: str,
    given: Mapping[str, Sequence[str]],
    answer_form: str = "",
    encoding: str = "",
    out: str = "SET",
) -> tuple[Path, GenericSet]:
    """Return where a user's data is and the mapping of its columns, and print what was found.

    Args:
        named: a folder, a file or a hub id.
        split: the split to take; "" for train, or the first.
        revision: the commit of a hub id; "" for the newest.
        given: columns that the user named, by ours.
        answer_form: the form of the answers; "" to guess it.
        encoding: that of text; "" for UTF-8.
        out: the prepared set, for the command in a message.

    Raises UserError as `find_data` and `guess` do.
    """
    if not Path(named).exists():
        revision = revision or newest_commit(named)
    path, commit = locate(named, revision)
    data = find_data(path, split)
    for table in data.tables:
        check_utf8_name(table)
    how = {"answer_form": answer_form, "encoding": encoding, "out": out}
    mapping = guess(path, data, given, named=named if commit else "", **how)
    if commit:
        mapping = mapping.model_copy(update={"revision": commit})
    count = f"{len(data.tables)} files" if len(data.tables) > 1 else data.tables[0].name
    print(f"{named}: {data.format}, {count}")
    if len(data.splits) > 1:
        others = ", ".join(name for name in data.splits if name != data.split)
        print(f"split: {data.split}; for a different one: --split, of {others}")
    for source, facts in SOURCES.items():
        if facts.hub.lower().endswith(f"/{Path(named).name.lower()}"):
            print(f"note: if this is {facts.hub}, prepare it by its rules: vlm-rl prepare {source} --source {named}")
    print("\nmapping (save it as a YAML file to change it, then: vlm-rl prepare FILE.yaml --out SET)")
    print(textwrap.indent(mapping.text(), "  "))
    return path, mapping


def print_examples(rows: Iterable[UsableRow | DroppedRow]) -> None:
    """Print the first problems as they will be asked, and why rows before them are dropped."""
    shown, dropped = 0, 0
    for row in islice(rows, SAMPLE_ROWS):
        if isinstance(row, UsableRow):
            shown += 1
            print("\n".join(_example(shown, row)) + "\n")
        elif (dropped := dropped + 1) <= EXAMPLES:
            print(f"{row.where} is dropped: {_visible(row.detail)} ({row.reason})\n")
        if shown == EXAMPLES:
            return


def _example(number: int, row: UsableRow) -> Iterator[str]:
    problem = row.problem
    yield f"example {number}, {row.where}"
    yield textwrap.indent(_visible(problem.question), "  | ", lambda line: True)
    names = [ref.name if isinstance(ref, ImageFile | ZipMember | TarMember) else "in the table" for ref in row.images]
    yield f"  images: {_visible(', '.join(names)) if names else 'none'}"
    alternatives = problem.meta.get("alternatives") or ()
    others = f", or {_visible(', '.join(alternatives))}" if alternatives else ""
    yield f"  answer: {_visible(problem.answer)} ({problem.answer_type}){others}"
    if response := problem.meta.get("response"):
        yield textwrap.indent(_visible(response), "  > ", lambda line: True)


def _visible(text: str) -> str:
    text = replace_invisible(text, lambda _: "?", keep="\n").encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]} ..."
