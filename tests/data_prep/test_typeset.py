"""Draw a problem's text as an image."""

from __future__ import annotations

import json
import tracemalloc

import numpy as np
import pytest
from PIL import Image, ImageFont

from tests.helpers.prepared_sets import rows_of
from vlm_rl.data.images import decode_image
from vlm_rl.data_prep.options import Options
from vlm_rl.data_prep.preparation import prepare
from vlm_rl.data_prep.records import RowError
from vlm_rl.data_prep.typeset import _font, typeset
from vlm_rl.toy.virl_layout import write_virl


@pytest.mark.slow
def test_text_problems_become_images_of_their_text(tmp_path) -> None:
    rows = [
        {"question": r"Find $\frac{1}{2} + x^2$ when $x=3$."},
        {"question": "求方程的解"},
        {"question": "long " * 9000},
    ]
    source = write_virl(tmp_path / "virl", rows, {})
    report = prepare("virl39k", source, tmp_path / "out", Options(text_image="typeset"))
    assert report.dropped == {"typeset_font": 1, "typeset_too_long": 1}
    (row,) = rows_of(tmp_path / "out")
    assert row["question"] == "<image>\nSolve the problem in the image."
    image = decode_image(row["images"][0]["bytes"], where="x")
    grey = np.asarray(image.convert("L"))
    assert image.width == 728 and (grey[:, :20] == 255).all() and (grey < 64).any()
    assert json.loads(row["meta"])["typeset_text"] == rows[0]["question"]


def test_a_longer_text_is_a_taller_image_and_a_formula_is_set() -> None:
    short, long = typeset("Ten words.", max_pixels=10**6), typeset("Ten words. " * 30, max_pixels=10**6)
    assert short.width == long.width and short.height < long.height
    # A fraction is taller than its line of text; an environment is beyond mathtext and shown as its source.
    line, fraction = typeset("x", max_pixels=10**6), typeset(r"$\dfrac{\frac{a}{b}}{\frac{c}{d}}$", max_pixels=10**6)
    assert fraction.height > line.height
    # The words of a source wrap: two short lines, not one that is cut; and words inside a formula keep their spaces.
    source = r"$\begin{cases} " + "x & y " * 9 + r"\end{cases}$"
    assert (
        typeset(source, max_pixels=10**6).height > typeset(source.replace("x & y " * 9, ""), max_pixels=10**6).height
    )
    together, apart = (_ink_width(typeset(text, max_pixels=10**6)) for text in ("$xandy$", r"$x\quad\text{ and }y$"))
    assert apart > together + 20
    assert typeset(r"A \$5 note, $x^2$", max_pixels=10**6) == typeset(r"A \$5 note, \(x^2\)", max_pixels=10**6)
    display = typeset(r"\begin{equation*} x^2 \end{equation*}", max_pixels=10**6)
    assert display == typeset("$$x^2$$", max_pixels=10**6)


@pytest.mark.parametrize("text", ["a\n" * 4000, "word " * 40_000, "a" * 400_000])
def test_a_text_that_is_too_long_is_not_drawn(text: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RowError) as caught:
            typeset(text, max_pixels=10**6)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.reason == "typeset_too_long"
    assert peak < 20_000_000  # bytes; the image of 4,000 lines alone has 100 million


@pytest.mark.parametrize("text", ["كم عدد المربعات؟", "כמה ריבועים?", "five \u202esquares", r"$\text{ריבוע}$"])
def test_text_from_right_to_left_is_refused(text: str) -> None:
    with pytest.raises(RowError, match="from right to left") as caught:
        typeset(f"Look: {text}", max_pixels=10**6)
    assert caught.value.reason == "typeset_font"


def test_an_image_does_not_depend_on_a_library_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "The office of AVATAR: To flatten, we find Wy."
    images = []
    for has_raqm in (True, False):
        monkeypatch.setattr(ImageFont.core, "HAVE_RAQM", has_raqm and ImageFont.core.HAVE_RAQM)
        _font.cache_clear()
        images.append(typeset(text, max_pixels=10**6).tobytes())
    _font.cache_clear()
    assert images[0] == images[1]


def _ink_width(image: Image.Image) -> int:
    columns = np.flatnonzero((np.asarray(image.convert("L")) < 128).any(axis=0))
    return int(columns[-1] - columns[0])
