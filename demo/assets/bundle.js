
// The bundle: the address behind # holds the view, the data comes as scripts, and nothing is asked of a server.
let table = null; // columns of data/index.js
let texts = null; // what a search looks through, once all parts have come
let order = []; // the rows that are kept, in their order
let turn = 0; // of drawing: what comes late for an older one is dropped
const parts = new Map(); // number -> the problems of a part
const waiting = new Map(); // number -> the function that is told when it comes
const $ = (query) => document.querySelector(query);
const view = () => new URLSearchParams(location.hash.slice(1) || { at: table?.at ?? '', sort: table?.sort ?? '' }); // without a hash, what it opens with
const CHARTED = ['overview', 'lengths', 'reasoning']; // tabs with charts of all problems
const tabOf = (query) => ['problems', 'table', ...CHARTED].find((tab) => tab === query.get('tab')) ?? table.tab;
const isDrawn = (tab) => tabOf(view()) === tab;

window.bundlePart = (number, problems) => { parts.set(number, problems); waiting.get(number)?.(); };
window.bundleIndex = (index) => {
  table = index;
  readAlong({
    go,
    search: () => $('[data-find]'),
    searched: () => view().get('text') || '',
    afterTheme: () => document.querySelectorAll('.chart[data-drawn]').forEach((chart) => { delete chart.dataset.drawn; if (CHARTED.some(isDrawn)) window.drawCharts?.(); }),
  });
  if (!kept.get('theme')) document.body.classList.toggle('dark', matchMedia('(prefers-color-scheme: dark)').matches);
  draw();
};

function load(address) {
  return new Promise((resolve, reject) => {
    const script = document.createElement('script');
    script.src = address;
    script.onload = resolve;
    script.onerror = () => reject(new Error(address));
    document.head.append(script);
  });
}

async function part(number) {
  if (!parts.has(number)) {
    const came = new Promise((resolve) => waiting.set(number, resolve));
    await load(`data/part-${number}.js`);
    await came;
  }
  return parts.get(number);
}

function go(patch) {
  const query = view();
  for (const [name, value] of new URLSearchParams(patch)) value ? query.set(name, value) : query.delete(name);
  if (query.toString() === view().toString()) return;
  location.hash = query.toString() || 'at='; // an empty one would be what it opened with
}
addEventListener('hashchange', draw);
document.addEventListener('chart-click', ({ detail }) => { if (new URLSearchParams(detail).get('at')) go(detail); }); // other filters need the server

// -- which problems, in which order: as demo/numbers/problem_table.py
const CHANGED = {
  changed: (before, after) => before !== after, right: (before, after) => after > before, wrong: (before, after) => after < before,
  both_right: (before, after) => before === after && after >= 0.5, both_wrong: (before, after) => before === after && after < 0.5,
};
const spread = (row) => { const lengths = table.length.map((of) => of[row]); return Math.min(...lengths) - Math.max(...lengths); };
const growth = (row) => table.length.at(-1)[row] - table.length[0][row];
const ORDERS = { difference: spread, growth: (row) => -growth(row), shrink: growth,
  longest: (row) => -Math.max(...table.length.map((of) => of[row])), hardest: (row) => table.rate[row] ?? 2 };

function valueOf(sort) {
  if (ORDERS[sort]) return ORDERS[sort];
  const [name, place] = sort.replace(/^-/, '').split('.');
  const column = { difficulty: table.rate.map((rate) => rate ?? 2), id: table.id, category: table.category }[name] ?? table[name]?.[place];
  return column && ((row) => column[row]);
}

async function arrangeProblems(query) {
  const change = CHANGED[query.get('change')], focus = table.keys.indexOf(query.get('focus'));
  const others = focus > 0 ? [focus] : table.keys.map((_, place) => place).slice(1);
  const found = query.get('text') ? await hits(query.get('text')) : null;
  const rows = table.id.map((_, row) => row).filter((row) =>
    (!found || found.has(row)) && (!change || others.some((place) => change(table.score[0][row], table.score[place][row]))));
  const sort = query.get('sort') || '', value = valueOf(sort), sign = sort.startsWith('-') ? -1 : 1;
  if (value) rows.sort((a, b) => sign * (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : 0) || a - b);
  return rows;
}

async function hits(text) {
  if (!texts) {
    $('[data-count]').textContent = 'reading all problems …';
    const last = table.part.at(-1), reader = new DOMParser(); // whose documents run and load nothing
    for (let number = 0; number <= last; number++) await part(number);
    const first = new Map();
    table.part.forEach((number, row) => { if (!first.has(number)) first.set(number, row); });
    const read = (html, places) => [...reader.parseFromString(html, 'text/html').querySelectorAll(places)].map((box) => box.textContent);
    texts = table.id.map((id, row) => {
      const problem = parts.get(table.part[row])[row - first.get(table.part[row])];
      const answers = problem.samples.flatMap(({ columns }) => read(columns, '.source, .grading dd:first-of-type b')); // responses, and what was extracted
      return [id, ...read(problem.card, 'p.question, .clamped, .gold b'), ...answers].join('\n').toLowerCase();
    });
  }
  const wanted = text.toLowerCase();
  return new Set(texts.flatMap((known, row) => (known.includes(wanted) ? [row] : [])));
}

