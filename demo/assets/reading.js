// What helps to read: keys, switches, marks, copying, the theme. The page under gradio and the bundle share it; each
// says in `readAlong` how a patch of the address is followed.
const UNDRAWN = '.tex:not([data-drawn])';
const SWITCHES = { differences: 'd', together: 's', plain: 'm' };
const kept = { // what a visitor chose, for the next visit; a browser may refuse to keep it
  get(name) { try { return localStorage.getItem('vlm-rl-' + name); } catch { return null; } },
  set(name, value) { try { localStorage.setItem('vlm-rl-' + name, value); } catch { /* then it lasts as long as the page */ } },
};
const isTyping = (place) => place.closest('input, textarea, select, [contenteditable], [role=listbox], [role=tab]');
const opened = new Set(); // the details that were unfolded, which stay so when the page is drawn again

function readAlong({ go, search, searched, afterTheme }) {
  const setDark = (dark) => {
    document.body.classList.toggle('dark', dark);
    afterTheme();
  };
  const flip = (name) => {
    const on = document.body.classList.toggle('read-' + name);
    kept.set(name, on ? 'on' : '');
    arrange();
  };
  const arrange = () => { // whatever was drawn last
    for (const name of Object.keys(SWITCHES)) {
      const on = document.body.classList.contains('read-' + name);
      document.querySelectorAll(`[data-switch=${name}]`).forEach((button) => button.setAttribute('aria-pressed', on));
    }
    for (const box of document.querySelectorAll('details[data-keep]')) box.open = opened.has(box.dataset.keep);
    for (const box of document.querySelectorAll('.tex.display')) if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
    document.body.style.setProperty('--bar', `${document.querySelector('.bar')?.offsetHeight ?? 0}px`);
    markHits(searched());
    markDifferences();
  };
  if (kept.get('theme')) setDark(kept.get('theme') === 'dark');
  for (const name of Object.keys(SWITCHES)) document.body.classList.toggle('read-' + name, kept.get(name) === 'on');

  document.addEventListener('click', (event) => {
    const target = event.target.closest('[data-go], [data-theme], [data-switch], [data-jump], [data-zoom], [data-copy-text], [data-unfold]');
    if (!target || target.disabled) return;
    const { go: patch, switch: name, jump } = target.dataset;
    event.preventDefault();
    if (patch !== undefined) go(patch);
    else if (name) flip(name);
    else if (jump) document.querySelectorAll('.ckpt')[jump].scrollIntoView({ block: 'start' });
    else if ('unfold' in target.dataset) target.setAttribute('aria-expanded', document.body.classList.toggle('unfolded')); // the controls, on a phone
    else if ('zoom' in target.dataset) target.closest('.problem').classList.toggle('large');
    else if ('copyText' in target.dataset) copyText(target, target.parentElement.querySelector('.source').textContent);
    else {
      setDark(!document.body.classList.contains('dark'));
      kept.set('theme', document.body.classList.contains('dark') ? 'dark' : 'light');
    }
  });
  // what a visitor folds is known at the click: the event `toggle` comes after it, and a page drawn in between would
  // undo the click; it also comes when a new drawing has folded the box. A search of the browser unfolds without a click.
  document.addEventListener('click', ({ target }) => {
    const box = target.closest('summary')?.closest('details[data-keep]');
    if (box) opened[box.open ? 'delete' : 'add'](box.dataset.keep);
  }, true);
  document.addEventListener('toggle', ({ target }) => {
    if (target.dataset?.keep && target.open) opened.add(target.dataset.keep);
  }, true);
  document.addEventListener('change', (event) => {
    const range = event.target.closest('input[data-values]');
    if (range) return go(range.dataset.name + '=' + range.dataset.values.split(',')[range.value] + '&group=');
    const select = event.target.closest('select[data-name], input[type=text][data-name]');
    if (select) go(select.dataset.name + '=' + encodeURIComponent(select.value));
  });
  document.addEventListener('keydown', (event) => {
    if (isTyping(event.target) || event.ctrlKey || event.metaKey || event.altKey) return;
    const mark = event.target.closest('span[data-go]');
    const step = { ArrowLeft: 'previous', ArrowRight: 'next' }[event.key];
    const button = step && document.querySelector('[data-step=' + step + ']');
    const name = Object.keys(SWITCHES).find((name) => SWITCHES[name] === event.key);
    if (mark && (event.key === 'Enter' || event.key === ' ')) go(mark.dataset.go);
    else if (button?.offsetParent && !button.disabled) button.click();
    else if (event.key === '/' && search()) search().focus();
    else if (event.key === 't') go(document.querySelector('.problems')?.offsetParent ? 'tab=problems' : 'tab=table');
    else if (name) flip(name);
    else return;
    event.preventDefault();
  });
  addEventListener('resize', arrange);
  document.addEventListener('scroll', ({ target }) => scrollAlong(target), true);

  let waits = false; // several changes of the page are arranged at once
  new MutationObserver(() => {
    if (waits) return;
    waits = true;
    requestAnimationFrame(() => { waits = false; arrange(); });
  }).observe(document.body, { childList: true, subtree: true });
  arrange();
}

