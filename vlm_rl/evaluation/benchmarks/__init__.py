"""One file per benchmark: how a row is read, what is asked, the authors' rule, and the scores.

    registry         the benchmarks by name, and `vlm-rl eval protocols`
    benchmark        the fields of a benchmark, and what a rule judges
    raw_rows         what the readers of rows share
    saved_files      files of annotations
    judging          the two modes: strict and official
    judge_model      a model in the place of the authors' judge
    protocols        what a benchmark's file says of how it is measured where nobody says otherwise
    score_command    `vlm-rl score`

Private to this folder: the benchmarks (mathvista, mathvision, ..., wemath; each one's BENCHMARK is a row of the
registry), text_sets, code_sets and final_answers (shared by readers and by rules), mathvision_values (MathVision's
arithmetic), scores (what several benchmarks report) and saved_responses (files of responses).

To add a benchmark, write its file and name it in the registry; tests/evaluation/test_new_benchmark.py does.
"""

__all__ = ["benchmark", "judge_model", "judging", "protocols", "raw_rows", "registry", "saved_files", "score_command"]
