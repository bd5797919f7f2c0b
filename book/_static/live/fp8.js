// The figure `fp8` (book/_tools/live_fp8.py): outliers in eight bits, with scales and the transform on or off.
(() => {
  const QUERY = [0.9, -1.3, 1.0, 0.6, -0.7, 1.1, -0.4, 1.6];
  const KEYS = [[1.2, 0.5, 1.0, -0.8, 1.4, -0.3, 0.7, -1.1], [-0.06, 0.14, 0.08, 0.11, -0.12, 0.04, 0.09, 0.07]];
  const LARGE = { 2: [1, 1], 5: [0.755, -0.763] }; // factors of two columns, in the query and the first key
  const LARGEST = 448, ROWS = ['query', 'key 1', 'key 2'];

  const nearest = x => { // ties to even
    const down = Math.floor(x), part = x - down;
    return part > 0.5 || (part === 0.5 && down % 2 !== 0) ? down + 1 : down;
  };
  const rounded = x => { // to E4M3
    let exponent = -6;
    while (exponent < 8 && Math.abs(x) >= 2 ** (exponent + 1)) exponent++;
    const step = 2 ** (exponent - 3);
    return Math.max(-LARGEST, Math.min(LARGEST, nearest(x / step) * step));
  };
  const most = row => Math.max(...row.map(Math.abs));
  const product = (a, b) => a.reduce((sum, x, n) => sum + x * b[n], 0);

  const compute = (size, apart, turned, signs) => {
    const large = (row, which) => row.map((x, n) => (n in LARGE ? size * LARGE[n][which] : x));
    let rows = [large(QUERY, 0), large(KEYS[0], 1), KEYS[1]];
    const exact = rows.map(row => product(row, rows[0]));
    const entry = (i, n) => (((i & n).toString(2).split('1').length % 2 ? 1 : -1) * signs[i]) / Math.sqrt(8);
    if (turned) rows = rows.map(row => row.map((_, n) => product(row, row.map((_, i) => entry(i, n)))));
    const all = Math.max(most(rows[1]), most(rows[2]));
    rows = rows.map((row, which) => {
      const scale = (which && !apart ? all : most(row)) / LARGEST;
      return row.map(x => rounded(x / scale) * scale);
    });
    const found = { size };
    rows.forEach((row, which) => row.forEach((x, n) => { found[`${ROWS[which]} ${n + 1}`] = x; }));
    for (const which of [1, 2]) {
      const score = product(rows[which], rows[0]), key = ROWS[which];
      found[`exact ${key}`] = exact[which];
      found[`score ${key}`] = score;
      found[`error ${key}`] = 100 * Math.abs(score / exact[which] - 1);
    }
    return found;
  };

  const text = (name, found) => {
    if (name === 'size') return found.size.toLocaleString('en-US');
    const wide = Math.abs(found[name]) >= 1000, score = /^(exact|score)/.test(name);
    const digits = name.startsWith('key 2') ? 3 : wide ? 0 : score ? 2 : 1;
    return found[name].toFixed(digits).replace('-', '\u2212');
  };

  for (const figure of document.querySelectorAll('figure[data-live="fp8"]')) {
    const [slider, apart, turned] = figure.querySelectorAll('input');
    const signs = JSON.parse(figure.querySelector('[data-signs]').dataset.signs);
    const show = () => {
      const found = compute(2 ** slider.value, apart.checked, turned.checked, signs);
      for (const spot of figure.querySelectorAll('[data-show]')) spot.textContent = text(spot.dataset.show, found);
      slider.setAttribute('aria-valuetext', 2 ** slider.value);
    };
    for (const control of [slider, apart, turned]) {
      control.disabled = false;
      control.addEventListener('input', show);
    }
    figure.compute = compute; // for tests/test_live.py
    show();
  }
})();