function copyText(button, text) {
  const box = document.createElement('textarea'); // navigator.clipboard is missing on http, and in files
  const said = button.textContent;
  box.value = text;
  box.className = 'unseen';
  document.body.append(box);
  box.select();
  document.execCommand('copy');
  box.remove();
  button.focus();
  button.textContent = 'copied';
  setTimeout(() => { button.textContent = said; }, 1500);
}

// -- formulas: what KaTeX does not understand stays as it is
function drawFormulas(library) {
  if (!library) return;
  for (const span of document.querySelectorAll(UNDRAWN)) {
    const source = span.textContent;
    span.dataset.drawn = 'yes';
    try {
      const options = { displayMode: span.classList.contains('display'), throwOnError: true, trust: false,
        strict: 'ignore', maxSize: 20, maxExpand: 200, output: 'html' };
      const box = document.createElement('span');
      library.render(source, box, options);
      span.title = source;
      span.setAttribute('role', 'math'); // its drawing is hidden from screen readers
      span.setAttribute('aria-label', source);
      span.replaceChildren(box);
    } catch (error) { span.textContent = source; }
  }
}

// -- columns that scroll together: each to the same share of its height
const led = new WeakMap(); // where this script put a column, so that it does not follow itself
function scrollAlong(column) {
  if (!document.body.classList.contains('read-together') || !column.matches?.('.ckpt .reasoning')) return;
  if (Math.abs((led.get(column) ?? -9) - column.scrollTop) < 2) return;
  led.delete(column);
  const share = column.scrollTop / Math.max(1, column.scrollHeight - column.clientHeight);
  for (const other of document.querySelectorAll('.ckpt .reasoning')) {
    if (other === column || !other.offsetParent) continue;
    other.scrollTop = share * (other.scrollHeight - other.clientHeight);
    led.set(other, other.scrollTop);
  }
}

// -- marks in texts, which leave the document as it is
const setMarks = (name, ranges) => window.CSS?.highlights?.set(name, new Highlight(...ranges));

function* textsOf(box) {
  const walker = document.createTreeWalker(box, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) yield walker.currentNode;
}

function rangeOf(node, start, end) {
  const range = document.createRange();
  range.setStart(node, start);
  range.setEnd(node, end);
  return range;
}

function markHits(text) {
  const ranges = [];
  const wanted = text && new RegExp(text.replace(/[.*+?^${}()|[\]\\]/g, '\\$&'), 'gi');
  const places = '.question, .id, .at, .rendered, .source, .gold, .grading, .problems tbody';
  for (const box of wanted ? document.querySelectorAll(places) : [])
    for (const node of box.offsetParent ? textsOf(box) : [])
      for (const hit of node.data.matchAll(wanted)) ranges.push(rangeOf(node, hit.index, hit.index + hit[0].length));
  setMarks('hit', ranges);
}

