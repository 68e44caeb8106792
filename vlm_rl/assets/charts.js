// Draws the charts of a page: every <div class="chart"> that holds a Vega-Lite specification as JSON.
// Expressions run in Vega's interpreter (`ast`), so that the page needs no permission for eval.
const dark = matchMedia("(prefers-color-scheme: dark)");
const smoothing = { window: 0 }; // 0: each curve's own
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

const options = { ast: true, actions: false, renderer: "svg", defaultStyle: false, tooltip: (...shown) => showTip(...shown) };
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

// The mean over `window` (odd) neighbours of each curve that has one; fewer at its ends. Of a long curve not every value
// is drawn: a row stands for the `count` values since the one before, of mean `since`.
function smoothed(rows, curves, window) {
  const half = (window - 1) / 2;
  for (const name of curves) {
    const own = rows.filter((row) => row.series === name);
    const ends = [0], sums = [0]; // how many values there are up to each row, and their sum
    for (const { y, count = 1, since = y } of own) {
      ends.push(ends.at(-1) + count);
      sums.push(sums.at(-1) + count * since);
    }
    const sumOf = (end) => { // of the first `end` values; between two rows as if all were their mean
      let low = 0, high = own.length;
      while (low < high) {
        const middle = (low + high) >> 1;
        if (ends[middle] < end) low = middle + 1; else high = middle;
      }
      return low && sums[low] - (sums[low] - sums[low - 1]) * (ends[low] - end) / (ends[low] - ends[low - 1]);
    };
    own.forEach((row, index) => {
      const from = Math.max(0, ends[index + 1] - half - 1), to = Math.min(ends.at(-1), ends[index + 1] + half);
      row.mean = half ? (sumOf(to) - sumOf(from)) / (to - from) : row.y;
    });
  }
  return rows;
}

// The vertical axis of every layer, logarithmic or linear from 0 or its lowest value.
function withScale(spec, isLog) {
  if (isLog === spec.usermeta.log) return spec;
  for (const { encoding: { y } } of spec.layer) {
    if (y?.type !== "quantitative" || !y.scale) continue;
    y.scale = isLog ? { type: "log", nice: false, padding: 8 } : { zero: false, nice: true };
    y.axis = { ...y.axis, values: undefined };
  }
  return spec;
}

function save(name, address) {
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
}

// A curve's name may come from anywhere: a spreadsheet must not take it for a formula.
function cell(value) {
  if (typeof value !== "string") return value ?? "";
  return `"${value.replace(/^[=+\-@\t\r]/, "'$&").replaceAll('"', '""')}"`;
}

function csv({ datasets: { rows }, encoding }) {
  const columns = ["series", "x", "y", "mean", "low", "high"].filter((column) => rows.some((row) => column in row));
  const head = columns.map((column) => cell(column === "x" ? encoding.x?.title ?? "x" : column));
  return [head, ...rows.map((row) => columns.map((column) => cell(row[column])))].map((line) => line.join(",")).join("\n") + "\n";
}

// The chart as it is shown, with its title, its legend and the page's background, as the address of a PNG.
async function picture(chart) {
  const spec = withScale(specOf(chart), chart.isLog), { color } = spec.encoding ?? {};
  Object.assign(spec, { title: chart.getAttribute("aria-label"), width: chart.plot.clientWidth, padding: 12 });
  spec.background = getComputedStyle(document.documentElement).backgroundColor;
  if (spec.usermeta.legend.length && color) color.legend = { title: null };
  const { view, finalize } = await window.vegaEmbed(document.createElement("div"), themed(spec, getComputedStyle(chart)), options);
  const address = await view.signal("hidden", [...chart.hidden_curves]).toImageURL("png", 2);
  finalize();
  return address;
}

// Buttons in the chart's corner: a logarithmic axis, and the chart as a picture and as a table.
function addTools(chart, spec) {
  const tools = chart.appendChild(document.createElement("div"));
  tools.className = "tools";
  const name = (chart.getAttribute("aria-label") ?? "chart").toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "");
  const add = (text, title, action) => {
    const button = tools.appendChild(document.createElement("button"));
    Object.assign(button, { type: "button", textContent: text, title });
    button.addEventListener("click", () => action(button));
    return button;
  };
  if (spec.usermeta.log !== null && spec.usermeta.log !== undefined) {
    add("log", "logarithmic axis", (button) => {
      chart.isLog = !chart.isLog;
      button.setAttribute("aria-pressed", String(chart.isLog));
      return draw(chart);
    }).setAttribute("aria-pressed", String(chart.isLog));
  }
  add("PNG", "save as a picture", async () => save(`${name}.png`, await picture(chart)));
  if (spec.encoding?.x?.field === "x") {
    add("CSV", "save the values drawn as a table", () => {
      const address = URL.createObjectURL(new Blob([csv(specOf(chart))], { type: "text/csv" }));
      save(`${name}.csv`, address);
      URL.revokeObjectURL(address);
    });
  }
}

