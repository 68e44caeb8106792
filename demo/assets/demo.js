
// The behaviour of the page under gradio, which runs this once, below reading.js, for the hidden component that holds
// the view's query (demo/app.py): clicks on marks, the address and the way back, formulas, pictures of charts.
const go = (patch) => trigger('go', { patch });

let replaces = true; // the first address takes the place of what was typed, and the way back adds no entry
watch('value', () => {
  const address = props.value ? '?' + props.value : location.pathname;
  if (address !== location.search || replaces) history[replaces ? 'replaceState' : 'pushState'](null, '', address);
  replaces = false;
});
addEventListener('popstate', () => {
  if (location.search.slice(1) === props.value) return;
  replaces = true;
  go('?' + location.search.slice(1));
});

readAlong({
  go,
  search: () => document.querySelector('#control-text input, #control-text textarea'),
  searched: () => new URLSearchParams(props.value || '').get('text') || '',
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
