
// The behaviour of the page under gradio, which runs this once, below reading.js, for the hidden component that holds
// the view's query (demo/app.py): clicks on marks, the address and the way back, formulas, pictures of charts.

// -- the view. Every change is a patch of the query. Its answer comes after the next change may be made, so a request
// carries all changes that have no answer yet, on top of the query that was drawn last.
let drawn = null; // {number, query} of the newest answer; the first one is that of the address
let asked = 0; // the number of the newest request
let changes = []; // without an answer, oldest first: {number, patch, key, isBack}
function request() {
  if (drawn) trigger('go', { query: drawn.query, changes: changes.map(({ patch, key }) => ({ patch, key })), number: asked });
}
function go(patch, key = '', isBack = false) {
  changes.push({ number: ++asked, patch, key, isBack });
  request();
}
function wanted() { // the query with all changes, but for what follows from a new benchmark or baseline
  let query = new URLSearchParams(drawn?.query);
  for (const { patch } of changes) {
    if (patch.startsWith('?')) query = new URLSearchParams();
    const given = new URLSearchParams(patch);
    for (const key of new Set(given.keys())) query.delete(key);
    given.forEach((value, key) => { if (value) query.append(key, value); });
  }
  return query;
}
watch('value', () => {
  const [, number, query] = /^answer=([0-9]+)&(.*)$/s.exec(props.value);
  if (drawn && Number(number) < drawn.number) { // a newer answer was drawn before this one: draw it again
    asked++;
    return request();
  }
  const isFirst = !drawn, answered = changes.filter((change) => change.number <= number);
  changes = changes.filter((change) => change.number > number);
  const replaces = isFirst || answered.at(-1)?.isBack; // the first address takes the place of what was typed
  drawn = { number: Number(number), query };
  const address = query ? '?' + query : location.pathname;
  if (address !== location.search || replaces) history[replaces ? 'replaceState' : 'pushState'](null, '', address);
  if (isFirst && changes.length) request(); // those made before the address was drawn
});
addEventListener('popstate', () => {
  if (location.search.slice(1) !== drawn?.query) go('?' + location.search.slice(1), '', true);
});

let isTabOfHand = false; // gradio also tells of a tab that an answer has opened
for (const kind of ['click', 'keydown'])
  document.addEventListener(kind, ({ target }) => { isTabOfHand = target.closest('#panels button') && !target.closest('.tabitem'); }, true);
document.addEventListener('view-control', ({ detail: { key, value } }) => {
  if (key === 'clear') return go(value);
  if (key === 'tab' && !isTabOfHand) return;
  const values = [value ?? []].flat().map(String).filter(Boolean);
  // gradio tells of one choice in a list twice, and of a text at Enter and again when its box is left
  if (JSON.stringify(wanted().getAll(key)) === JSON.stringify(values)) return;
  go(String(new URLSearchParams(values.length ? values.map((text) => [key, text]) : [[key, '']])), key);
});

readAlong({
  go,
  search: () => document.querySelector('#control-text input, #control-text textarea'),
  searched: () => new URLSearchParams(drawn?.query).get('text') || '',
  afterTheme: () => {
    document.querySelectorAll('.chart[data-drawn]').forEach((chart) => delete chart.dataset.drawn); // in the new colours
    drawCharts();
  },
});

document.addEventListener('click', (event) => {
  const copy = event.target.closest('[data-copy]');
  if (copy) copyText(copy, copy.parentElement.querySelector('input').value);
});

// -- formulas: KaTeX from gradio's own files
let katex = null;
async function loadKatex() {
  const place = element.querySelector('[data-katex]');
  if (!place) return null;
  const style = document.createElement('link');
  style.rel = 'stylesheet';
  style.href = place.dataset.katexStyle;
  document.head.append(style);
  return (await import(new URL(place.dataset.katex, document.baseURI).href)).default;
}

// -- the link in the panel Export, with this server's address in front
function completeLinks() {
  for (const field of document.querySelectorAll('.link input')) {
    const whole = location.origin + location.pathname + field.getAttribute('value');
    if (field.value !== whole) field.value = whole;
  }
}

// -- charts: the scripts that draw them come with the first one
let charts = null;
async function drawCharts() {
  for (const chart of document.querySelectorAll('.chart[data-drawn]')) {
    if (!chart.plot || chart.plot.isConnected) continue;
    chart.plot.view?.finalize(); // gradio kept the element and put a new chart's data into it
    chart.plot = null;
    delete chart.dataset.drawn;
  }
  if (!document.querySelector('.chart:not([data-drawn])')) return;
  if (!charts) {
    const script = (name) => import(new URL(`charts/${name}.js`, document.baseURI).href);
    charts = script('vega').then(() => script('loader'));
  }
  await charts;
  await window.drawCharts();
}

document.addEventListener('chart-click', (event) => go(event.detail));

function drawAll() {
  completeLinks();
  if (document.querySelector(UNDRAWN)) (katex ??= loadKatex()).then(drawFormulas).catch(() => {});
  drawCharts().catch((error) => console.error(error));
}

new MutationObserver(drawAll).observe(document.body, { childList: true, subtree: true });
drawAll();
