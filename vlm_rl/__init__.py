"""Reinforcement learning with verifiable rewards for vision-language and text models, and its tools as functions.

    import vlm_rl

    vlm_rl.grade(r"so \\boxed{0.5}", "1/2").verdict       # 'correct'
    vlm_rl.read_run("runs/quickstart").metrics()[-1]

`__all__` is the public interface; docs/api.md shows each name in use. A name is imported when it is first used, so
`import vlm_rl` costs nothing. Only `policy_loss` and `token_weights` load torch, because they share a module.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vlm_rl.advantages import compute_advantages
    from vlm_rl.algorithms import ALGORITHMS, Algorithm
    from vlm_rl.api import evaluate, first_answer, grade, read_run, score, show_demo, write_report
    from vlm_rl.errors import UserError
    from vlm_rl.grading.first_answer import FirstAnswer
    from vlm_rl.grading.grader import Grader
    from vlm_rl.hadw import Belief, difficulty_weights, update_belief
    from vlm_rl.losses import policy_loss, token_weights
    from vlm_rl.metrics import length_metrics
    from vlm_rl.notebook.fit import fit
    from vlm_rl.run.directory import RunDirectory
    from vlm_rl.types import Grade, LossInputs

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "Belief",
    "FirstAnswer",
    "Grade",
    "Grader",
    "LossInputs",
    "RunDirectory",
    "UserError",
    "compute_advantages",
    "difficulty_weights",
    "evaluate",
    "first_answer",
    "fit",
    "grade",
    "length_metrics",
    "policy_loss",
    "read_run",
    "score",
    "show_demo",
    "token_weights",
    "update_belief",
    "write_report",
]

_MODULES = {  # name -> the module that defines it
    "ALGORITHMS": "algorithms",
    "Algorithm": "algorithms",
    "Belief": "hadw",
    "FirstAnswer": "grading.first_answer",
    "Grade": "types",
    "Grader": "grading.grader",
    "LossInputs": "types",
    "RunDirectory": "run.directory",
    "UserError": "errors",
    "compute_advantages": "advantages",
    "difficulty_weights": "hadw",
    "evaluate": "api",
    "first_answer": "api",
    "fit": "notebook.fit",
    "grade": "api",
    "length_metrics": "metrics",
    "policy_loss": "losses",
    "read_run": "api",
    "score": "api",
    "show_demo": "api",
    "token_weights": "losses",
    "update_belief": "hadw",
    "write_report": "api",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("vlm-rl")
        except PackageNotFoundError:  # run from a copy of the sources that was never installed
            return "0+unknown"
    if name not in _MODULES:
        raise AttributeError(f"module 'vlm_rl' has no attribute {name!r}")
    value = getattr(import_module(f"vlm_rl.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
