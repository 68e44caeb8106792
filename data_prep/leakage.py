"""Find training rows that share text or images with prepared benchmarks.

Text: 13 words in a row that are in a benchmark's question too; two characters of Chinese or Japanese, which are
written without spaces, count as a word. A question with fewer words must be the same as a
whole, and its images, if any, must look the same. Words in a row that more than COMMON training rows have are
stock phrases ("where m and n are relatively prime positive integers") and prove nothing.
Images: at most NEAR_BITS of the 256 bits of their perceptual hashes differ. An image that the preparation drew for a
text-only problem counts as none.
"""

from __future__ import annotations

import hashlib
import json
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

import numpy as np

from vlm_rl.data.sets import load_set
from vlm_rl.data_prep.duplicates import NEAR_BITS, hash_words, look_the_same
from vlm_rl.data_prep.prepared_set import DATA
from vlm_rl.data_prep.records import DRAWN
from vlm_rl.errors import UserError
from vlm_rl.types import IMAGE_MARKER

WORDS = 13
COMMON = 20

_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # kana and Han characters
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")


@dataclass(frozen=True, slots=True)
class Leak:
    """What a training row shares with a row of a benchmark."""

    benchmark: str  # "set/id"
    kind: str  # text or image
    detail: str


@dataclass(slots=True)
class BenchmarkIndex:
    """The questions and images of prepared benchmarks, indexed."""

    names: list[str] = field(default_factory=list)  # "set/id" of each row
    grams: dict[bytes, int] = field(default_factory=dict)  # digest of 13 words -> row
    short: dict[bytes, list[int]] = field(default_factory=dict)  # digest of a short question -> rows
    phashes: list[list[str]] = field(default_factory=list)  # perceptual hashes of each row's images
    _hashes: np.ndarray | None = None  # the same as uint64 [images, 4], made when first needed
    _owners: list[int] = field(default_factory=list)  # row of each image

    @classmethod
    def open(cls, paths: Sequence[Path]) -> BenchmarkIndex:
        """Index prepared sets. Raises UserError as `check_prepared` does."""
        import pyarrow.parquet as pq

        check_prepared(paths)
        index = cls()
        for path in paths:
            load_set(path)  # refuses a damaged one
            with pq.ParquetFile(path / DATA) as file:
                for batch in file.iter_batches(columns=["id", "question", "meta", "originals"]):
                    for row in batch.to_pylist():
                        meta = json.loads(row["meta"] or "{}")
                        text = meta.get("typeset_text") or row["question"]
                        phashes = [original["phash"] for original in row["originals"] if DRAWN.isdisjoint(meta)]
                        index.add(f"{path.name}/{row['id']}", text, phashes)
        return index

    def add(self, name: str, question: str, phashes: Sequence[str]) -> None:
        """Add a row called `name`."""
        row = len(self.names)
        self.names.append(name)
        self.phashes.append(list(phashes))
        words = words_of(question)
        grams = grams_of(words)
        for digest in grams:
            self.grams.setdefault(digest, row)
        if words and not grams:
            self.short.setdefault(_digest(words), []).append(row)
        self._owners += [row] * len(phashes)
        self._hashes = None

    def by_text(self, question: str, phashes: Sequence[str]) -> list[tuple[bytes, int]]:
        """Return (digest, benchmark row) of each shared run of words, or of the whole question if it is short."""
        words = words_of(question)
        if grams := grams_of(words):
            return [(digest, self.grams[digest]) for digest in grams if digest in self.grams]
        digest = _digest(words)
        rows = self.short.get(digest, [])
        return [(digest, row) for row in rows if look_the_same(phashes, self.phashes[row])]

    def by_image(self, phashes: Sequence[str]) -> int | None:
        """Return the benchmark row with an image that looks like one of these."""
        if self._hashes is None:
            self._hashes = hash_words([phash for row in self.phashes for phash in row])
        for phash in phashes:
            if len(self._hashes) == 0 or int(phash, 16) == 0:  # every image without contrast has the same hash
                continue
            distance = np.bitwise_count(self._hashes ^ hash_words([phash])).sum(axis=1)
            nearest = int(distance.argmin())
            if distance[nearest] <= NEAR_BITS:
                return self._owners[nearest]
        return None


def check_prepared(paths: Sequence[Path]) -> None:
    """Raise UserError for a folder that is not a prepared set, or was prepared by an older version."""
    import pyarrow.parquet as pq

    for path in paths:
        if not (path / DATA).is_file():
            raise UserError(f"--against {path}: not a prepared set; `vlm-rl prepare` makes one")
        if "originals" not in pq.read_schema(path / DATA).names:
            raise UserError(f"--against {path}: prepared by an older version; prepare it again")


def find_leaks(rows: Iterator[tuple[int, str, Sequence[str]]], benchmarks: BenchmarkIndex) -> dict[int, Leak]:
    """Find the text or image that each leaked row shares with a benchmark.

    Args:
        rows: row number, question and perceptual hashes of each training row.
        benchmarks: what the rows must not share. Words in a row that more than COMMON rows have do not count.
    """
    texts: dict[int, list[tuple[bytes, int]]] = {}
    leaks: dict[int, Leak] = {}
    sharing: Counter[bytes] = Counter()
    for number, question, phashes in rows:
        hits = benchmarks.by_text(question, phashes)
        if hits:
            texts[number] = hits
            sharing.update({digest for digest, _ in hits})
        owner = benchmarks.by_image(phashes)
        if owner is not None:
            name = benchmarks.names[owner]
            leaks[number] = Leak(name, "image", f"an image looks like one of {name}")
    for number, hits in texts.items():
        rare = [row for digest, row in hits if sharing[digest] <= COMMON]
        if rare:
            name = benchmarks.names[Counter(rare).most_common(1)[0][0]]
            leaks[number] = Leak(name, "text", f"shares {len(rare)} runs of {WORDS} words, or its text, with {name}")
    return dict(sorted(leaks.items()))


def words_of(text: str) -> list[str]:
    """Return words, numbers and single unspaced characters of a text in lower case, without image markers."""
    return _WORD.findall(text.replace(IMAGE_MARKER, " ").casefold())


def grams_of(words: Sequence[str]) -> list[bytes]:
    """Return digests of all WORDS words in a row; a character that `words_of` gives alone is half of one."""
    halves = [1 if re.match(f"[{_UNSPACED}]", word) else 2 for word in words]
    upto = [0, *accumulate(halves)]
    ends = (bisect_left(upto, begun + 2 * WORDS) for begun in upto)
    return [_digest(words[start:end]) for start, end in enumerate(ends) if end < len(upto)]


def _digest(words: Sequence[str]) -> bytes:
    return hashlib.blake2b(" ".join(words).encode(), digest_size=8).digest()
