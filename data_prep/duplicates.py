"""Find the training rows that repeat an earlier row of the same set."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence

import numpy as np

from vlm_rl.data_prep.records import DroppedRow, KeptRow

NEAR_BITS = 32  # of 256: resizing or encoding an image again changes fewer, a different image some 100

_IGNORED = re.compile(r"\s|\$|\\[,;:! ]|\\(?:left|right|displaystyle|mathrm|text)(?![a-z])|[{}]")


def normalised(text: str) -> str:
    """Return the text without what copies of a problem may differ in: case, spaces, dollars, braces, a final stop."""
    return _IGNORED.sub("", unicodedata.normalize("NFKC", text).casefold()).rstrip(".?!:")


def text_key(question: str, drawn_text: str = "") -> str:
    """Return a digest of the normalised question; `drawn_text` is the part of it that we drew into an image."""
    return hashlib.blake2b(normalised(question + drawn_text).encode(), digest_size=12).hexdigest()


def find_duplicates(rows: Sequence[KeptRow], gone: Container[int] = ()) -> dict[int, DroppedRow]:
    """Return the positions of the training rows that repeat an earlier one, with the reason each is dropped.

    Args:
        rows: of the set.
        gone: positions of rows that are dropped already. They count where copies disagree, and none stays for them.

    Same text and identical images: the first copy stays, or none does where their golds disagree. Same text and
    images that only look the same (NEAR_BITS): the later row goes if its gold agrees. With a different gold it
    is a different problem, such as a diagram with a different number in it.
    """
    groups: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        if not row.test_only:
            groups[row.text_key].append(index)
    dropped: dict[int, DroppedRow] = {}
    for members in groups.values():
        if len(members) > 1:
            dropped.update(_exact(members, rows, gone))
            dropped.update(_near([i for i in members if i not in dropped and i not in gone], rows))
    return dropped


def are_copies(row: KeptRow, other: KeptRow) -> bool:
    """Tell whether two rows are of one training problem with the same images, whatever their golds are."""
    is_same = (row.text_key, row.sha256s) == (other.text_key, other.sha256s)
    return is_same and not (row.test_only or other.test_only)


def _exact(members: Sequence[int], rows: Sequence[KeptRow], gone: Container[int]) -> Iterator[tuple[int, DroppedRow]]:
    same: Mapping[tuple[str, ...], list[int]] = defaultdict(list)
    for index in members:
        same[tuple(rows[index].sha256s)].append(index)
    for copies in same.values():
        first = rows[copies[0]]
        golds = {normalised(rows[index].answer) for index in copies}
        if len(golds) > 1:
            answers = ", ".join(sorted({rows[index].answer for index in copies}))
            detail = f"copies of this problem ({first.id} first) disagree about the answer: {answers:.200}"
            yield from ((i, DroppedRow(rows[i].where, "gold_conflict", detail, known=True)) for i in copies)
        else:
            left = [index for index in copies if index not in gone]
            detail = f"the same problem and images as {rows[left[0]].id}" if left else ""
            yield from ((i, DroppedRow(rows[i].where, "duplicate", detail, known=True)) for i in left[1:])


def _near(members: Sequence[int], rows: Sequence[KeptRow]) -> Iterator[tuple[int, DroppedRow]]:
    alike: Mapping[tuple[str, int], list[int]] = defaultdict(list)  # same gold, as many images
    for index in members:
        alike[normalised(rows[index].answer), len(rows[index].phashes)].append(index)
    for (_, num_images), indices in alike.items():
        # One question may be asked of very many images: all that stay are compared with a row at once.
        hashes = hash_words([phash for index in indices for phash in rows[index].phashes])
        hashes = hashes.reshape(len(indices), num_images, 4)
        stay: list[int] = []
        of_stay = np.empty_like(hashes)
        for index, own in zip(indices, hashes, strict=True):
            distances = np.bitwise_count(of_stay[: len(stay)] ^ own).sum(axis=2)
            twins = np.flatnonzero((distances <= NEAR_BITS).all(axis=1))
            if len(twins):
                detail = f"the same text as {rows[stay[twins[0]]].id}, and images that look the same"
                yield index, DroppedRow(rows[index].where, "near_duplicate", detail, known=True)
            else:
                of_stay[len(stay)] = own
                stay.append(index)


def look_the_same(phashes: Sequence[str], others: Sequence[str]) -> bool:
    """Tell whether as many images, each within NEAR_BITS of its counterpart, are behind these perceptual hashes."""
    if len(phashes) != len(others):
        return False
    pairs = zip(phashes, others, strict=True)
    return all((int(a, 16) ^ int(b, 16)).bit_count() <= NEAR_BITS for a, b in pairs)


def hash_words(phashes: Sequence[str]) -> np.ndarray:
    """Return perceptual hashes as uint64 [n, 4]."""
    return np.frombuffer(b"".join(map(bytes.fromhex, phashes)), dtype=np.uint64).reshape(-1, 4)
