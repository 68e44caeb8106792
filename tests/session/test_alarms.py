"""What a run says while it trains: gradients that jump, entropy that collapses."""

from __future__ import annotations

from vlm_rl.session.alarms import Alarms


def step(norm: float = 2.0, entropy: float = 1.0, accuracy: float = 0.3) -> dict[str, float]:
    return {"grad_norm": norm, "entropy": entropy, "rewards/accuracy/mean": accuracy}


def said(*steps: dict[str, float], before: int = 5) -> list[str]:
    alarms = Alarms([{"step": k, **step()} for k in range(before)])
    return [line for k, metrics in enumerate(steps, before) for line in alarms.after_step(k, metrics)]


def test_a_norm_of_more_than_ten_medians_is_said_once_until_it_falls() -> None:
    assert said(step(19.9)) == []
    (line,) = said(step(21.0), step(30.0))
    assert "the gradient norm is 21, 10 times its median so far" in line
    assert len(said(step(21.0), step(2.0), step(21.0))) == 2


def test_a_step_without_a_finite_norm_is_not_compared() -> None:
    assert said({}, step(float("nan")), step()) == []


def test_the_first_steps_are_not_compared() -> None:
    assert said(step(200.0), before=4) == []


def test_entropy_that_collapses_is_said_once_unless_accuracy_rose() -> None:
    assert said(step(entropy=0.11)) == []
    (line,) = said(step(entropy=0.09), step(entropy=0.01))
    assert "entropy fell to 0.09 from 1 in the first steps, and accuracy did not rise (0.30 to 0.30)" in line
    assert said(step(entropy=0.01, accuracy=0.41)) == []  # it learned: certain, and right more often


def test_what_was_said_before_a_resume_is_not_said_again() -> None:
    alarms = Alarms([{"step": k, **one} for k, one in enumerate([*[step()] * 5, step(40.0, entropy=0.01)], 1)])
    assert alarms.after_step(7, step(40.0, entropy=0.01)) == []
    assert alarms.spikes.norm_steps == [6, 7], "but both are counted"


def test_an_entropy_that_is_not_a_number_has_not_collapsed() -> None:
    """That of a step whose gradient the guard refused, for instance. It is no measure for later ones either."""
    none = step(norm=float("nan"), entropy=float("nan"))
    assert said(none, step()) == []
    assert said(none, *[step()] * 5, before=0) == []
    assert len(said(none, *[step()] * 5, step(entropy=0.01), before=0)) == 1
