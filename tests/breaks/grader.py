"""Each guard and rule of the grader, wrong.

By file; a row: (name, right, wrong, test). Without a test it is the corpus of cases that notices.
"""

from __future__ import annotations

from breaks import Break

CORPUS = "test_grading_cases.py::test_the_corpus_through_the_command"
POLICY = "test_answers.py::test_policy"
EDGES = "test_grader_limits.py::test_each_limit_of_the_filter_holds_where_it_is_drawn"
NO_WAY = "test_grader_limits.py::test_no_way_to_the_judge_leads_past_the_filter"
LONG = "test_grader_limits.py::test_a_long_answer_and_a_long_list_are_refused_at_their_limits"
SPELLINGS = "test_grader_limits.py::test_many_boxes_of_many_spellings_are_no_answer"
BOMB = "test_grader_limits.py::test_a_memory_bomb_meets_its_limit_and_nothing_else_notices"
NO_FILE = "test_grader_limits.py::test_a_worker_writes_no_file_and_is_replaced"
DEAD = "test_grader_limits.py::test_a_worker_that_dies_takes_its_own_answer_with_it"
DEAD_SERVER = "test_grader_limits.py::test_a_server_that_dies_twice_is_an_error_and_a_third_one_answers"
WALL = "test_grader_limits.py::test_a_comparison_that_waits_meets_the_wall_clock_and_is_an_error"
ORPHANS = "test_grader_limits.py::test_no_process_outlives_its_owner"
CPU = "test_answers.py::test_cpu_time_decides_and_good_jobs_survive"
ENVIRONMENT = "test_answers.py::test_the_workers_environment_is_empty"
SILENT = "test_grading_cases.py::test_a_comparison_without_a_verdict_is_never_silent"
BOUNDED = "test_grading_cases.py::test_one_response_asks_for_a_bounded_number_of_comparisons"

Row = tuple[str, str, str] | tuple[str, str, str, str]

