r"""Grade responses: is the final answer the gold? The same rules serve training, evaluation and the demo.

The path of a response:

    extraction            the contents of each \boxed{} where the template wants the answer
    latex                 one spelling for Unicode and for the many notations of LaTeX
    equality              exact rules, the first that applies decides, each with the file of its kind of answer:
      worded_answers        outcomes (no solution, DNE), ordinals, plain words; number_words reads "twenty-one",
                            chinese_numerals reads 二十一
      solution_families     k\pi with k in the integers
      written_forms         scores, ranges, years, sizes and phone numbers: 3-2 is no difference
      clock_times           4:30, 16:30, 4:30 PM
      derivatives           dv/dt as a symbol of its own
      equations             x = 5, chains, curves, ratios
      inequalities          x > 2 as an interval
      containers            sets, tuples, intervals, lists, matrices
      vectors               a vector as a tuple, a column, or with i, j and k
      values                single values, by the next three:
      quantities            percent signs, units, precision and tolerance; rational reads exact fractions
      questions             whether a percentage, a ratio, factors or an expansion is asked for
      closed_form           roots, \pi and polynomials
    undone                answers that leave the operation undone or repeat the question (constant_terms: like terms,
                          squares and small factorials)
    choices               multiple choice: letters, texts and values of options
    limits                refuses texts that are too expensive to compare
    symbolic_client       asks math-verify about what is left (math_verify_gaps: what it does not see),
    symbolic_server       in processes with limits of time and memory that can be killed
    code_grader           programs, run in the sandbox on a problem's tests (code_tests); code_comparison compares
                          their outputs by published rules (code_rules)
    reasons               the sentence that goes with a verdict
    spellings             other spellings of a gold, by which data preparation checks that it is read as it is meant

grader puts these together (Grader, GradeTask, task_of, GRADER_VERSION); decision holds the types that they share;
first_answer finds where reasoning first states the answer, moves where it looks again, turns back or repeats itself;
command is `vlm-rl grade`. All but these four and code_tests is private to this room. The room imports nothing of the
project but the sandbox, errors, templates and types (tests/test_architecture.py), and no torch.

To add a kind of answer: write a file that reads it from a `clean` text, and call it from a rule of
equality.AnswerComparison (a method that returns a Decision, or None if it does not apply). Name the rule in
reasons, increase GRADER_VERSION, add cases of both verdicts to tests/grading/grading_cases.jsonl and a row to the
table of docs/grading.md; the tests run both.
"""

__all__ = ["code_tests", "command", "first_answer", "grader", "moves"]
_USES = ["sandbox"]
