"""The command `vlm-rl prepare`: its options and its printed summary."""

from __future__ import annotations

import argparse
import codecs
import hashlib
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from vlm_rl.errors import UserError
from vlm_rl.untrusted.plain_files import check_plain, check_utf8_name

if TYPE_CHECKING:
    from vlm_rl.data.prompts import PromptBuilder
    from vlm_rl.data_prep.options import Options
    from vlm_rl.data_prep.preparation import PrepareReport
    from vlm_rl.data_prep.readers.generic import GenericSet


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `vlm-rl prepare`."""
    parser.add_argument(
        "source",
        metavar="PATH|NAME",
        help="your own data: a folder, a file, a hub id or a YAML mapping; or, with --source, a data set's name "
        "(docs/data.md lists them), generic, or mix",
    )
    parser.add_argument(
        "--source",
        "--from",
        dest="path",
        help="with a NAME: its folder, file or hub id; a YAML file for generic, mix",
    )
    parser.add_argument("--out", type=Path, metavar="SET", help="the prepared set, a new folder")
    parser.add_argument("--dry-run", action="store_true", help="print mapping and examples, and write nothing")
    parser.add_argument("--revision", default="", help="commit of a hub id (own data: the newest)")
    parser.add_argument("--split", default="", help="of a data set that has several (default: train, or the first)")
    columns = parser.add_argument_group("columns of your own data", "By default they are guessed. a.b is b inside a.")
    columns.add_argument("--question", metavar="COLUMN", help="texts, or conversations")
    columns.add_argument("--answer", metavar="COLUMN", help="the right answers, or conversations")
    columns.add_argument(
        "--images", nargs="+", metavar="COLUMN", help="paths, bytes or base64; one column or several"
    )
    columns.add_argument(
        "--choices", nargs="+", metavar="COLUMN", help="the options, or a column for each; none: there are no options"
    )
    columns.add_argument(
        "--answer-form",
        default="",
        metavar="FORM",
        help="how the answers are written (docs/data.md; by default as they look)",
    )
    columns.add_argument(
        "--response", metavar="COLUMN", help="whole responses for `vlm-rl sft`, or conversations (never guessed)"
    )
    columns.add_argument(
        "--encoding", default="", help="of text tables, e.g. cp1252, gbk (default: UTF-8, or by its mark)"
    )
    images = parser.add_argument_group("images")
    images.add_argument("--min-pixels", type=int, default=3136, help="smaller images are scaled up")
    images.add_argument("--max-pixels", type=int, default=1_003_520, help="larger images are scaled down")
    images.add_argument(
        "--patch-size",
        type=int,
        help="14: Qwen2-VL, Qwen2.5-VL; 16: Qwen3-VL (default: of --tokenizer's model, or 14)",
    )
    images.add_argument(
        "--text-image", choices=["none", "blank", "typeset"], default="none", help="what text-only problems get"
    )
    filters = parser.add_argument_group("filters")
    filters.add_argument("--strict", action="store_true", help="stop at the first bad row instead of counting it")
    filters.add_argument("--limit", type=int, help="keep at most this many rows")
    filters.add_argument(
        "--max-row-bytes", type=int, default=256 << 20, metavar="BYTES", help="a row that unpacks to more is dropped"
    )
    filters.add_argument(
        "--hold-out", type=float, default=0.0, metavar="SHARE", help="of the problems, for a second set SET-held-out"
    )
    filters.add_argument("--min-pass-rate", type=float, default=0.0, help="rows without a rate are kept")
    filters.add_argument("--max-pass-rate", type=float, default=1.0, help="rows without a rate are kept")
    filters.add_argument("--exclude-types", nargs="*", default=[], metavar="TYPE", help="answer types")
    filters.add_argument("--since", default="", metavar="DAY", help="leave out problems that are older")
    filters.add_argument("--until", default="", metavar="DAY", help="and those of this day or later")
    filters.add_argument("--keep-duplicates", action="store_true", help="copies of a problem are not dropped")
    filters.add_argument(
        "--against", type=Path, nargs="*", default=[], metavar="SET", help="prepared benchmarks to share nothing with"
    )
    filters.add_argument("--keep-overlap", action="store_true", help="count what --against finds, but keep it")
    length = parser.add_argument_group("prompt length")
    length.add_argument("--tokenizer", type=Path, metavar="MODEL", help="model folder to count prompt tokens with")
    length.add_argument("--template", default="think_answer", help="the run's data.template, or a file of one")
    length.add_argument("--max-prompt-tokens", type=int, help="images expanded; longer prompts are left out")
    parser.add_argument("--workers", type=int, default=min(os.cpu_count() or 1, 8), help="processes for the images")
    parser.add_argument("--seed", type=int, default=0, help="of the report's random problems")


def run(arguments: argparse.Namespace) -> None:
    """Prepare a set and print its counts."""
    from vlm_rl.data_prep.readers.row_limit import set_max_row_bytes

    set_max_row_bytes(arguments.max_row_bytes)
    for path in (arguments.path or arguments.source, arguments.out or ""):
        check_utf8_name(path)
    out = _out(arguments)
    if arguments.source == "mix" and arguments.path:
        from vlm_rl.data_prep.mix_sets import mix_sets

        _check_mix(arguments)
        print(mix_sets(Path(arguments.path), out))
        return
    from vlm_rl.data_prep.partial_set import held_out_beside
    from vlm_rl.data_prep.preparation import check_arguments, prepare
    from vlm_rl.data_prep.shards import TileTokens
    from vlm_rl.grading.grader import Grader

    options = _options(arguments)
    source, path, revision, mapping = _inputs(arguments)
    counts_tokens = arguments.tokenizer is not None
    check_arguments(source, path, options, workers=arguments.workers, counts_tokens=counts_tokens)
    count_tokens = counted_with = tile_tokens = None
    if counts_tokens:
        builder = _open_builder(arguments.tokenizer, arguments.template, options)
        count_tokens = builder.count_unexpanded
        counted_with = _origin(arguments.tokenizer, Path(builder.model_path), arguments.template)
        options = _on_grid_of(builder, options, chosen=arguments.patch_size)
        if builder.patch_size is None:
            tile_tokens = TileTokens(Path(builder.model_path), options.min_pixels, options.max_pixels)
    if mapping or arguments.dry_run:
        _print_examples(source, path, mapping, options.split)
    if arguments.dry_run:
        print("dry run: nothing was written")
        return
    with Grader() as grader:
        report = prepare(
            source,
            path,
            out,
            options,
            gold_check=grader.verifies_itself,
            count_tokens=count_tokens,
            tile_tokens=tile_tokens,
            counted_with=counted_with,
            revision=revision,
            mapping=mapping,
            workers=arguments.workers,
        )
    _print_counts(out, report)
    if report.held_out:
        _print_counts(held_out_beside(out), report.held_out)


def _check_mix(arguments: argparse.Namespace) -> None:
    """Raise UserError for an option that a mix would ignore."""
    if arguments.dry_run:
        raise UserError("--dry-run: a mix has no examples of its own; prepare it without")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    used = ("source", "path", "out", "workers")
    for action in parser._actions:
        if action.dest in used or getattr(arguments, action.dest, action.default) == action.default:
            continue
        option = action.option_strings[0]
        if option in ("--limit", "--seed"):
            raise UserError(f"{option}: a mix says in its file how many rows it takes, and by which seed")
        raise UserError(
            f"{option}: a mix is made of prepared sets as they are; give it where each of them is prepared"
        )


def _print_counts(out: Path, report: PrepareReport) -> None:
    reasons = dict(report.dropped)
    other = reasons.pop("other_set", 0)  # not lost: it is in the other of the two sets
    apart = f", {other} {'not held out' if report.options.is_held_out else 'held out'}" if other else ""
    dropped = ", ".join(f"{count} {reason}" for reason, count in reasons.items()) or "none"
    reused = f"; {report.shards_reused} shards were finished already" if report.shards_reused else ""
    print(f"{out}: {report.rows_in} rows in, {report.kept} kept{apart}, dropped: {dropped}{reused}")
    print(f"{out / 'report.html'} shows it")
    if bad_texts := report.dropped.get("bad_text"):
        print(
            f"{bad_texts} rows hold text that is not UTF-8 (dropped.jsonl has examples): if the file has an "
            "encoding of its own, name it with --encoding, e.g. cp1252 or gbk"
        )
    if kept := report.notes.get("system"):
        print(
            f"{kept} rows have a system or developer text, which a prompt holds after the template's own: where it "
            "asks for a different form of the answer, remove it from the table"
        )
    if missing := report.dropped.get("image_missing"):
        print(
            f"{missing} rows name images that do not exist (dropped.jsonl has examples): if the images are a "
            "separate download, put them beside the table and prepare again"
        )


def _out(arguments: argparse.Namespace) -> Path:
    """Return the folder to write. Raises UserError if it is not named and something would be written."""
    if arguments.out is None and not arguments.dry_run:
        raise UserError("--out is missing: name the folder of the prepared set, e.g. --out data/my_set")
    return arguments.out or Path()


def _inputs(arguments: argparse.Namespace) -> tuple[str, Path, str, GenericSet | None]:
    """Return the source, where its files are, their commit, and, for a user's own data, the guessed mapping."""
    from vlm_rl.data_prep.readers.generic import AnswerForm
    from vlm_rl.data_prep.readers.own_data import map_own_data
    from vlm_rl.data_prep.readers.sources import SOURCES

    check_plain(arguments.path or arguments.source)
    given = {ours: getattr(arguments, ours) for ours in ("question", "answer", "images", "choices", "response")}
    given = {ours: [names] if isinstance(names, str) else names for ours, names in given.items() if names}
    is_mapping = arguments.source.endswith((".yaml", ".yml"))
    form, encoding = arguments.answer_form, arguments.encoding
    if encoding and not _is_encoding(encoding):
        raise UserError(f"--encoding {encoding}: Python knows no encoding of this name; e.g. cp1252, gbk, shift_jis")
    named = [*given, *(["answer-form"] if form else []), *(["encoding"] if encoding else [])]
    if named and (arguments.path or is_mapping):
        raise UserError(f"--{named[0]}: this is for `vlm-rl prepare PATH`, which guesses the columns")
    if arguments.path or is_mapping:
        source = arguments.source if arguments.path else "generic"
        return source, *_locate(source, arguments.path or arguments.source, arguments.revision), None
    if arguments.source in SOURCES or arguments.source in ("mix", "generic"):
        raise UserError(
            f"{arguments.source} is the name of a data set: say where its files are with --source; "
            f"a folder of yours with this name is ./{arguments.source}"
        )
    if form and form not in get_args(AnswerForm):
        raise UserError(f"--answer-form {form}: known are {', '.join(get_args(AnswerForm))}")
    path, mapping = map_own_data(
        arguments.source,
        split=arguments.split,
        revision=arguments.revision,
        given=given,
        answer_form=form,
        encoding=encoding,
        out=str(arguments.out or "SET"),
    )
    return "generic", path, mapping.revision, mapping


