"""One file per benchmark: how a row is read, what is asked, the authors' rule, and the scores.

    mathvista, mathvision, ..., wemath    one benchmark each; its BENCHMARK is a row of the registry
    registry                              the benchmarks by name
    benchmark                             the fields of a benchmark, and what a rule judges
    raw_rows, text_sets                   what their readers share
    final_answers, mathvision_values      what their rules share, and MathVision's arithmetic
    metrics, judging                      scores, and the two modes: strict and official
    saved_files, saved_responses          files of annotations and of responses
    score_command                         `vlm-rl score`

To add a benchmark, write its file and name it in the registry; tests/evaluation/test_new_benchmark.py does.
"""
