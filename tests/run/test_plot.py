"""The figures of a run: what there is to draw, and what is said where there is nothing."""

from __future__ import annotations

import math

import pytest

from vlm_rl.errors import UserError
from vlm_rl.run.plot import plot_run

SUPERVISED = [{"step": step, "attempt": 1, "loss": 1 / step} for step in (1, 2)]  # logs neither lengths nor rewards


@pytest.mark.parametrize("what", ["length", "reward", "loss"])
def test_a_run_without_a_step_has_nothing_to_plot(what: str) -> None:
    with pytest.raises(UserError, match="new has logged no step"):
        plot_run("new", [], [], what)


@pytest.mark.parametrize("what", ["length", "reward"])
def test_what_a_run_lacks_is_not_proposed(what: str) -> None:
    with pytest.raises(UserError, match=f"no metric '{what}': it has loss, "):
        plot_run("run", SUPERVISED, [], what)


@pytest.mark.parametrize("values", [[0.5], [0.5, 0.5], [math.nan], [math.nan, 1.0]])
def test_one_step_equal_values_and_gaps_are_drawn(values: list[float]) -> None:
    metrics = [{"step": step, "attempt": 1, "loss": value} for step, value in enumerate(values, start=1)]
    assert plot_run("run", metrics, [], "loss")._repr_png_().startswith(b"\x89PNG")


def test_a_name_with_dollar_signs_is_no_formula() -> None:
    metrics = [{"step": 1, "attempt": 1, "a$b_$": 1.0}]
    assert plot_run("run$b_$", metrics, [], "a$b_$")._repr_png_().startswith(b"\x89PNG")
