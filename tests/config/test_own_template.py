"""A prompt template of one's own: what is refused of its file, where it is looked for, and what a run keeps of it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from vlm_rl.config import load_config, read_template, save_config
from vlm_rl.errors import UserError
from vlm_rl.templates import TEMPLATES

RECIPE = {"out": "runs/x", "model": {"path": "some/model"}, "data": {"train": ["data/toy"], "template": "mine.yaml"}}
LINE = {
    "system": 'Think, then end with a line "Answer: ..."\nand nothing more.',
    "suffix": " Let us think.",
    "answer": r"(?m)^Answer: (?P<answer>.*)$",
    "form": r".+\nAnswer: [^\n]+",
    "example": "{reasoning}\nAnswer: {answer}",
}


def write(path: Path, tree: object) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(yaml.safe_dump(tree))
    return path


def test_a_run_keeps_the_template_s_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a recipe the path is seen from the recipe's folder, in an override from the working folder."""
    file = write(tmp_path / "recipes" / "mine.yaml", LINE)
    recipe = write(tmp_path / "recipes" / "recipe.yaml", RECIPE)
    template = load_config(recipe).data.prompt_template
    assert asdict(template) == asdict(TEMPLATES["plain"]) | LINE | {"name": "mine"}

    save_config(load_config(recipe), tmp_path / "config.yaml")
    write(tmp_path / "other.yml", {"system": "Box it."})
    monkeypatch.chdir(tmp_path)
    assert load_config(recipe, ["data.template=other.yml"]).data.prompt_template.system == "Box it."
    assert load_config(recipe, ["data.template=plain"]).data.prompt_template == TEMPLATES["plain"]
    child = write(tmp_path / "child.yaml", {"extends": "recipes/recipe.yaml", "seed": 1})
    assert load_config(child).data.prompt_template == template
    child = write(tmp_path / "child.yaml", {"extends": "recipes/recipe.yaml", "data": {"template": "other.yml"}})
    assert load_config(child).data.prompt_template.suffix == ""
    file.unlink()
    assert load_config(tmp_path / "config.yaml").data.prompt_template == template
    with pytest.raises(UserError, match=r"no file .*recipes/mine.yaml; give one, or one of think_answer"):
        load_config(recipe)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"sytem": "x"}, "unknown key sytem: did you mean 'system'"),
        ({"system": 3}, "system is 3: Input should be a valid string"),
        ({"reasoning_block": "yes please"}, "reasoning_block is 'yes please'"),
        ({"answer": "boxd"}, "answer is 'boxd': write box, program, text, last_line, or a regular expression"),
        ({"answer": "Answer: (?P<answer>.*"}, "answer is 'Answer: (?P<answer>.*': missing )"),
        ({"answer": "(Answer): (?P<answer>.*)"}, "must be of the kind (?:...)"),
        ({"answer": "(?=A)(?P<answer>.*)"}, "invalid perl operator: (?=; write it as RE2 reads it"),
        ({"form": r"(a)\1"}, r"form is '(a)\\1': invalid escape sequence: \1; write it as RE2 reads it"),
        ({"form": "(a{1000}){1000}"}, "form is '(a{1000}){1000}': invalid repetition size"),
        (
            {"form": "Answer: .*"},
            "form is 'Answer: .*', and the perfect response 'Two and two make four.\\nAnswer: 4'",
        ),
        ({"answer": "Result: (?P<answer>.*)"}, "finds nothing in the perfect response"),
        ({"answer": "(?P<answer>.)[0-9]"}, "finds [''] in the perfect response"),
        ({"answer": "text"}, r"finds ['Two and two make four.\nAnswer: 4'] in the perfect response"),
        ({"example": ""}, "example is missing: beside a regular expression, give a perfect response"),
        ({"example": "{reasoning} Answer:"}, "example is '{reasoning} Answer:': it must hold {answer} once"),
        ({"prefill": "<think>"}, "prefill is '<think>', and the perfect response"),
        ({"name": "plain"}, "name is 'plain', which a shipped template has"),
        ({"name": "a b"}, "name is 'a b': it may have 40 letters"),
        ({"system": "${x}"}, "interpolation is not supported"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path: Path, change: dict[str, object], said: str) -> None:
    """The catastrophic patterns of other engines are harmless here: RE2 does not go back."""
    file = write(tmp_path / "mine.yaml", LINE | change)
    recipe = write(tmp_path / "recipe.yaml", RECIPE)
    with pytest.raises(UserError) as caught:
        load_config(recipe)
    message = str(caught.value)
    assert message.startswith(f"{file}: ") and said in message, message


def test_a_pattern_without_an_end_elsewhere_ends_here(tmp_path: Path) -> None:
    """Backtracking engines need 2^n steps for (a+)+b on n letters; a megabyte of them is read here."""
    evil = {"form": "(a+)+b(.|\n)*", "example": "ab{reasoning}\\boxed{{answer}}"}
    template = read_template(write(tmp_path / "mine.yaml", evil)).record
    assert template.is_well_formed("a" * 1_000_000 + "b \\boxed{4}")
    assert not template.is_well_formed("a" * 1_000_000)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("think_awnser", "data.template: it is 'think_awnser': did you mean 'think_answer'"),
        ({"name": "a", "sytem": "x"}, "unknown key data.template.sytem: did you mean"),
        ({"system": "x"}, "data.template.name is missing"),
        ({"name": "a", "answer": "x"}, "data.template: answer is 'x': write box"),
        (3, "data.template: it is 3: known: think_answer, think_box, think_code, plain, or a file"),
    ],
)
def test_a_template_in_the_recipe_itself_is_checked_too(tmp_path: Path, value: object, said: str) -> None:
    recipe = write(tmp_path / "recipe.yaml", RECIPE | {"data": {"train": ["data/toy"], "template": value}})
    with pytest.raises(UserError) as caught:
        load_config(recipe)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{recipe}: ") and said in line


def test_the_shipped_templates_pass_the_same_checks(tmp_path: Path) -> None:
    for name, template in TEMPLATES.items():
        tree = {key: value for key, value in asdict(template).items() if key != "name"}
        record = read_template(write(tmp_path / f"my_{name}.yaml", tree)).record
        assert asdict(record) | {"name": name} == asdict(template)
