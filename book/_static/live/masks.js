// The figure `masks` (book/_tools/live.py): a mask by its formula, and which of its tiles are skipped, masked and whole.
(() => {
  // -- Formulas: a subset of Python's expressions, read here and never handed to the browser as code.
  const TOKEN = /\s*(?:(\d+)|([A-Za-z_]\w*)|(<=|>=|==|!=|\/\/|[-+*%()<>&|~,]))/y;
  const NUMBER = 'number', TRUTH = 'truth value'; // the two types
  const LONGEST = 200; // characters of a formula
  const said = type => (type === TRUTH ? 'a comparison' : 'a number');
  const ALONE = { '=': 'write == to compare', '/': 'write // to divide', '!': 'write != or not' };

  const tokens = text => {
    const found = [];
    TOKEN.lastIndex = 0;
    while (text.slice(TOKEN.lastIndex).trim()) {
      const from = TOKEN.lastIndex, match = TOKEN.exec(text);
      if (!match) {
        const sign = text.slice(from).trim()[0];
        throw new Error(`${sign} is not allowed here` + (ALONE[sign] ? `: ${ALONE[sign]}` : ''));
      }
      found.push(match[0].trim());
    }
    return found;
  };

  // Safe integers only, so that every number is exact.
  const exact = x => {
    if (!Number.isSafeInteger(x)) throw new Error('a number becomes too large');
    return x;
  };
  const rest = (a, b) => { // from 0 to b, as Python's
    if (b === 0) throw new Error('it divides by 0');
    return ((a % b) + b) % b;
  };
  const BINARY = {
    '+': (a, b) => exact(a + b), '-': (a, b) => exact(a - b), '*': (a, b) => exact(a * b),
    '//': (a, b) => (a - rest(a, b)) / b, '%': (a, b) => rest(a, b),
    '<': (a, b) => a < b, '<=': (a, b) => a <= b, '>': (a, b) => a > b, '>=': (a, b) => a >= b,
    '==': (a, b) => a === b, '!=': (a, b) => a !== b,
    and: (a, b) => a && b, or: (a, b) => a || b, '&': (a, b) => a && b, '|': (a, b) => a || b,
  };
  // From the loosest to the tightest, as Python has them.
  const LEVELS = [['or'], ['and'], ['not'], ['<', '<=', '>', '>=', '==', '!='], ['|'], ['&'], ['+', '-'], ['*', '//', '%']];

  // {type, value(i, j)} of a formula, or an Error that says what is wrong.
  const read = (text, documents) => {
    if (text.length > LONGEST) throw new Error(`the formula has more than ${LONGEST} characters`);
    const words = tokens(text);
    const want = (part, type, sign) => {
      if (part.type !== type) {
        const cure = sign === '&' || sign === '|' ? ': put each comparison in parentheses' : '';
        throw new Error(`${sign} needs ${said(type)}, got ${said(part.type)}${cure}`);
      }
      return part.value;
    };
    const take = sign => {
      if (words[0] !== sign) throw new Error(words.length ? `expected ${sign} before ${words[0]}` : `${sign} is missing at the end`);
      words.shift();
    };
    const FUNCTIONS = {
      abs: [1, Math.abs], min: [2, Math.min], max: [2, Math.max],
      doc: [1, n => {
        if (!(n in documents)) throw new Error(`there is no token ${n}, so doc(${n}) has no value`);
        return documents[n];
      }],
    };
    const atom = () => {
      const word = words.shift();
      if (word === undefined) throw new Error('the formula ends too early');
      if (/^\d/.test(word)) {
        const number = exact(Number(word));
        return { type: NUMBER, value: () => number };
      }
      if (word === '(') {
        const part = level(0);
        take(')');
        return part;
      }
      if (word === '-' || word === '~') {
        const type = word === '-' ? NUMBER : TRUTH, value = want(atom(), type, word);
        return { type, value: word === '-' ? (i, j) => -value(i, j) : (i, j) => !value(i, j) };
      }
      if (word === 'i') return { type: NUMBER, value: i => i };
      if (word === 'j') return { type: NUMBER, value: (i, j) => j };
      if (Object.hasOwn(FUNCTIONS, word)) {
        const [count, call] = FUNCTIONS[word], given = [];
        take('(');
        do given.push(want(level(0), NUMBER, word)); while (words[0] === ',' && words.shift());
        take(')');
        if (given.length !== count) throw new Error(`${word} takes ${count === 1 ? 'one number' : 'two numbers'}, got ${given.length}`);
        return { type: NUMBER, value: (i, j) => call(...given.map(value => value(i, j))) };
      }
      if (/^\w/.test(word) && !['and', 'or', 'not'].includes(word))
        throw new Error(`${word} is not known: the names are i, j, doc, abs, min, max, and, or, not`);
      throw new Error(`${word} is in the wrong place`);
    };
    const level = depth => {
      if (depth === LEVELS.length) return atom();
      const signs = LEVELS[depth], next = () => level(depth + 1);
      if (signs[0] === 'not') {
        if (words[0] !== 'not') return next();
        words.shift();
        const value = want(level(depth), TRUTH, 'not');
        return { type: TRUTH, value: (i, j) => !value(i, j) };
      }
      let left = next(), chain = null;
      while (signs.includes(words[0])) {
        const sign = words.shift(), type = depth === 3 || depth > 5 ? NUMBER : TRUTH;
        const right = next(), a = want(left, type, sign), b = want(right, type, sign), apply = BINARY[sign];
        if (depth !== 3) left = { type, value: (i, j) => apply(a(i, j), b(i, j)) };
        else { // a < b < c means a < b and b < c
          const before = chain;
          chain = (i, j) => (!before || before(i, j)) && apply(a(i, j), b(i, j));
          left = right;
        }
      }
      return chain ? { type: TRUTH, value: chain } : left;
    };
    if (!words.length) throw new Error('the formula is empty');
    const whole = level(0);
    if (words.length) throw new Error(`${words[0]} is in the wrong place`);
    if (whole.type !== TRUTH) throw new Error('a mask compares: write i < j, for example');
    return whole.value;
  };

  // -- Tiles
  const compute = (formula, rows, columns, n, starts) => {
    const documents = Array.from({ length: n }, (_, token) => starts.findLastIndex(start => start <= token));
    const sees = read(formula, documents), range = [...Array(n).keys()];
    const seen = range.map(i => range.map(j => sees(i, j)));
    const found = { skipped: 0, masked: 0, whole: 0, seen: 0 }, tiles = { masked: '', whole: '' };
    for (let top = 0; top < n; top += rows)
      for (let left = 0; left < n; left += columns) {
        const pairs = seen.slice(top, top + rows).flatMap(row => row.slice(left, left + columns));
        const count = pairs.filter(Boolean).length;
        const tile = !count ? 'skipped' : count < pairs.length ? 'masked' : 'whole';
        found[tile] += 1;
        found.seen += count;
        if (tile !== 'skipped') tiles[tile] += `M${left} ${top}h${columns}v${rows}h-${columns}z`;
      }
    found.read = found.masked + found.whole;
    found.computed = found.read * rows * columns;
    let pairs = '', lines = '';
    seen.forEach((row, i) => {
      for (let first = 0, end; first < n; first = end + 1) {
        for (end = first; end < n && row[end]; end += 1);
        if (end > first) pairs += `M${first} ${i}h${end - first}v1h-${end - first}z`;
      }
    });
    for (let y = 0; y <= n; y += rows) lines += `M0 ${y}h${n}`;
    for (let x = 0; x <= n; x += columns) lines += `M${x} 0v${n}`;
    return { found, paths: [tiles.masked, pairs, tiles.whole, lines] };
  };

  for (const figure of document.querySelectorAll('figure[data-live="masks"]')) {
    const example = figure.querySelector('select'), formula = figure.querySelector('input[type="text"]');
    const sliders = [...figure.querySelectorAll('input[type="range"]')], wrong = figure.querySelector('.live-wrong');
    const starts = figure.querySelector('svg').dataset.starts.split(' ').map(Number);
    const show = () => {
      const [rows, columns] = sliders.map(slider => 2 ** slider.value);
      sliders.forEach((slider, side) => slider.setAttribute('aria-valuetext', [rows, columns][side]));
      let drawn = null;
      wrong.textContent = '';
      try { drawn = compute(formula.value, rows, columns, 16, starts); }
      catch (error) { wrong.textContent = error.message; }
      formula.setAttribute('aria-invalid', !drawn);
      const found = { rows, columns, ...drawn?.found };
      figure.querySelectorAll('svg path').forEach((path, number) => path.setAttribute('d', drawn ? drawn.paths[number] : ''));
      for (const spot of figure.querySelectorAll('[data-show]')) spot.textContent = found[spot.dataset.show] ?? '–';
    };
    example.addEventListener('input', () => {
      if (example.value) formula.value = example.value;
      show();
    });
    formula.addEventListener('input', () => {
      example.value = [...example.options].some(option => option.value === formula.value) ? formula.value : '';
      show();
    });
    for (const slider of sliders) slider.addEventListener('input', show);
    for (const control of [example, formula, ...sliders]) control.disabled = false;
    figure.compute = compute; // for tests/test_live.py
    show();
  }
})();
