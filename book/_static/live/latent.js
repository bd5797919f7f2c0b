// The figure `latent` (book/_tools/live.py): expand the latents of a cache, or absorb the weights.
(() => {
  const [c, n, r, v] = [512, 128, 64, 128]; // columns, as DeepSeek-V3 has them

  const compute = (H, queries, T_k, ridge) => {
    const T_q = Math.min(queries, T_k), pairs = T_q * T_k - T_q * (T_q - 1) / 2;
    const found = { H, T_q, T_k, ridge };
    found.left = pairs * (2 * c - n - v);
    found.right = (T_k - T_q) * c * (n + v);
    const ways = { // half the operations of attention and of projections, and the numbers that attention reads
      expanded: [H * pairs * (n + r + v), H * T_k * c * (n + v), T_k * (H * (n + v) + r)],
      absorbed: [H * pairs * (2 * c + r), H * T_q * c * (n + v), T_k * (c + r)],
    };
    for (const [way, [attention, projections, read]] of Object.entries(ways)) {
      found[`operations ${way}`] = 2 * (attention + projections);
      found[`attention ${way}`] = 2 * attention;
      found[`bytes ${way}`] = 2 * read;
      found[`rho ${way}`] = attention / read;
    }
    return found;
  };

  const text = (name, found) => {
    const [kind, way] = name.split(' ');
    if (kind === 'bound') return found[`rho ${way}`] < found.ridge ? 'memory' : 'compute';
    if (kind === 'way') return found.left < found.right ? 'Absorb' : 'Expand';
    if (kind === 'operations' || kind === 'attention') return (found[name] / 1e9).toFixed(2);
    if (['bytes', 'left', 'right'].includes(kind)) return (found[name] / 1e6).toFixed(2);
    if (kind === 'rho' || kind === 'ridge') return found[name].toFixed(1);
    return found[name].toLocaleString('en-US');
  };

  for (const figure of document.querySelectorAll('figure[data-live="latent"]')) {
    const sliders = [...figure.querySelectorAll('input')];
    const ridge = Number(figure.querySelector('[data-ridge]').dataset.ridge);
    const show = () => {
      const found = compute(...sliders.map(slider => 2 ** slider.value), ridge);
      for (const spot of figure.querySelectorAll('[data-show]')) spot.textContent = text(spot.dataset.show, found);
      for (const slider of sliders) slider.setAttribute('aria-valuetext', 2 ** slider.value);
    };
    for (const slider of sliders) {
      slider.disabled = false;
      slider.addEventListener('input', show);
    }
    figure.compute = compute; // for tests/test_live.py
    show();
  }
})();
