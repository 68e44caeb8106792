"""Try a model's tokenizer in a process with limits, before anything of it runs in this one.

A tokenizer.json is a program of the model's folder: its normalizer, pre-tokenizer and decoder may hold regular
expressions. The library behind them (Oniguruma) gives up on a match after ten million steps, and the panic that
follows is no Exception. An expression whose time grows with the square of a text is never stopped.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from vlm_rl.errors import UserError
from vlm_rl.model_files.model_folder import reason_of
from vlm_rl.sandbox.limited import FaultError, LimitedWorker, LimitError

_REPEATED = 80_000  # of each character: many seconds, where time grows with the square of it
_CHARACTERS = "aA0 \n.<_\u00e9\u7684"
_worker = LimitedWorker(f"{__name__}.encode", cpu_seconds=10.0, memory=2 << 30)
_faults: dict[str, str] = {}  # by the SHA-256 of a tokenizer.json; empty if it passed


def check_expressions(folder: str | Path) -> None:
    """Encode and decode long runs of characters in a process with limits.

    What one folder's tokenizer.json showed holds for an equal one in another folder.

    Raises UserError if the tokenizer.json of a folder has regular expressions that fail at this, or take too long.
    """
    file = Path(folder) / "tokenizer.json"
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return  # the tokenizer is made of other files, whose expressions are transformers'
    except OSError as error:
        raise UserError(f"model.path: {file} cannot be read: {error}") from None
    if b'"Regex"' not in data:
        return
    digest = sha256(data).hexdigest()
    if digest not in _faults:
        _faults[digest] = _try(file.resolve())
    if why := _faults[digest]:
        raise UserError(
            f"model.path: {file.resolve()}: with texts of {_REPEATED:,} equal characters it {why}: use a different "
            "tokenizer"
        )


@contextmanager
def naming_panics(folder: str) -> Iterator[None]:
    """Raise UserError if the tokenizer of a folder panics at a text, which the trial's texts did not show."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # of pyo3, which gives each library a class of its own
            raise
        raise UserError(
            f"model.path: {folder}/tokenizer.json gave up on a text ({reason_of(error)}): use a different tokenizer"
        ) from None


def _try(file: Path) -> str:
    """Try a tokenizer.json, and return its fault; "" if it has none."""
    try:
        _worker.call(str(file))
    except LimitError as limit:
        return str(limit)
    except FaultError as fault:
        return f"failed: {fault}"
    return ""


def encode(file: str) -> None:
    """Encode and decode runs of each character, with something else behind them."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(file)
    for character in _CHARACTERS:
        ids = tokenizer.encode(character * _REPEATED + "!", add_special_tokens=False).ids
        tokenizer.decode(ids, skip_special_tokens=False)