def _is_encoding(name: str) -> bool:
    try:
        return codecs.lookup(name)._is_text_encoding
    except LookupError:
        return False


def _print_examples(source: str, path: Path, mapping: GenericSet | None, split: str) -> None:
    from vlm_rl.data_prep.readers.generic import read_mapped
    from vlm_rl.data_prep.readers.own_data import print_examples
    from vlm_rl.data_prep.readers.sources import SOURCES

    print_examples(read_mapped(path, mapping, named=path) if mapping else SOURCES[source].read(path, split))


def _options(arguments: argparse.Namespace) -> Options:
    """Return the checked options of the command line."""
    from vlm_rl.data_prep.options import Options

    names = [field.name for field in fields(Options) if field.name in arguments]
    values: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    if values["patch_size"] is None:
        values["patch_size"] = Options().patch_size
    values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
    options = Options(**values)
    options.check()
    return options


def _locate(source: str, named: str, revision: str) -> tuple[Path, str]:
    """Return the data set's path and its commit, "" for a local one; a generic table's YAML file may name it."""
    from vlm_rl.data_prep.readers.generic import load_mapping
    from vlm_rl.data_prep.readers.hub import locate
    from vlm_rl.data_prep.readers.sources import SOURCES

    path, commit = locate(named, revision, SOURCES[source].files if source in SOURCES else ())
    return path, load_mapping(path).revision if source == "generic" and path.is_file() else commit


