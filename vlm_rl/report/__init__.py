"""Pages about runs, each one file that needs nothing else.

run_report      `vlm-rl report`
readme_figure   the README's picture of a run
run_curves      what a run's files say over time, as arrays
charts, figures, sections, html, examples   the parts that study, preparation report and demo draw with
"""

__all__ = ["charts", "examples", "figures", "html", "readme_figure", "run_curves", "run_report", "sections", "vega"]
