"""YAML that somebody else wrote: within limits, and one message whatever is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from vlm_rl.cli import main
from vlm_rl.config import load_config
from vlm_rl.data_prep.card import licence_of
from vlm_rl.errors import UserError

TEN = "*{0}, *{0}, *{0}, *{0}, *{0}, *{0}, *{0}, *{0}, *{0}, *{0}"
LAUGHS = "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [{TEN.format(f'a{n - 1}')}]\n" for n in range(1, 9))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LAUGHS, "more than 100000 values"),
        ("a: " + "[" * 5000, "nested too deep"),
        ("a: &a [*a]", "nested too deep"),
        ("a: &a {b: *a}", "nested too deep"),
        ("seed: " + "9" * 10_000, "cannot be read as YAML: line 1: a number of 10000 digits"),
        ("seed: 0x" + "f" * 10_000, "cannot be read as YAML: line 1: a number of 10002 digits"),
        ('out: "\\ud800"', "cannot be read as YAML: .*surrogates not allowed"),
        ('out: "a\\0"', "cannot be read as YAML: line 1: a text with a zero"),
        ("algorithm: {name: [", "cannot be read as YAML: line 1, column 20: while parsing a flow node, expected the"),
        ("out: 'x\n\n", "cannot be read as YAML: line 3, column 1: while scanning a quoted scalar of line 1, found"),
        ("seed: !!int x", "cannot be read as YAML: invalid literal for int"),
        ("seed: !!bool x", "cannot be read as YAML: a value is not what its tag or its form says .KeyError"),
        ("seed: !!timestamp x", "cannot be read as YAML: a value is not what its tag or its form says .Attribute"),
        ("train: {lr: 1" + ":59" * 300 + ".5}", "cannot be read as YAML: a value is not what its .*OverflowError"),
        ("#" * (1 << 19), "cannot be read as YAML: it has more than 262144 characters"),
        ("extends: " + "x" * 5000, "it must name a YAML file"),
        ("data: {template: " + "x" * 5000 + ".yaml}", "data.template: there is no file"),
    ],
    ids=[
        *(
            "laughs",
            "deep",
            "itself",
            "its own value",
            "digits",
            "hexadecimal digits",
            "half a pair",
            "a zero",
            "an open list",
            "an open text",
            "an int",
            "a bool",
            "a time",
        ),
        *("sixties", "a long file", "a long name to extend", "a long name of a template"),
    ],
)
def test_a_configuration_without_an_end_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(UserError, match=message):
        load_config(tmp_path / "c.yaml")


def test_nor_is_another_trainers_file_or_a_card_without_an_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "theirs.yaml").write_text(LAUGHS)
    assert main(["init", "--from", str(tmp_path / "theirs.yaml")]) == 2
    assert "theirs.yaml cannot be read as YAML: it repeats parts" in capsys.readouterr().err
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "rows.csv").write_text("question,answer\nhow many?,3\n")
    (tmp_path / "raw" / "README.md").write_text(f"---\n{LAUGHS}license: *a8\n---\n")
    assert main(["prepare", str(tmp_path / "raw"), "--out", str(tmp_path / "set")]) == 0
    assert "license: unknown" in (tmp_path / "set" / "README.md").read_text()


@pytest.mark.parametrize(
    "header",
    ["license: 2001-99-99", "license: 5", "license: !!int x", LAUGHS + "license: *a8", "license: " + "[" * 1000],
)
def test_a_card_that_cannot_be_read_names_no_licence(tmp_path: Path, header: str) -> None:
    """A card is of whoever wrote the data set, and only its licence is read."""
    (tmp_path / "README.md").write_text(f"---\n{header}\n---\n\n# A set\n")
    assert licence_of(tmp_path) == ""
    (tmp_path / "README.md").write_text("---\nlicense: [mit, apache-2.0]\n---\n")
    assert licence_of(tmp_path) == "mit, apache-2.0"
