"""Pages about runs, each one file that needs nothing else.

    run_report      `vlm-rl report`
    readme_figure   the README's picture of a run
    run_curves      what a run's files say over time, as arrays
    charts, vega    charts as Vega-Lite specifications; onto a page or into a picture
    figures         charts of curves on a page, or a sentence where there is nothing to draw
    looks           a response whose tokens are in shades of how much the image changes them
    html            templates that escape, the frame of a page, images as data

Private to this room: changes, controls, examples, looking_section, sections and stability_section.
"""

__all__ = ["charts", "figures", "html", "looks", "readme_figure", "run_curves", "run_report", "vega"]
_USES = ["data", "grading", "model_files", "run"]
