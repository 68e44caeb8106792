"""Training rows that share text or pictures with prepared benchmarks.

Text: 13 words in a row that a benchmark's question has too; a question of fewer words must be the same
as a whole, and the pictures (if any) must look the same. Words in a row that more than COMMON training
rows have are phrases of the trade ("where m and n are relatively prime positive integers") and prove
nothing. Pictures: at most NEAR_BITS of 256 bits of the perceptual hash differ.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from vlm_rl.data_prep.filters import NEAR_BITS, hash_words
from vlm_rl.data_prep.prepared_set import DATA
from vlm_rl.errors import UserError

WORDS = 13
COMMON = 20

_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Match:
    """One training row and the benchmark row that it shares something with."""

    benchmark: str  # "set/id"
    kind: str  # text or picture
    detail: str


@dataclass(slots=True)
class Benchmarks:
    """The questions and pictures of prepared benchmarks, indexed."""

    names: list[str] = field(default_factory=list)  # "set/id" of each row
    grams: dict[bytes, int] = field(default_factory=dict)  # digest of 13 words -> row
    short: dict[bytes, list[int]] = field(default_factory=dict)  # digest of a short question -> rows
    pictures: list[list[str]] = field(default_factory=list)  # perceptual hashes of each row
    _words: np.ndarray | None = None  # uint64 [pictures, 4]
    _owners: list[int] = field(default_factory=list)  # row of each of them

    @classmethod
    def open(cls, paths: Sequence[Path]) -> Benchmarks:
        """Read prepared sets. Raises UserError as `check_prepared` does."""
        import pyarrow.parquet as pq

        check_prepared(paths)
        index = cls()
        for path in paths:
            with pq.ParquetFile(path / DATA) as file:
                for batch in file.iter_batches(columns=["id", "question", "meta", "originals"]):
                    for row in batch.to_pylist():
                        text = json.loads(row["meta"]).get("typeset_text") or row["question"]
                        phashes = [original["phash"] for original in row["originals"]]
                        index.add(f"{path.name}/{row['id']}", text, phashes)
        return index

    def add(self, name: str, question: str, phashes: Sequence[str]) -> None:
        row = len(self.names)
        self.names.append(name)
        self.pictures.append(list(phashes))
        words = words_of(question)
        for digest in grams_of(words):
            self.grams.setdefault(digest, row)
        if 0 < len(words) < WORDS:
            self.short.setdefault(_digest(words), []).append(row)
        self._owners += [row] * len(phashes)
        self._words = None

    def by_text(self, question: str, phashes: Sequence[str]) -> list[tuple[bytes, int]]:
        """(what is shared, benchmark row) of every shared run of words, or of the whole short question."""
        words = words_of(question)
        if len(words) >= WORDS:
            return [(digest, self.grams[digest]) for digest in grams_of(words) if digest in self.grams]
        digest = _digest(words)
        rows = self.short.get(digest, [])
        return [(digest, row) for row in rows if _same_pictures(phashes, self.pictures[row])]

    def by_picture(self, phashes: Sequence[str]) -> int | None:
        """The benchmark row with a picture that looks like one of these."""
        if self._words is None:
            self._words = hash_words([phash for row in self.pictures for phash in row])
        for phash in phashes:
            if len(self._words) == 0 or int(phash, 16) == 0:  # without contrast: like every other such
                continue
            distance = np.bitwise_count(self._words ^ hash_words([phash])).sum(axis=1)
            nearest = int(distance.argmin())
            if distance[nearest] <= NEAR_BITS:
                return self._owners[nearest]
        return None


def check_prepared(paths: Sequence[Path]) -> None:
    """Raises UserError for a folder that is no prepared set, or was prepared by an older version."""
    import pyarrow.parquet as pq

    for path in paths:
        if not (path / DATA).is_file():
            raise UserError(f"--against {path}: not a prepared set; `vlm-rl prepare` makes one")
        if "originals" not in pq.read_schema(path / DATA).names:
            raise UserError(f"--against {path}: prepared by an older version; prepare it again")


def overlaps(
    rows: Iterator[tuple[int, str, Sequence[str]]], benchmarks: Benchmarks, *, common: int = COMMON
) -> dict[int, Match]:
    """Row number -> its match, of (row number, question, perceptual hashes); common phrases do not count."""
    texts: dict[int, list[tuple[bytes, int]]] = {}
    found: dict[int, Match] = {}
    sharing: Counter[bytes] = Counter()
    for number, question, phashes in rows:
        hits = benchmarks.by_text(question, phashes)
        if hits:
            texts[number] = hits
            sharing.update({digest for digest, _ in hits})
        owner = benchmarks.by_picture(phashes)
        if owner is not None:
            name = benchmarks.names[owner]
            found[number] = Match(name, "picture", f"a picture looks like one of {name}")
    for number, hits in texts.items():
        rare = [row for digest, row in hits if sharing[digest] <= common]
        if rare:
            name = benchmarks.names[Counter(rare).most_common(1)[0][0]]
            found[number] = Match(name, "text", f"shares {len(rare)} runs of {WORDS} words, or its text, with {name}")
    return dict(sorted(found.items()))


def words_of(text: str) -> list[str]:
    """Words and numbers in lower case; markers are none."""
    return _WORD.findall(text.replace("<image>", " ").casefold())


def grams_of(words: Sequence[str]) -> list[bytes]:
    """Digests of every WORDS words in a row."""
    return [_digest(words[start : start + WORDS]) for start in range(len(words) - WORDS + 1)]


def _digest(words: Sequence[str]) -> bytes:
    return hashlib.blake2b(" ".join(words).encode(), digest_size=8).digest()


def _same_pictures(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    if len(ours) != len(theirs):
        return False
    return all((int(a, 16) ^ int(b, 16)).bit_count() <= NEAR_BITS for a, b in zip(ours, theirs, strict=True))
