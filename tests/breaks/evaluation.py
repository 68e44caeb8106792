"""Each rule of the evaluation and of the benchmarks' scores, wrong.

The copy that is broken has no sample data beside it: what is noticed, is noticed without.
"""

from __future__ import annotations

from breaks import Break, table

TESTS = ("scoring", "pairs", "overlap", "evaluate")
METRICS, SCORE, PREPARED = "scoring/metrics.py", "scoring/score.py", "scoring/prepared.py"
WEMATH, DYNAMATH, LETTERED = "scoring/wemath.py", "scoring/dynamath.py", "scoring/lettered.py"
VISTA, VISION, ARITHMETIC = "scoring/mathvista.py", "scoring/mathvision.py", "scoring/arithmetic.py"
RESPONSES, TABLES = "scoring/responses.py", "scoring/tables.py"

BREAKS = table(
    "vlm_rl",
    [f"tests/test_{name}.py" for name in TESTS],
    # -- sums over samples and questions
    Break(
        "avg@k: best of k",
        METRICS,
        "sum(row.right for row in samples) / len(samples)",
        "max(row.right for row in samples)",
    ),
    Break(
        "accuracy: over responses",
        METRICS,
        '"accuracy": with_interval(accuracies(rows).values())',
        '"accuracy": with_interval(float(row.right) for row in rows)',
    ),
    Break(
        "pass@k: biased",
        METRICS,
        "1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)",
        "1.0 - (1 - num_right / num_samples) ** k",
    ),
    Break(
        "pass@k: k of the first question",
        METRICS,
        "k = min(map(len, groups.values()), default=0)",
        "k = max(map(len, groups.values()), default=0)",
    ),
    Break("pass@k: largest k left out", METRICS, " | {k}):", "):"),
    Break(
        "interval: another seed each time",
        METRICS,
        "score_interval(scores_P, seed=seed)",
        "score_interval(scores_P, seed=np.random.randint(2**31))",
    ),
    Break("facets: first value only", METRICS, "for value in values:", "for value in values[:1]:"),
    Break(
        "facets: over all questions",
        METRICS,
        "with_interval(found) for value, found in sorted(table.items())",
        "with_interval([*found, *([0.0] * (len(scores) - len(found)))]) for value, found in sorted(table.items())",
    ),
    Break(
        "box share: over questions",
        METRICS,
        '"box_share": sum(row.has_box for row in rows) / len(rows)',
        '"box_share": sum(row.has_box for row in rows) / len(samples)',
    ),
    Break(
        "truncated share: unknown is not truncated",
        METRICS,
        "/ len(stops) if stops else None",
        "/ len(rows) if rows else None",
    ),
    Break(
        "truncated share: stops",
        METRICS,
        'sum(stop == "length" for stop in stops)',
        'sum(stop == "stop" for stop in stops)',
    ),
    Break("timeouts not counted", METRICS, 'verdicts.count("timeout")', "0"),
    Break(
        "free points not counted",
        METRICS,
        'row.judgement.note == "free point"',
        'row.judgement.note == "free points"',
    ),
    Break("bootstrap: over single draws", "statistics.py", ".mean(axis=1))", "[:, 0])"),
    Break(
        "bootstrap: one tail",
        "statistics.py",
        "[(1 - confidence) / 2, (1 + confidence) / 2]",
        "[1 - confidence, confidence]",
    ),
    Break(
        "bootstrap: seed ignored",
        "statistics.py",
        "rng = np.random.default_rng(seed)",
        "rng = np.random.default_rng(0)",
    ),
    Break(
        "bootstrap: without replacement",
        "statistics.py",
        "rng.integers(len(scores_P), size=(size, len(scores_P)))",
        "np.argsort(rng.random((size, len(scores_P))), axis=1)",
    ),
    Break("equal scores: a point", "statistics.py", "(scores_P == scores_P[0]).all()", "False"),
    # -- two evaluations
    Break(
        "pair: unpaired interval",
        "pairs.py",
        "bootstrap_interval(difference_P, seed=seed)",
        "bootstrap_interval(score_b - score_a.mean(), seed=seed)",
    ),
    Break("pair: sign", "pairs.py", "difference_P = score_b - score_a", "difference_P = score_a - score_b"),
    Break(
        "pair: ties are lost", "pairs.py", "lost=int((difference_P < 0).sum())", "lost=int((difference_P <= 0).sum())"
    ),
    Break(
        "pair: seed ignored",
        "pairs.py",
        "bootstrap_interval(difference_P, seed=seed)",
        "bootstrap_interval(difference_P)",
    ),
    Break("sign test: one-sided", "pairs.py", "min(1.0, 2 * tail / 2**total)", "min(1.0, tail / 2**total)"),
    Break("sign test: more uneven only", "pairs.py", "range(min(won, lost) + 1)", "range(min(won, lost))"),
    Break(
        "categories: of the whole", "pairs.py", "members[problem.category].append(name)", 'members[""].append(name)'
    ),
    Break(
        "problem score: any sample",
        "pairs.py",
        'sum(row["verdict"] == "correct" for row in samples) / len(samples)',
        'float(any(row["verdict"] == "correct" for row in samples))',
    ),
    Break(
        "problem score: length of right ones",
        "pairs.py",
        'if row.get("length") is not None]',
        'if row["verdict"] == "correct"]',
    ),
    Break(
        "compare: a row of accuracies",
        "eval_compare.py",
        'if headline != "accuracy" else accuracy',
        "if False else accuracy",
    ),
    Break("compare: own number unpaired", "eval_compare.py", 'result.summary.get("headline_parts", {})', "{}"),
    Break("compare: records under other ids", "eval_compare.py", "name.removeprefix(prefix)", "name"),
    Break("compare: settings unsaid", "eval_compare.py", "and a.summary[key] != b.summary[key]", "and False"),
    Break(
        "compare: loose problems",
        METRICS,
        "wemath.four_cases(_first_samples(rows), loose=False)",
        "wemath.four_cases(_first_samples(rows), loose=True)",
    ),
    # -- We-Math
    Break("We-Math: strict is loose", WEMATH, "any(steps) if loose else all(steps)", "any(steps)"),
    Break("We-Math: IG for IK", WEMATH, '"IG" if all(steps) else "IK"', '"IG" if any(steps) else "IK"'),
    Break("We-Math: IG worth nothing", WEMATH, '"IG": 0.5', '"IG": 0.0'),
    Break(
        "We-Math: RM over all problems",
        WEMATH,
        '"RM": count["RM"] / whole_right if whole_right else None',
        '"RM": count["RM"] / len(cases) if cases else None',
    ),
    Break("We-Math: incomplete problems count", WEMATH, "len(steps) == _num_steps(problem)", "steps"),
    Break("We-Math: three steps are two", WEMATH, '3 if problem.startswith("3") else 2', "2"),
    Break(
        "We-Math: first Answer", WEMATH, 'split("Answer")[-1]', 'split("Answer")[min(1, answer.text.count("Answer"))]'
    ),
    Break("We-Math: letters A to E", WEMATH, '"ABCDEFGH"', '"ABCDE"'),
    Break(
        "We-Math: S1 of all rows", METRICS, 'int(question.problem[:1] or 1) if question.part == "multi" else 1', "1"
    ),
    Break("We-Math: loose scores are strict", METRICS, 'loose=how == "loose"', "loose=False"),
    # -- DynaMath
    Break("DynaMath: best case", DYNAMATH, "min(found) for seed", "max(found) for seed"),
    Break("DynaMath: worst case of shares", METRICS, "float(scores[name] == 1)", "scores[name]"),
    Break("DynaMath: robustness upside down", METRICS, 'share / average["score"]', 'average["score"] / share'),
    Break("DynaMath: tolerance", DYNAMATH, "TOLERANCE = 0.001", "TOLERANCE = 0.01"),
    Break("DynaMath: whole answer is searched", DYNAMATH, "question.gold in short[:3]", "question.gold in short"),
    Break("DynaMath: text equal", DYNAMATH, "right = question.gold in short\n", "right = question.gold == short\n"),
    Break("DynaMath: last line whole", DYNAMATH, 'body.split("\\n")[-1][:-1]', 'body.split("\\n")[-1]'),
    Break("DynaMath: pi unread", DYNAMATH, "(math.pi if pi else 1.0)", "1.0"),
    Break("DynaMath: variants are one", DYNAMATH, 'id=f"{seed}-v{variant}"', "id=seed"),
    # -- MathVista
    Break("MathVista: last of the nearest", VISTA, "min(choices, key=", "min(reversed(choices), key="),
    Break(
        "MathVista: nothing for nothing",
        VISTA,
        "    cut = extraction[:_MAX_EDIT]\n",
        '    if not extraction:\n        return ""\n    cut = extraction[:_MAX_EDIT]\n',
    ),
    Break("MathVista: one decimal for all", VISTA, 'question.meta.get("precision")', "1"),
    Break("MathVista: precision not whole", VISTA, '{"precision": int(float(stated))}', '{"precision": stated}'),
    Break("MathVista: integers are rounded", VISTA, "str(int(float(extraction)))", "str(round(float(extraction)))"),
    Break(
        "MathVista: shipped extraction unused",
        VISTA,
        "answer.extraction if answer.extraction is not None else extract(question, answer.text)",
        "extract(question, answer.text)",
    ),
    Break(
        "MathVista: letters without brackets",
        VISTA,
        '_LETTER = re.compile(r"\\(([a-zA-Z])\\)")',
        '_LETTER = re.compile(r"([a-zA-Z])")',
    ),
    Break(
        "MathVista: edit distance without replacement",
        VISTA,
        "previous[j - 1] + (left != right)",
        "previous[j - 1] + 2 * (left != right)",
    ),
    # -- MathVision
    Break("MathVision: letter only", VISION, "golds.append(question.choices[place])", "pass"),
    Break(
        "MathVision: three digits",
        VISION,
        "round(values[0], 2) == round(values[1], 2)",
        "round(values[0], 3) == round(values[1], 3)",
    ),
    Break("MathVision: first box", VISION, 'text.split("oxed{")[-1] if', 'text.split("oxed{")[1] if'),
    Break("MathVision: phrase unread", VISION, '"the answer is", ', ""),
    Break("MathVision: closing letter unread", VISION, "            text = letter\n", "            pass\n"),
    Break("MathVision: left side of an equation", VISION, 'text.split("=")[-1]', 'text.split("=")[0]'),
    Break("MathVision: doubt unsaid", VISION, "if odd and has_digit", "if odd and not has_digit"),
    Break(
        "MathVision: tuples are texts",
        VISION,
        "gold, found = _evaluated_tuple(gold), _evaluated_tuple(found)",
        "pass",
    ),
    Break(
        "values: mixed numbers are sums", ARITHMETIC, "value = value * self._power()", "value = value + self._power()"
    ),
    Break("values: per cent unread", ARITHMETIC, "value = value / 100", "pass"),
    Break("values: power of the sign", ARITHMETIC, "return value * sign", "return abs(value) * sign"),
    # -- LogicVista, MathVerse, text sets
    Break("LogicVista: one of several will do", LETTERED, "named == wanted", "bool(set(named) & set(wanted))"),
    Break(
        "LogicVista: order counts",
        "scoring/extraction.py",
        "return tuple(sorted(set(_ONE_LETTER.findall(match[0]))))",
        "return tuple(_ONE_LETTER.findall(match[0]))",
    ),
    Break("LogicVista: bare F counts", LETTERED, 'in "abcde"', 'in "abcdefghi"'),
    Break("LogicVista: a row without a gold counts", LETTERED, "    if not gold:\n        return None\n", ""),
    Break(
        "MathVerse: extraction unused",
        LETTERED,
        "answer.text if answer.extraction is None else answer.extraction",
        "answer.text",
    ),
    Break("MathVerse: any of the letters", LETTERED, "letters == (question.gold,)", "question.gold in letters"),
    Break(
        "text sets: first alternative only",
        SCORE,
        "for gold in (question.gold, *question.other_golds)\n    ]",
        "for gold in (question.gold, *[question.gold] * len(question.other_golds))\n    ]",
    ),
    Break("text sets: lists are ordered", "scoring/text_sets.py", 'answer_type="list"', 'answer_type="expression"'),
    Break(
        "text sets: tolerance unread",
        "scoring/text_sets.py",
        '{} if tolerance is None else {"tolerance": tolerance}',
        "{}",
    ),
    Break(
        "text sets: 073 is no 73",
        "scoring/fields.py",
        'str(int(text)) if re.fullmatch(r"0\\d+", text) else text',
        "text",
    ),
    # -- summaries
    Break("missing: none", SCORE, "num_questions - len({row.question.id for row in rows})", "0"),
    Break(
        "emulated is called official",
        SCORE,
        "emulated = official and benchmark.emulated and shipped < len(rows)",
        "emulated = False",
    ),
    Break(
        "published verdicts turned round",
        SCORE,
        "row.answer.published != row.right",
        "row.answer.published == row.right",
    ),
    Break(
        "category: of the last facet",
        SCORE,
        "for values in row.question.facets.values()",
        "for values in [*row.question.facets.values()][::-1]",
    ),
    # -- vlm-rl eval
    Break(
        "eval: interval over samples",
        "evaluate.py",
        "list(score_interval(score_P, seed=seed))",
        "list(score_interval(correct, seed=seed))",
    ),
    Break("eval: accuracy over responses", "evaluate.py", '"accuracy": _mean(score_P)', '"accuracy": _mean(correct)'),
    Break(
        "eval: timeouts are wrong, silently",
        "evaluate.py",
        'sum(record["verdict"] == "timeout" for record in records)',
        "0",
    ),
    Break(
        "eval: truncated share",
        "evaluate.py",
        'record["stop_reason"] == "length"',
        'record["stop_reason"] != "length"',
    ),
    Break(
        "eval: prefill not graded",
        "evaluate.py",
        "task_of(problem, prompt.prefill + rollout.text, template)",
        "task_of(problem, rollout.text, template)",
    ),
    Break("eval: known problems answered again", "evaluate.py", "if problem.id not in answered]", "]"),
    Break("eval: official is strict", "evaluate.py", 'published=mode == "official"', "published=False"),
    Break("eval: own words unsaid", "evaluate.py", "wording.worded(problem) if wording else problem", "problem"),
    Break(
        "eval: blank images in one size",
        "evaluate.py",
        'Image.new("RGB", size, _GREY)',
        'Image.new("RGB", (56, 56), _GREY)',
    ),
    Break(
        "eval: journal forgets",
        "journal.py",
        '            self._file.write(json.dumps(kept, ensure_ascii=True) + "\\n")\n',
        "",
    ),
    Break("eval: journal of other settings", "journal.py", "if lines and lines[0] == head.encode():", "if lines:"),
    Break("eval: a cut line is read", "journal.py", 'split(b"\\n")[:-1]', 'split(b"\\n")'),
    Break("eval: facets under other names", PREPARED, '_CATEGORY.get(problem.source, "category")', '"category"'),
    Break("eval: alternatives forgotten", PREPARED, 'tuple(meta.get("alternatives") or ())', "()"),
    Break("eval: own number unsaid", "evaluate.py", 'if headline != "accuracy" else None', "if False else None"),
    Break("eval: variants are seeds", PREPARED, 'meta.get("seed", meta.get("problem", ""))', "problem.id"),
    Break("eval: a gold that is no option", PREPARED, 'kind = "choice"  # also', "pass  # also"),
    Break("eval: precision unsaid", "resumable.py", 'str(sampler.dtype).removeprefix("torch.")', '""'),
    Break("eval: MathVista's gold is a letter", PREPARED, 'gold = problem.choices[ord(gold) - ord("A")]', "pass"),
    Break(
        "overlap: after only at the end",
        "overlap.py",
        "behind.submit(after, item, ready, made)",
        "behind.submit(after, items[0], ready, made)",
    ),
    Break(
        "overlap: what was finished is lost",
        "overlap.py",
        "            finally:  # an error of this item waits for the one before\n                yield",
        "            finally:\n                pass\n            if True:\n                yield",
    ),
    Break(
        "overlap: no overlap ahead",
        "overlap.py",
        "                made = heavy(ready)\n",
        "                [one.result() for one in coming]\n                made = heavy(ready)\n",
    ),
    Break(
        "overlap: grading waits",
        "overlap.py",
        "            finishing = [behind.submit(after, item, ready, made)]",
        "            from functools import partial\n            late = Future()\n"
        "            late.result = partial(after, item, ready, made)\n            finishing = [late]",
    ),
)