function wordsOf(box) { // a formula is one word
  const words = [];
  for (const node of textsOf(box)) {
    const formula = node.parentElement.closest('.tex');
    if (!formula) for (const word of node.data.matchAll(/\S+/g)) words.push({ text: word[0], node, start: word.index, end: word.index + word[0].length });
    else if (words.at(-1)?.formula !== formula) words.push({ text: formula.title || formula.textContent, formula });
  }
  return words;
}

function markDifferences() {
  const boxes = [...document.querySelectorAll('.ckpt')].map((column) =>
    [...column.querySelectorAll('.reasoning')].find((box) => box.offsetParent));
  const ranges = [];
  if (document.body.classList.contains('read-differences') && boxes[0]) {
    const columns = boxes.map((box) => (box ? wordsOf(box) : []));
    const base = columns[0].map((word) => word.text), shared = new Set();
    columns.slice(1).forEach((words) => {
      const pairs = commonWords(base, words.map((word) => word.text));
      pairs.forEach(([place]) => shared.add(place));
      ranges.push(...rangesOf(words, new Set(pairs.map((pair) => pair[1]))));
    });
    if (columns.length === 2) ranges.push(...rangesOf(columns[0], shared));
  }
  setMarks('difference', ranges);
}

function rangesOf(words, shared) { // neighbours in one text become one range
  const ranges = [];
  let last = null;
  words.forEach((word, place) => {
    if (shared.has(place)) { last = null; return; }
    if (word.formula) {
      const range = document.createRange();
      range.selectNodeContents(word.formula);
      ranges.push(range);
      last = null;
    } else if (last?.endContainer === word.node) last.setEnd(word.node, word.end);
    else ranges.push(last = rangeOf(word.node, word.start, word.end));
  });
  return ranges;
}

// Return [place in a, place in b] of the words of a longest common subsequence (Myers, Algorithmica 1986). Texts that
// differ in more than `limit` words share their beginning and end only.
function commonWords(a, b, limit = 1500) {
  const pairs = [];
  let start = 0, end = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) pairs.push([start, start++]);
  while (end < a.length - start && end < b.length - start && a.at(-1 - end) === b.at(-1 - end))
    pairs.push([a.length - ++end, b.length - end]);
  const n = a.length - start - end, m = b.length - start - end, center = Math.min(limit, n + m) + 1;
  const furthest = new Int32Array(2 * center + 1), rounds = [];
  for (let d = 0; d < center; d++) {
    rounds.push(furthest.slice(center - d - 1, center + d + 2));
    for (let k = -d; k <= d; k += 2) {
      const down = k === -d || (k !== d && furthest[center + k - 1] < furthest[center + k + 1]);
      let x = down ? furthest[center + k + 1] : furthest[center + k - 1] + 1;
      while (x < n && x - k < m && a[start + x] === b[start + x - k]) x++;
      furthest[center + k] = x;
      if (x >= n && x - k >= m) return pairs.concat(pathBack(rounds, n, m, start));
    }
  }
  return pairs;
}

function pathBack(rounds, n, m, start) {
  const pairs = [];
  let x = n, y = m;
  for (let d = rounds.length - 1; d >= 0; d--) {
    const at = (k) => rounds[d][k + d + 1], k = x - y;
    const down = k === -d || (k !== d && at(k - 1) < at(k + 1));
    const fromX = d ? at(down ? k + 1 : k - 1) : 0, fromY = d ? fromX - (down ? k + 1 : k - 1) : 0;
    while (x > fromX && y > fromY) pairs.push([start + --x, start + --y]);
    [x, y] = [fromX, fromY];
  }
  return pairs;
}