def _open_builder(model: Path, template: str, options: Options) -> PromptBuilder:
    """Return a function that counts a prompt's tokens."""
    from vlm_rl.config import find_template
    from vlm_rl.data.prompts import PromptBuilder
    from vlm_rl.run.checkpoint_names import resolve_model
    from vlm_rl.templates import TEMPLATES

    asked = find_template(template)
    if asked is None:
        raise UserError(f"--template is {template!r}; known: {', '.join(TEMPLATES)}, or a YAML file of your own")
    model = resolve_model(model, weights=False)
    if not model.is_dir():
        raise UserError(f"--tokenizer {model}: no such folder; give a model's folder, a run, or ORG/NAME of the hub")
    return PromptBuilder(model, template=asked, min_pixels=options.min_pixels, max_pixels=options.max_pixels)


def _on_grid_of(builder: PromptBuilder, options: Options, *, chosen: int | None) -> Options:
    """Return the options with the patch size of the builder's model, where it takes images.

    Raises UserError if a different one was chosen.
    """
    if not builder.is_vision or builder.patch_size is None:  # a model with tiles takes images of any grid
        return options
    if chosen not in (None, builder.patch_size):
        raise UserError(
            f"--patch-size {chosen}: the model of --tokenizer {builder.model_path} has patches of "
            f"{builder.patch_size} pixels; leave the option out to take the model's"
        )
    options = replace(options, patch_size=builder.patch_size)
    options.check()
    return options


def _origin(named: Path, folder: Path, template: str) -> dict[str, str]:
    """Describe the counting of tokens for the manifest: by which tokenizer, found in which folder."""
    file = folder / "tokenizer.json"
    digest = hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
    return {"tokenizer": named.name, "sha256": digest, "template": template}
