"""Read the tests of a program from a cell of a table, in the forms in which sets of programming problems have them.

    {"inputs": ["1 2\\n"], "outputs": ["3\\n"]}                         programs that read stdin
    {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}             a function, or a method of the class Solution
    [{"input": "1 2\\n", "output": "3\\n"}, ...]                        programs that read stdin

Each may also be JSON text.
"""

from __future__ import annotations

import json
from typing import Any

from vlm_rl.data_prep.records import RowError
from vlm_rl.errors import UserError
from vlm_rl.grading.code_tests import CodeTests


def tests_in(value: Any) -> CodeTests:
    """Return the tests of a cell. Raises RowError for anything else."""
    try:
        tree = json.loads(value) if isinstance(value, str) else value
        if isinstance(tree, list):
            tree = {"inputs": [test["input"] for test in tree], "outputs": [test["output"] for test in tree]}
        inputs, outputs, function = list(tree["inputs"]), list(tree["outputs"]), str(tree.get("fn_name") or "")
        return CodeTests(inputs=inputs, outputs=outputs, function=function, rule="equal" if function else "lines")
    except UserError as error:
        raise RowError("bad_tests", str(error)) from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        forms = '{"inputs": [...], "outputs": [...], "fn_name": ...} or a list of {"input": ..., "output": ...}'
        raise RowError("bad_tests", f"its tests are not {forms}: {error!r:.80}") from None
