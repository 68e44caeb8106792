// Draws the charts of a page: every <div class="chart"> that holds a Vega-Lite specification as JSON.
// Expressions run in Vega's interpreter (`ast`), so that the page needs no permission for eval.
const dark = matchMedia("(prefers-color-scheme: dark)");
const widths = new ResizeObserver((entries) => {
  for (const { target } of entries) if (target.view && target.clientWidth) target.view.width(target.clientWidth).runAsync();
});

// Put the theme's colours where the specification names a variable of the style sheet; data stays as it is.
function themed(node, style) {
  if (typeof node === "string") return /^var\(--[\w-]+\)$/.test(node) ? style.getPropertyValue(node.slice(4, -1)).trim() : node;
  if (Array.isArray(node)) return node.map((item) => themed(item, style));
  if (node === null || typeof node !== "object") return node;
  const isData = (key) => key === "datasets" || key === "domain" || key === "sort" || key === "usermeta";
  return Object.fromEntries(Object.entries(node).map(([key, item]) => [key, isData(key) ? item : themed(item, style)]));
}

const rowOf = (item) => item?.datum?.datum ?? item?.datum; // the nearest point's, where points are looked up by distance

const tip = document.createElement("div");
tip.className = "chart-tip";

// Show a mark's text beside the pointer; Vega calls it without a value when the pointer leaves.
function showTip(handler, event, item, value) {
  const text = value === null || value === undefined || value === "" ? "" : rowOf(item)?.tip ?? "";
  if (!text) return tip.remove();
  tip.textContent = text;
  document.body.append(tip);
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
  tip.style.top = `${event.clientY + 14 + height < innerHeight ? event.clientY + 14 : event.clientY - 14 - height}px`;
}

// A button per curve, above the chart: it hides the curve and shows it again.
function addLegend(chart, entries, hidden) {
  const legend = chart.querySelector(".legend") ?? chart.insertBefore(document.createElement("div"), chart.firstChild);
  legend.className = "legend";
  legend.replaceChildren(...entries.map((entry) => {
    const button = document.createElement("button"), swatch = document.createElement("i");
    button.type = "button";
    button.title = "hide or show";
    button.setAttribute("aria-pressed", String(!hidden.has(entry.name)));
    swatch.className = `swatch${entry.dashed ? " dashed" : ""}${entry.dot ? " dot" : ""}`;
    swatch.style.color = entry.color;
    swatch.style.opacity = entry.opacity ?? 1;
    button.append(swatch, entry.name);
    button.addEventListener("click", () => {
      if (!hidden.delete(entry.name)) hidden.add(entry.name);
      button.setAttribute("aria-pressed", String(!hidden.has(entry.name)));
      chart.plot.view.signal("hidden", [...hidden]).runAsync();
    });
    return button;
  }));
}

async function draw(chart) {
  const spec = JSON.parse(chart.querySelector('script[type="application/json"]').textContent);
  const entries = spec.usermeta.legend;
  chart.hidden_curves ??= new Set();
  if (!chart.plot) chart.plot = chart.appendChild(document.createElement("div"));
  if (entries.length) addLegend(chart, entries, chart.hidden_curves);
  chart.plot.view?.finalize();
  const options = { ast: true, actions: false, renderer: "svg", defaultStyle: false, tooltip: showTip };
  const { view } = await window.vegaEmbed(chart.plot, themed(spec, getComputedStyle(chart)), options);
  if (chart.hidden_curves.size) view.signal("hidden", [...chart.hidden_curves]).runAsync();
  view.addEventListener("click", (event, item) => {
    const detail = rowOf(item)?.click;
    if (detail !== undefined) chart.dispatchEvent(new CustomEvent("chart-click", { bubbles: true, detail }));
  });
  chart.plot.view = view;
  widths.observe(chart.plot);
}

window.drawCharts = (root = document) => Promise.all([...root.querySelectorAll(".chart:not([data-drawn])")].map((chart) => {
  chart.dataset.drawn = "";
  return draw(chart);
}));
dark.addEventListener("change", () => document.querySelectorAll(".chart[data-drawn]").forEach((chart) => draw(chart)));
window.chartsDrawn = window.drawCharts();