_BREAKS: dict[str, tuple[Row, ...]] = {
    "prefilter.py": (
        ("longer texts", "MAX_TEXT = 8_000", "MAX_TEXT = 8_001", LONG),
        ("longer expressions", "MAX_SYMBOLIC_TEXT = 1_000", "MAX_SYMBOLIC_TEXT = 1_001", EDGES),
        ("more items", "MAX_SYMBOLIC_ITEMS = 24", "MAX_SYMBOLIC_ITEMS = 25", LONG),
        ("deeper nesting", "MAX_DEPTH = 40", "MAX_DEPTH = 41", EDGES),
        ("closing brackets not counted", '- (character in ")]}")', "", EDGES),
        ("only parentheses nest", 'in "([{")', 'in "(")', EDGES),
        ("towers", r"(?:\^ ?[{(]*[^", r"(?:$^\^ ?[{(]*[^", EDGES),
        ("towers: three for two", r"[)}]* ?){2}\^", r"[)}]* ?){3}\^", EDGES),
        ("powers", r"\^ ?\{? ?\(?[0-9]{5,}|", "", EDGES),
        ("powers of brackets", r"|[)\]}] ?\^ ?\{? ?[0-9]{3,}", "", EDGES),
        ("powers of powers", r"\^ ?[{(] ?[0-9]+ ?\^ ?[{(]? ?[0-9]{2,}", "$^", EDGES),
        ("factorials", "[0-9]{5,} ?!|", "", EDGES),
        ("factorials of powers", r"\^ ?\{?[0-9]+\}? ?\)? ?!|", "", EDGES),
        ("factorials of factorials", r"|! ?\)? ?!", "", EDGES),
        ("binomials", r"(?:\^|[0-9]{5,})", r"\^", EDGES),
        ("binomials of powers", r"(?:\^|[0-9]{5,})", "[0-9]{5,}", EDGES),
        ("ends as powers", "text = _LOWER_END.sub", "_LOWER_END.sub", EDGES),
        ("sums", "(?:[0-9]{4,}|", "(?:", EDGES),
        ("sums to powers", r"|\^ ?\{?[0-9]+ ?\^)", ")", EDGES),
        ("integrals", r"\\int.{0,200}\\int|", "", EDGES),
        ("double integrals", r"|\\i{2,4}nt(?![A-Za-z])", "", EDGES),
    ),
    "equality.py": (
        ("comparisons past the filter", "refuse_explosive(answer)", "pass", NO_WAY),
        ("values past the filter", "refuse_explosive(text)", "pass", NO_WAY),
        ("a parameter of any domain", "or want.domain != have.domain", ""),
        ("or for and", "if all(logic) and logic[0] != logic[1]:", "if False:"),
        (
            "an interval as a point",
            "if _MEMBER.match(gold) and as_intervals(gold)",
            "if False",
        ),
        ("a point of any name", "answer.startswith(point.group().strip()) or", "True or"),
        ("other variable, same range", "left.variable != right.variable", "False"),
    ),
    "overlooked.py": (
        ("figures' corners in any order", "if _figures(gold) != _figures(answer):", "if False:"),
        ("figures in one direction", "min(name, name[::-1])", "name"),
        ("triangles in one order", '"".join(sorted(name)) if triangle else', ""),
        ("marks", "_marks(gold) == _marks(answer) and", ""),
        ("derivatives", "and _derivatives(gold) in ([], _derivatives(answer))", ""),
        ("derivatives in any order", "in _DERIVATIVE.findall(text)]", "in sorted(_DERIVATIVE.findall(text))]"),
    ),
    "families.py": (
        ("a place taken twice", "    if _holds(answer.body, parameter):", "    if False:"),
        ("every step is one", "(offset, abs(step))", "(offset, Fraction(1))"),
        ("one number of a period", "for n in range(int(period / step))", "for n in range(1)"),
        ("some of the numbers", ".union(*held[: len(golds)]) ==", ".union(*held[: len(golds)]) >="),
        ("names exchanged, or left out", "return one == other or", "return True or"),
    ),
    "outcomes.py": (
        ("any outcome for another", "outcomes[0] == outcomes[1]", "all(outcomes)"),
        ("any place for another", "ordinals[0] == ordinals[1]", "True"),
        ("molecules without counts", 'if character not in "_{} "', "if character.isalpha()"),
    ),
    "answers.py": (
        ("boxes of any length", "refuse_long(text)", "pass", LONG),
        ("any number of spellings", "if len(spellings) > MAX_SPELLINGS:", "if False:", SPELLINGS),
        ("any number of comparisons", "if len(asked) > MAX_ASKED:", "if False:", BOUNDED),
        ("no opinion is wrong", 'if outcome != "ok":', "if False:", SILENT),
    ),
    "units.py": (
        ("minutes are seconds", """{"'": "min", "''": "s",""", """{"'": "s", "''": "s","""),
        ("fractions of a unit", "frozenset(_MODIFIERS.split()) | COUNTING", "frozenset(_MODIFIERS.split())"),
        ("Chinese: quotients turned round", "zip((1, -1), re.split", "zip((-1, 1), re.split"),
        ("Chinese: any word", "(?![{_CHINESE_MODIFIERS}])", ""),
        ("Chinese: no powers", "_CHINESE_POWERS.get(part[:2], 1)", "1"),
        ("Chinese: units of their own", "_CHINESE_UNITS.get(part, part)", "part"),
    ),
    "mathtext.py": (
        ("parts of a length joined by or", r"and (?=[0-9]+ ?(?:{_SMALLER})", r"or (?=[0-9]+ ?(?:{_SMALLER})"),
        ("about, written as a space", r'(r"^[ $]*~(?=', r'(r"^$~(?='),
    ),
    "symbolic_worker.py": (
        ("no memory limit", "(limit, limit)", "(1 << 60, 1 << 60)", NO_FILE),
        ("memory limit in all", "memory_bytes + _address_space()", "memory_bytes", NO_FILE),
        ("no CPU clock", "setitimer(signal.ITIMER_PROF, cpu_seconds)", "setitimer(signal.ITIMER_PROF, 0)", CPU),
        (
            "CPU clock without a handler",
            "signal.signal(signal.SIGPROF, signal.SIG_DFL)",
            "signal.signal(signal.SIGPROF, signal.SIG_IGN)",
            CPU,
        ),
        ("CPU time is an error", "if died.exitcode == -signal.SIGPROF:", "if False:", CPU),
        ("wall clock is a timeout", 'return "error", f"no verdict', 'return "timeout", f"no verdict', WALL),
        ("no wall clock", ', timeout=options["wall_seconds"])', ")", WALL),
        (
            "memory is an unnamed error",
            "    except MemoryError:\n        return",
            "    except KeyError:\n        return",
            BOMB,
        ),
        ("files may be written", "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))", "pass", NO_FILE),
        ("cores may be dumped", "resource.setrlimit(resource.RLIMIT_CORE, (0, 0))", "pass", NO_FILE),
        ("workers never replaced", 'max_tasks=options["jobs_per_worker"]', "max_tasks=0", NO_FILE),
        ("workers outlive the server", "ctypes.CDLL(None).prctl(1, signal.SIGKILL)", "pass", ORPHANS),
        ("server outlives its owner", "if os.getppid() != parent:", "if False:", ORPHANS),
        ("outcomes of the neighbours", "for future in futures]", "for future in futures[::-1]]", DEAD),
        ("a dead worker is wrong", 'return "error", f"the worker died', 'return "ok", f"the worker died', DEAD),
        (
            "decimals as floats",
            r'_DECIMAL.sub(_as_fraction, _ARGUMENT.sub(r"\1(\2)", text))',
            r'_ARGUMENT.sub(r"\1(\2)", text)',
        ),
        ("arguments take the product", r'_ARGUMENT.sub(r"\1(\2)", text)', "text"),
        ("no point tried", "    if differ:\n        return False", "    if False:\n        return False", POLICY),
        (
            "nothing simplified",
            "differ is False and bool(sympy.simplify((parsed[0] - parsed[1]).doit()) == 0)",
            "False",
        ),
        ("absolute difference", "_TOLERANCE * scale", "_TOLERANCE", POLICY),
        ("n is N", "lowercase_symbols=False", "lowercase_symbols=True"),
    ),
    "symbolic.py": (
        (
            "the owner's environment",
            "for name in _KEPT_VARIABLES if name in os.environ",
            "for name in os.environ",
            ENVIRONMENT,
        ),
        ("any order of sets", '"PYTHONHASHSEED": "0", ', "", ENVIRONMENT),
        (
            "a batch is tried once",
            "for _ in range(2):",
            "for _ in range(1):",
            "test_answers.py::test_a_killed_server_is_replaced",
        ),
        (
            "a dead server is wrong",
            '[("error", "the comparison server',
            '[("ok", "the comparison server',
            DEAD_SERVER,
        ),
    ),
    "relations.py": (
        ("distances: closed ends", '("(", ")") if sign in "<>"', '("[", "]") if sign in "<>"'),
        ("distances: around minus the centre", "-({offset})", "+({offset})"),
        ("distances: slope lost", "-({offset})}}{{{slope}}}", "-({offset})}}{{1}}"),
        ("distances: outside for inside", 'if sign in ("<", "\\\\le"):', "if False:"),
        ("a closed end for an open one", '("(" if sign == ">" else "[")', '"["'),
        ("upper end always open", '(")" if sign == "<" else "]")', '")"'),
        ("chains: lower end", '("(" if first == "<" else "[")', '"("'),
        ("chains: upper end", '(")" if second == "<" else "]")', '")"'),
        ("flipped: le is >", r'"\\le": "\\ge"', r'"\\le": ">"'),
        ("flipped: ge is <", r'"\\ge": "\\le"', r'"\\ge": "<"'),
        ("flipped: > stays", '">": "<"', '">": ">"'),
        ("flipped: < stays", '"<": ">"', '"<": "<"'),
        ("falling chains not turned", "if len(pieces) == 5 and pieces[1] in", "if False and pieces[1] in"),
        ("chains that turn", r'{pieces[1], pieces[3]} - {"<", "\\le"}', "False"),
        ("two lower ends", "if len(lows) > 1 or len(highs) > 1:", "if False:"),
        ("any builder's variable", "and inner.variable == builder.group(1)", ""),
        ("two variables", "if len(variables) == 1 else None", "if variables else None"),
        ("words as ends", "return bool(text) and all(letter", "return bool(text) or all(letter"),
        (
            "one side of a hole",
            r'parts = (f"(-\\infty,{bound})", f"({bound},\\infty)")',
            r'parts = (f"(-\\infty,{bound})",)',
        ),
    ),
    "choices.py": (
        ("a letter that leads in doubt", "and not _DOUBT.search(marked[2])", ""),
        ("labels out of order", 'ord(match[1]) - ord("A") == index', "True"),
        ("two options of one value", "return named if one else frozenset()", "return named"),
        (
            "a letter with another option's text",
            "conflict = bool(texts) and letter not in texts and not bare",
            "conflict = False",
        ),
        ("a letter with another text", "if same is not False:", "if True:"),
        (
            "an option that reads as letters",
            "frozenset() if _same_text(gold_text, choices) else _letter_list(gold_text)",
            "_letter_list(gold_text)",
        ),
        ("letters past the last option", "index if index < (len(choices) or 26) else None", "index"),
        ("some of the letters", "_letter_list(answer_text) == several", "_letter_list(answer_text) <= several"),
        (
            "duplicates of the right option",
            "frozenset({letter}) | (_same_text(clean(choices[letter]), choices) if choices else frozenset())",
            "frozenset({letter})",
        ),
        ("a word of letters twice", "and len(set(text)) == len(text)", ""),
        ("one letter among words", "if 1 < len(letters) == len(words)", "if 1 < len(letters)"),
    ),
    "margins.py": (
        ("percent: gold not divided", "wanted / 100, had)", "wanted, had)"),
        ("percent: shares too", "(abs(wanted) > 1 and ", "(True and "),
        ("percent: never a bare gold", "abs(wanted) > 1 and margin", "False and margin"),
        ("tolerance: less, not at most", "<= self.distance", "< self.distance"),
        ("tolerance: one-sided", "abs(gold - answer)", "(gold - answer)"),
        ("rounding: cut", "+ Fraction(1, 2)", "+ 0"),
        ("rounding: sign lost", "rounded if number >= 0 else -rounded", "rounded", POLICY),
        (
            "precision before tolerance",
            'if meta.get("tolerance") is not None:',
            'if meta.get("precision") is None and "tolerance" in meta:',
            POLICY,
        ),
    ),
    "equations.py": (
        ("chains of two numbers", "len({number for number in numbers if number is not None}) <= 1", "True"),
        ("chains that end in words", "(numbers[-1] is None and len(set(numbers)) > 1)", "False"),
        ("ratios crossed", "(a * d).equals(b * c)", "(a * c).equals(b * d)"),
        ("any two curves", "one.proportional(other)", "True"),
        ("other labels", "if len(names) == 1 or names == _GRAPH:", "if True:"),
        ("no graph of a function", " or names == _GRAPH:", ":"),
        ("letters describe", "and len(labels[0]) > 1", ""),
        ("lists as equations", 'any(len(split_top(part, frozenset(",;"))) > 1 for part in parts) or', "False or"),
        ("anything is a label", "len(parts) > 1 and _LABEL.fullmatch(parts[0])", "len(parts) > 1"),
    ),
    "polynomial.py": (
        ("the other turn", "_cosine(turns - Fraction(1, 2))", "_cosine(turns + Fraction(1, 2))"),
        ("left half of the circle", "return -1 * _cosine(1 - turns)", "return _cosine(1 - turns)"),
        ("quotients of differentials", "|{_CALL.pattern}|{DIFFERENTIALS}", "|{_CALL.pattern}"),
    ),
    "collection.py": (
        ("coordinates as they stand", "items=sorted(side.items)", "items=side.items"),
        ("money in a list", 'answer_type != "list" or taken.unit', 'answer_type != "list"'),
    ),
    "number_words.py": (
        ("parts: two third", 'or plural != bool(match["many"])', ""),
        ("parts: whole lost", "return whole + Fraction(", "return Fraction("),
        ("words: sign lost", "return -value if", "return value if"),
        ("words: one twenty", "if value >= room or", "if"),
        ("words: twenty zero", "or (value == 0 and len(words) > 1)", ""),
        ("words: thousand million", "or scale >= last_scale", ""),
        ("words: hundred of nothing", "if not 0 < group < 100:", "if False:"),
        ("words: scales alone", "if not group or", "if"),
        ("words: room after a hundred", "100 * group, 100", "100 * group, 0"),
        ("words: room after a scale", "0, 100, scale", "0, 0, scale"),
        ("words: teens after tens", "10 if value >= 20 else 0", "100 if value >= 20 else 0"),
    ),
}

BREAKS = tuple(
    Break(name, f"vlm_rl/{file}", right, wrong, (f"tests/{test[0] if test else CORPUS}",))
    for file, rows in _BREAKS.items()
    for name, right, wrong, *test in rows
)