// -- drawing
async function draw() {
  const mine = ++turn, query = view();
  const rows = await arrangeProblems(query);
  if (mine !== turn) return;
  order = rows;
  const tab = tabOf(query);
  const isEmpty = !order.length && !CHARTED.includes(tab);
  document.querySelectorAll('[data-panel]').forEach((panel) => { panel.hidden = panel.dataset.panel !== tab || isEmpty; });
  document.querySelectorAll('[data-tab]').forEach((button) => button.setAttribute('aria-pressed', button.dataset.tab === tab));
  $('[data-place=nothing]').hidden = !isEmpty;
  for (const name of ['sort', 'change']) {
    const select = $(`select[data-name=${name}]`), value = query.get(name) || '';
    select.querySelector('[data-column]')?.remove();
    if (![...select.options].some((option) => option.value === value)) { // the order of a column of the table
      select.append(new Option('a column of the table', value));
      select.lastElementChild.dataset.column = '';
    }
    select.value = value;
  }
  if (document.activeElement !== $('[data-find]')) $('[data-find]').value = query.get('text') || '';
  const total = table.id.length.toLocaleString('en'), noun = table.id.length === 1 ? 'problem' : 'problems';
  $('[data-count]').textContent = order.length < table.id.length ? `${order.length.toLocaleString('en')} of ${total} ${noun}` : `${total} ${noun}`;
  if (isEmpty) return;
  const place = Math.max(0, order.indexOf(table.id.indexOf(query.get('at'))));
  if (tab === 'table') drawTable(place, query.get('sort') || '');
  else if (tab === 'problems') await drawProblem(place, Number(query.get('sample')) || 0, mine);
  else {
    if (!window.drawCharts) await load('assets/vega.js').then(() => load('assets/loader.js'));
    await window.drawCharts();
  }
}

async function drawProblem(place, sample, mine) {
  const row = order[place], number = table.part[row];
  const problem = (await part(number))[row - table.part.indexOf(number)];
  if (mine !== turn) return;
  const shown = problem.samples[Math.min(sample, problem.samples.length - 1)];
  const id = (step) => 'at=' + encodeURIComponent(table.id[order[(place + step + order.length) % order.length]]);
  $('[data-step=previous]').dataset.go = id(-1);
  $('[data-step=next]').dataset.go = id(1);
  const numbers = document.querySelectorAll('.bar .where b');
  $('.bar .where').replaceChildren('problem ', numbers[0], ` of ${order.length.toLocaleString('en')}`);
  numbers[0].textContent = (place + 1).toLocaleString('en');
  $('.bar .at').textContent = table.id[row];
  $('.bar .signs').innerHTML = shown.marks; // HTML of the templates, which escaped every value
  $('[data-place=card]').innerHTML = problem.card;
  $('[data-place=columns]').innerHTML = shown.columns;
  drawFormulas(window.katex);
}

function cell(text, kind, tag = 'td') {
  const box = document.createElement(tag);
  box.className = kind;
  box.append(text);
  return box;
}

function drawTable(place, sort) {
  const start = Math.floor(place / table.num_rows) * table.num_rows, shown = order.slice(start, start + table.num_rows);
  $('[data-place=range]').textContent = `${start + 1} to ${start + shown.length} of ${order.length.toLocaleString('en')}`;
  for (const button of document.querySelectorAll('[data-page]')) {
    const first = order[start + button.dataset.page * table.num_rows];
    button.disabled = first === undefined;
    button.dataset.go = first === undefined ? '' : 'at=' + encodeURIComponent(table.id[first]);
  }
  for (const button of document.querySelectorAll('.problems thead button')) {
    button.dataset.down ??= button.dataset.go.includes('sort=-');
    const name = new URLSearchParams(button.dataset.go).get('sort').replace(/^-/, '');
    const isUp = sort === name, isDown = sort === '-' + name;
    const turnsDown = isUp || (!isDown && button.dataset.down === 'true');
    button.dataset.go = `sort=${turnsDown ? '-' : ''}${name}&at=`;
    button.textContent = button.textContent.replace(/ [↑↓]$/, '') + (isUp ? ' ↑' : isDown ? ' ↓' : '');
    const head = button.closest('th');
    isUp || isDown ? head.setAttribute('aria-sort', isUp ? 'ascending' : 'descending') : head.removeAttribute('aria-sort');
  }
  $('.problems tbody').replaceChildren(...shown.map((row) => {
    const line = document.createElement('tr'), button = document.createElement('button');
    button.textContent = table.id[row];
    button.dataset.go = 'tab=problems&at=' + encodeURIComponent(table.id[row]);
    const head = cell(button, '', 'th');
    head.scope = 'row';
    line.className = row === order[place] ? 'here' : '';
    line.append(head, cell(table.category[row], ''), cell(table.difficulty[row], ''));
    table.keys.forEach((_, checkpoint) => {
      const score = table.score[checkpoint][row], length = table.length[checkpoint][row];
      line.append(cell(score === 1 ? '✓' : score === 0 ? '✗' : `${Math.round(100 * score)} %`, score === 1 ? 'right' : score === 0 ? 'not' : 'some'));
      line.append(cell(length.toLocaleString('en', { maximumSignificantDigits: length < 100 ? 3 : 21, maximumFractionDigits: 0 }), 'number'));
    });
    line.append(cell(table.question[row], 'asks'));
    return line;
  }));
}

let typing = 0;
document.addEventListener('input', ({ target }) => {
  if (!target.matches('[data-find]')) return;
  clearTimeout(typing);
  typing = setTimeout(() => go('at=&text=' + encodeURIComponent(target.value.trim())), 250);
});
