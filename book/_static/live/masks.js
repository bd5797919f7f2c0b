// The figure `masks` (book/_tools/live.py): which tiles of a mask are skipped, masked and whole.
(() => {
  // The keys that query i of n sees: from the first to the one before the end.
  const range = (kind, i, n, before, after, starts) => {
    if (kind === 'packed') return [Math.max(...starts.filter(start => start <= i)), i + 1];
    return kind === 'causal' ? [0, i + 1] : [Math.max(i - before, 0), Math.min(i + after + 1, n)];
  };

  const compute = (kind, rows, columns, before, after, n, starts) => {
    const ranges = Array.from({ length: n }, (_, i) => range(kind, i, n, before, after, starts));
    const found = { skipped: 0, masked: 0, whole: 0, seen: 0 }, tiles = { masked: '', whole: '' };
    for (let top = 0; top < n; top += rows)
      for (let left = 0; left < n; left += columns) {
        let seen = 0;
        for (const [first, end] of ranges.slice(top, top + rows))
          seen += Math.max(Math.min(end, left + columns) - Math.max(first, left), 0);
        const tile = !seen ? 'skipped' : seen < rows * columns ? 'masked' : 'whole';
        found[tile] += 1;
        found.seen += seen;
        if (tile !== 'skipped') tiles[tile] += `M${left} ${top}h${columns}v${rows}h-${columns}z`;
      }
    found.read = found.masked + found.whole;
    found.computed = found.read * rows * columns;
    const pairs = ranges.map(([first, end], i) => `M${first} ${i}h${end - first}v1h-${end - first}z`).join('');
    let lines = '';
    for (let y = 0; y <= n; y += rows) lines += `M0 ${y}h${n}`;
    for (let x = 0; x <= n; x += columns) lines += `M${x} 0v${n}`;
    return { found, paths: [tiles.masked, pairs, tiles.whole, lines] };
  };

  for (const figure of document.querySelectorAll('figure[data-live="masks"]')) {
    const kind = figure.querySelector('select'), sliders = [...figure.querySelectorAll('input')];
    const starts = figure.querySelector('svg').dataset.starts.split(' ').map(Number);
    const show = () => {
      const [rows, columns] = sliders.slice(0, 2).map(slider => 2 ** slider.value);
      const [before, after] = sliders.slice(2).map(slider => slider.valueAsNumber);
      for (const slider of sliders.slice(2)) slider.disabled = kind.value !== 'window';
      const { found, paths } = compute(kind.value, rows, columns, before, after, 16, starts);
      Object.assign(found, { rows, columns, before, after });
      figure.querySelectorAll('svg path').forEach((path, number) => path.setAttribute('d', paths[number]));
      sliders.slice(0, 2).forEach((slider, side) => slider.setAttribute('aria-valuetext', [rows, columns][side]));
      for (const spot of figure.querySelectorAll('[data-show]')) spot.textContent = found[spot.dataset.show];
    };
    for (const control of [kind, ...sliders]) {
      control.disabled = false;
      control.addEventListener('input', show);
    }
    figure.compute = compute; // for tests/test_live.py
    show();
  }
})();