BREAKS += table(
    "vlm_rl",
    ["tests/test_responses.py"],
    Break(
        "responses: golds are answers", RESPONSES, ' and not (name == "answer" and any(', " and not (False and any("
    ),
    Break("responses: no answer is NaN", RESPONSES, "text is None or text != text", "text is None"),
    Break("responses: no samples are none", RESPONSES, "(value or [None]) if", "value if"),
    Break("responses: short answers are replies", RESPONSES, "elif is_short and", "elif False and"),
    Break("responses: trials unchecked", SCORE, "if 10 * len(other) > len(kept):", "if False:"),
    Break("responses: a file's number unread", TABLES, 're.fullmatch(r"0*(\\d+)", path.stem) or', ""),
    Break("responses: a row's variant unread", TABLES, 'row.get("trial", row.get("variant"))', 'row.get("trial")'),
    Break(
        "responses: any folder names a trial",
        TABLES,
        "_TRIAL.fullmatch(path.parent.name)",
        "_TRIAL.search(str(path))",
    ),
    Break("responses: cut at a comma", TABLES, "if None in row:", "if row is None:"),
    Break("responses: Q1 is no 1", TABLES, 're.sub(r"^[Qq](?=\\d+$)", "", str(name).strip())', "str(name).strip()"),
    Break("responses: a reply's object is a row", TABLES, "name.isdigit() or", "name or"),
    Break("responses: seeds are trials", TABLES, '{"_key": inner, "trial": match[1]}', '{"ID": outer, "key": inner}'),
    Break("responses: text of a list is a list", "scoring/fields.py", "value is not None and not", "False and not"),
    Break("responses: half a character", "score_command.py", '"backslashreplace"', '"strict"'),
    Break("letters: sentences begin with A", "scoring/extraction.py", "[AI]", "[_]"),
    Break("letters: any in brackets", "scoring/extraction.py", "if len(marked) == 1 else ()", "if marked else ()"),
    Break(
        "letters: last word unread",
        "scoring/extraction.py",
        "if match := _LAST_WORD.search(text):",
        "if match := None:",
    ),
)
