// The page's own behaviour: clicks on marks, keys, the address, formulas, pictures of charts.
// gradio runs this once for the hidden component that holds the view's query (demo/app.py).
const MARKS = 'span[data-go]';
const go = (patch) => trigger('go', { patch });

watch('value', () => {
  history.replaceState(null, '', props.value ? '?' + props.value : location.pathname);
});

document.addEventListener('click', (event) => {
  const mark = event.target.closest('[data-go]');
  if (mark && !mark.disabled) { event.preventDefault(); go(mark.dataset.go); return; }
  const save = event.target.closest('[data-png]');
  if (save) { savePicture(save.closest('figure'), save.dataset.png); return; }
  if (event.target.closest('[data-theme]')) { setDark(!document.body.classList.contains('dark')); return; }
  const copy = event.target.closest('[data-copy]');
  if (copy) copyLink(copy);
});

document.addEventListener('change', (event) => {
  const range = event.target.closest('input[data-values]');
  if (range) return go(range.dataset.name + '=' + range.dataset.values.split(',')[range.value] + '&group=');
  const select = event.target.closest('select[data-name]');
  if (select) go(select.dataset.name + '=' + encodeURIComponent(select.value));
});

document.addEventListener('keydown', (event) => {
  const typing = event.target.closest('input, textarea, select, [contenteditable], [role=listbox], [role=tab]');
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  if ((event.key === 'Enter' || event.key === ' ') && event.target.closest(MARKS)) {
    event.preventDefault();
    go(event.target.closest(MARKS).dataset.go);
    return;
  }
  const name = { ArrowLeft: 'previous', ArrowRight: 'next' }[event.key];
  const button = name && document.querySelector('[data-step=' + name + ']');
  if (button && button.offsetParent && !button.disabled) { event.preventDefault(); button.click(); }
});

function setDark(dark) {
  document.body.classList.toggle('dark', dark);
  document.querySelectorAll('.chart[data-drawn]').forEach((chart) => delete chart.dataset.drawn); // in the new colours
  drawCharts();
}

function copyLink(button) {
  const field = button.parentElement.querySelector('input');
  const said = button.textContent;
  field.select();
  document.execCommand('copy');
  button.textContent = 'copied';
  setTimeout(() => { button.textContent = said; }, 1500);
}

// -- formulas: KaTeX from gradio's own files; what it does not understand stays as it is
let katex = null;
async function drawFormulas() {
  const waiting = document.querySelectorAll('.tex:not([data-drawn])');
  if (!waiting.length) return;
  if (!katex) {
    const place = element.querySelector('[data-katex]');
    if (!place) return;
    const style = document.createElement('link');
    style.rel = 'stylesheet';
    style.href = place.dataset.katexStyle;
    document.head.append(style);
    katex = import(new URL(place.dataset.katex, document.baseURI).href).then((module) => module.default);
  }
  const library = await katex;
  for (const span of document.querySelectorAll('.tex:not([data-drawn])')) {
    const source = span.textContent;
    span.dataset.drawn = 'yes';
    try {
      const options = { displayMode: span.classList.contains('display'), throwOnError: true, trust: false,
        strict: 'ignore', maxSize: 20, maxExpand: 200, output: 'html' };
      const box = document.createElement('span');
      library.render(source, box, options);
      span.title = source;
      span.replaceChildren(box);
    } catch (error) { span.textContent = source; }
  }
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
  drawFormulas().catch(() => {});
  drawCharts().catch((error) => console.error(error));
}

new MutationObserver(drawAll).observe(document.body, { childList: true, subtree: true });
drawAll();

// -- a card's charts as PNG, with its title and legends, in the colours of the moment
async function savePicture(figure, name) {
  const scale = 2, margin = 14, line = 22;
  const parts = [];
  for (const chart of figure.querySelectorAll('.chart')) {
    if (!chart.plot?.view) return; // not drawn yet
    const legend = [...chart.querySelectorAll('.legend button[aria-pressed=true]')].map((button) =>
      ({ text: button.textContent, color: getComputedStyle(button.querySelector('i')).color }));
    parts.push({ legend, picture: await chart.plot.view.toCanvas(scale) });
  }
  const width = Math.max(...parts.map((part) => part.picture.width / scale)) + 2 * margin;
  const height = parts.reduce((sum, { legend, picture }) => sum + legend.length * line + picture.height / scale + margin, 40);
  const canvas = document.createElement('canvas');
  canvas.width = scale * width;
  canvas.height = scale * height;
  const pen = canvas.getContext('2d');
  const page = getComputedStyle(figure);
  pen.scale(scale, scale);
  pen.fillStyle = page.backgroundColor;
  pen.fillRect(0, 0, width, height);
  const write = (text, size, left, top) => {
    pen.fillStyle = page.color;
    pen.font = size + page.fontFamily;
    pen.fillText(text, left, top);
  };
  write(figure.querySelector('figcaption').firstChild.textContent.trim(), '600 14px ', margin, 25);
  let top = 40;
  for (const { legend, picture } of parts) {
    for (const { text, color } of legend) {
      pen.fillStyle = color;
      pen.fillRect(margin, top + 8, 14, 4);
      write(text, '12px ', margin + 22, top + 14);
      top += line;
    }
    pen.drawImage(picture, margin, top, picture.width / scale, picture.height / scale);
    top += picture.height / scale + margin;
  }
  const link = document.createElement('a');
  link.download = name + '.png';
  link.href = URL.createObjectURL(await new Promise((done) => canvas.toBlob(done, 'image/png')));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
