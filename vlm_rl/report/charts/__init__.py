"""Charts: small functions from arrays to a Vega-Lite specification.

    lines     curves over steps or lengths
    shares    histograms, quantiles, gradient mass by length, heat maps
    points    scatter plots, and differences with their intervals
    versus    one value of each problem against another, with a diagonal
    ridges    distributions above each other
    frame     colours, axes, tooltips, and the layered chart around them

A specification is a plain dictionary that a browser draws interactively and vl-convert as a picture
(vlm_rl.report.vega). Colours are the variables of vlm_rl/assets/cards.css, so that a chart follows the page's light
or dark theme. No chart is drawn without data: the functions return None then.

    spec = lines([Series("luspo", steps, reward, PALETTE[0], smooth=True)], y_title="reward")

A mark may carry `click`, any JSON value: a click on it hands that value to the page (vlm_rl.report.vega says how).
"""

__all__ = ["frame", "lines", "points", "ridges", "shares", "versus"]
