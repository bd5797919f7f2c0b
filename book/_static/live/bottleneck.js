// The figure `bottleneck` (book/_tools/live.py): a roofline with standard attention and flash2 on it.
(() => {
  // Bytes that move (four for an entry of S, two for any other number), and words of
  // fast memory for blocks of B queries and B keys.
  const programs = {
    standard: {
      bytes: (T, d, B) => 12 * T * T + 4 * T * d * (1 + Math.ceil(T / B)),
      peak: (T, d, B) => Math.max(2 * B * d + B * B, T + 1),
    },
    flash2: {
      bytes: (T, d, B) => 4 * T * d * (1 + Math.ceil(T / B)) + 2 * T,
      peak: (T, d, B) => B * (2 * d + B + 2) + Math.max(B * d, B),
    },
  };

  // F in operations and W in bytes per second.
  const compute = (T, d, M, F, W) => {
    const operations = 4 * T * T * d, found = { T, d, M, operations, ridge: F / W };
    for (const [name, { bytes, peak }] of Object.entries(programs)) {
      let B = 1;
      while (2 * B <= T && peak(T, d, 2 * B) <= M) B *= 2;
      const moved = bytes(T, d, B), rho = operations / moved;
      const speed = Math.min(F, rho * W) / 1e12;
      Object.assign(found, { [`B ${name}`]: B, [`bytes ${name}`]: moved, [`rho ${name}`]: rho, [`speed ${name}`]: speed });
    }
    return found;
  };

  const text = (name, found) => {
    const [kind, program] = name.split(' ');
    if (kind === 'bound') return found[`rho ${program}`] < found.ridge ? 'memory' : 'compute';
    if (['rho', 'speed', 'ridge'].includes(kind)) return found[name].toFixed(1);
    if (kind === 'bytes') return (found[name] / 1e6).toFixed(1);
    return found[name].toLocaleString('en-US');
  };
  const place = (rho, speed) => [44 + 37 * (Math.log2(rho) - 1), 240 - 28 * (Math.log2(speed) - 2)];

  for (const figure of document.querySelectorAll('figure[data-live="bottleneck"]')) {
    const [T, d, M] = figure.querySelectorAll('input'), gpu = figure.querySelector('select');
    const show = () => {
      const [F, W] = gpu.value.split(' ').map(Number);
      const found = compute(2 ** T.value, 2 ** d.value, 2 ** M.value, F, W);
      for (const spot of figure.querySelectorAll('[data-show]')) spot.textContent = text(spot.dataset.show, found);
      for (const slider of [T, d, M]) slider.setAttribute('aria-valuetext', 2 ** slider.value);
      const corners = [[2, 2 * W / 1e12], [F / W, F / 1e12], [1024, F / 1e12]];
      figure.querySelector('polyline').setAttribute('points', corners.map(corner => place(...corner).join()).join(' '));
      for (const name of Object.keys(programs)) {
        const [x, y] = place(found[`rho ${name}`], found[`speed ${name}`]);
        figure.querySelector(`g.live-${name}`).setAttribute('transform', `translate(${x} ${y})`);
      }
    };
    for (const control of [T, d, M, gpu]) {
      control.disabled = false;
      control.addEventListener('input', show);
    }
    figure.compute = compute; // for tests/test_live.py
    show();
  }
})();