const specOf = (chart) => {
  const spec = JSON.parse(chart.querySelector('script[type="application/json"]').textContent);
  if (smoothing.window) smoothed(spec.datasets.rows, spec.usermeta.smooth ?? [], smoothing.window);
  return spec;
};

// A box that was drawn over the points: a click event hands over `text` and the box's ends, rounded outwards.
function followBrush(chart, view, text) {
  const ended = () => setTimeout(() => { // after the chart's own listeners
    const { x, y } = view.signal("brush") ?? {};
    if (!x || !y || x[0] === x[1] || y[0] === y[1]) return;
    const ends = [x, y].flatMap(([from, to]) => [Math.max(0, Math.floor(from)), Math.max(0, Math.ceil(to))]);
    chart.dispatchEvent(new CustomEvent("chart-click", { bubbles: true, detail: text + ends.join(",") }));
  });
  view.addEventListener("pointerdown", () => addEventListener("pointerup", ended, { once: true }));
}

async function draw(chart) {
  const given = specOf(chart);
  chart.isLog ??= given.usermeta.log;
  const spec = withScale(given, chart.isLog);
  const entries = spec.usermeta.legend;
  chart.hidden_curves ??= new Set();
  if (!chart.plot) chart.plot = chart.appendChild(document.createElement("div"));
  if (entries.length) addLegend(chart, entries, chart.hidden_curves);
  chart.plot.view?.finalize();
  const { view } = await window.vegaEmbed(chart.plot, themed(spec, getComputedStyle(chart)), options);
  // For screen readers the chart is one picture with its title; the table behind "CSV" has its values.
  Object.entries({ role: "img", "aria-label": chart.getAttribute("aria-label") ?? "chart" }).forEach((pair) => chart.plot.setAttribute(...pair));
  chart.plot.querySelector("svg")?.setAttribute("aria-hidden", "true");
  if (chart.hidden_curves.size) view.signal("hidden", [...chart.hidden_curves]).runAsync();
  view.addEventListener("click", (event, item) => {
    const detail = rowOf(item)?.click;
    if (detail !== undefined) chart.dispatchEvent(new CustomEvent("chart-click", { bubbles: true, detail }));
  });
  if (typeof spec.usermeta.brush === "string") followBrush(chart, view, spec.usermeta.brush);
  chart.plot.view = view;
  widths.observe(chart.plot);
  if (!chart.querySelector(".tools")) addTools(chart, given);
}

// Charts in a closed fold wait until it is opened.
window.drawCharts = (root = document) => Promise.all([...root.querySelectorAll(".chart:not([data-drawn])")].map((chart) => {
  if (chart.closest("details:not([open])")) return undefined;
  chart.dataset.drawn = "";
  return draw(chart);
}));
document.addEventListener("toggle", (event) => event.target.open && window.drawCharts(event.target), true);

// The slider of a page: the window of all its running means. Until it is moved, each curve has the window of its length.
function addSmoothing(slider) {
  slider.closest("[hidden]").hidden = false;
  slider.addEventListener("input", () => {
    smoothing.window = 2 * slider.valueAsNumber + 1;
    slider.nextElementSibling.textContent = smoothing.window === 1 ? "off" : `${smoothing.window} steps`;
    for (const chart of document.querySelectorAll(".chart[data-drawn]")) {
      const spec = specOf(chart);
      if (spec.usermeta.smooth?.length) chart.plot.view?.data("rows", spec.datasets.rows).runAsync();
    }
  });
}
const hasSmoothing = () => [...document.querySelectorAll('.chart > script[type="application/json"]')].some((data) => JSON.parse(data.textContent).usermeta.smooth?.length);
const slider = document.querySelector(".smoothing input");
if (slider && hasSmoothing()) addSmoothing(slider);
dark.addEventListener("change", () => document.querySelectorAll(".chart[data-drawn]").forEach((chart) => draw(chart)));
window.chartsDrawn = window.drawCharts();
