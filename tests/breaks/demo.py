"""Each pure function of the demo, wrong."""

from __future__ import annotations

from breaks import Break, table

BREAKS = table(
    "demo",
    ["tests/test_demo_parts.py"],
    Break(
        "statistics: pairs against themselves",
        "lengths.py",
        "table.length_CP[index] - table.length_CP[0])[keep_P]",
        "table.length_CP[index] - table.length_CP[index])[keep_P]",
    ),
    Break(
        "statistics: a problem counts by its samples",
        "responses.py",
        "minlength=len(self.ids)) / count",
        "minlength=len(self.ids))",
    ),
    Break(
        "statistics: won and lost swapped", "lengths.py", "won=int((change > 0).sum())", "won=int((change < 0).sum())"
    ),
    Break("statistics: p90 is p95", "lengths.py", "p90=quantile(length, 0.9)", "p90=quantile(length, 0.95)"),
    Break(
        "statistics: ecdf leaves out the equal ones",
        "lengths.py",
        "np.cumsum(count) / max",
        "(np.cumsum(count) - count) / max",
    ),
    Break("statistics: bins hold their upper edge", "lengths.py", 'lengths, side="right")', 'lengths, side="left")'),
    Break(
        "statistics: quartiles swapped",
        "lengths.py",
        "[0.1, 0.25, 0.5, 0.75, 0.9])))",
        "[0.1, 0.75, 0.5, 0.25, 0.9])))",
    ),
    Break("statistics: gradient mass of one sign", "lengths.py", "mass = positive + negative", "mass = positive"),
    Break(
        "statistics: cut share of all problems", "lengths.py", "float(cut_P[inside].mean())", "float(cut_P.mean())"
    ),
    Break("paired change: sign", "lengths.py", "return self.after - self.before", "return self.before - self.after"),
    Break(
        "paired change: one end is lost",
        "lengths.py",
        "np.linspace(0, len(order) - 1, limit)",
        "np.linspace(0, len(order) - 2, limit)",
    ),
    Break(
        "paired change: duels the wrong way round",
        "lengths.py",
        "estimate(length[b] - length[a])",
        "estimate(length[a] - length[b])",
    ),
    Break(
        "paired change: the interval is ignored",
        "summary.py",
        "if not tokens.excludes_zero and abs(tokens.mean) > 0",
        "if False",
    ),
    Break(
        "splitting: up to the first closing tag",
        "tokens.py",
        "generated.rpartition(END_THINK)",
        "generated.partition(END_THINK)",
    ),
    Break("splitting: without the closing tag", "tokens.py", "return before + closed", "return before"),
    Break("splitting: an open block is recounted", "tokens.py", "np.where(is_open, total, ", "np.where(is_open, 0, "),
    Break("splitting: the prefill is counted", "tokens.py", "response.removeprefix(prefill)", "response"),
    Break("filter: became right is became wrong", "table.py", '"right": after > before', '"right": after < before'),
    Break(
        "filter: longer than the upper end",
        "table.py",
        "responses.length_R <= view.high",
        "responses.length_R < view.high",
    ),
    Break(
        "filter: the lower end is left out",
        "table.py",
        "responses.length_R >= view.low",
        "responses.length_R > view.low",
    ),
    Break(
        "filter: verdict and length on two responses",
        "table.py",
        "wanted &= responses.correct_R == ",
        "wanted |= responses.correct_R == ",
    ),
    Break("filter: the focus is not looked at", "table.py", "return named or list", "return list"),
    Break("filter: text as it is spelt", "responses.py", "ignore_case=True", "ignore_case=False"),
    Break(
        "filter: a text is a pattern", "responses.py", "compute.match_substring(", "compute.match_substring_regex("
    ),
    Break(
        "filter: difficulty of today",
        "table.py",
        "for key in bases], ids)",
        "for key in keys], ids)",
    ),
    Break(
        "filter: order without the baseline",
        "table.py",
        "(table.length_CP[last] - table.length_CP[0])[kept]",
        "table.length_CP[last][kept]",
    ),
    Break(
        "colours: by the place among those shown",
        "scene.py",
        "known.index(key) % NUM_SLOTS",
        "keys.index(key) % NUM_SLOTS",
    ),
    Break("colours: two alike", "scene.py", "if slot not in taken.values()]", "]"),
    Break("colours: of a run's first checkpoint", "scene.py", "found[one.runs].step < one.step", "False"),
    Break("colours: the live panel's own", "around.py", "{key: shown[key] for key in asked if key in shown}", "{}"),
    Break(
        "address: several values become one",
        "view.py",
        "kept = tuple(dict.fromkeys(texts))",
        "kept = tuple(texts[-1:])",
    ),
    Break(
        "address: texts of any length",
        "view.py",
        "[text[:MAX_TEXT] for text in texts if text]",
        "[text for text in texts if text]",
    ),
    Break(
        "address: any tab",
        "view.py",
        "default = getattr(_DEFAULT, name)\n",
        'default = getattr(_DEFAULT, name)\n    if name == "tab": return texts[-1]\n',
    ),
    Break(
        "address: a patch starts anew",
        "view.py",
        "return replace(self, **changes)",
        "return replace(View(), **changes)",
    ),
    Break("address: zero is nothing", "view.py", "if value != field.default:", "if value:"),
    Break(
        "address: a checkpoint that is gone stays",
        "table.py",
        "there = [key for key in asked if key in known]",
        "there = asked",
    ),
    Break("export: formulas run in a spreadsheet", "export.py", "^([=+@", "^([+@"),
    Break("export: numbers get an apostrophe", "export.py", "-[^0-9.]|", "-|"),
    Break(
        "export: all problems, not those that pass",
        "export.py",
        "enumerate(scene.order.tolist())}",
        "enumerate(range(scene.table.num_problems))}",
    ),
    Break(
        "export: the page keeps its buttons", "export.py", 'body = re.sub(r"<button .*?</button>", "", body)', "pass"
    ),
    Break("formulas: prices become one", "mathtext.py", r"\$(?!\d)", r"\$"),
    Break("formulas: a brace is closed too early", "mathtext.py", "depth += 1 if", "depth += 0 if"),
    Break("text is not escaped", "mathtext.py", "{escape(source)}</span>", "{source}</span>"),
)
