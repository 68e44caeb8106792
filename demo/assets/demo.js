// The page's own behaviour: clicks on marks, keys, the address, formulas, pictures of charts.
// gradio runs this once for the hidden component that holds the view's query (demo/app.py).
const MARKS = 'svg [data-go], span[data-go]';
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
// -- the link of the panel to take away, with this server's address in front
function completeLinks() {
  for (const field of document.querySelectorAll('.link input')) {
    const whole = location.origin + location.pathname + field.getAttribute('value');
    if (field.value !== whole) field.value = whole;
  }
}

new MutationObserver(() => { completeLinks(); drawFormulas().catch(() => {}); }).observe(document.body, { childList: true, subtree: true });
drawFormulas().catch(() => {});

// -- a chart as PNG, in the colours of the moment
const DRAWN = ['fill', 'fill-opacity', 'stroke', 'stroke-width', 'stroke-dasharray', 'stroke-linejoin', 'opacity',
  'font-family', 'font-size', 'font-weight', 'text-anchor', 'stroke-opacity'];
async function savePicture(figure, name) {
  const svg = figure.querySelector('svg');
  const copy = svg.cloneNode(true);
  const originals = [svg, ...svg.querySelectorAll('*')];
  [copy, ...copy.querySelectorAll('*')].forEach((node, index) => {
    const style = getComputedStyle(originals[index]);
    node.setAttribute('style', DRAWN.map((key) => key + ':' + style.getPropertyValue(key)).join(';'));
  });
  const [, , width, height] = svg.getAttribute('viewBox').split(' ').map(Number);
  copy.setAttribute('xmlns', 'http://www.w3.org/2000/svg');
  copy.setAttribute('width', width);
  copy.setAttribute('height', height);
  const picture = new Image();
  picture.src = 'data:image/svg+xml;charset=utf-8,' + encodeURIComponent(new XMLSerializer().serializeToString(copy));
  await picture.decode();
  const scale = 2, title = 34;
  const canvas = document.createElement('canvas');
  canvas.width = scale * width;
  canvas.height = scale * (height + title);
  const pen = canvas.getContext('2d');
  const page = getComputedStyle(figure);
  pen.scale(scale, scale);
  pen.fillStyle = page.backgroundColor;
  pen.fillRect(0, 0, width, height + title);
  pen.fillStyle = page.color;
  pen.font = '600 14px ' + page.fontFamily;
  pen.fillText(figure.querySelector('figcaption').firstChild.textContent, 14, 23);
  pen.drawImage(picture, 0, title, width, height);
  const link = document.createElement('a');
  link.download = name + '.png';
  link.href = URL.createObjectURL(await new Promise((done) => canvas.toBlob(done, 'image/png')));
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
