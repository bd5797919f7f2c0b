// The figure `online` (book/_tools/live.py): eight scores; m, l and the outputs after each key.
(() => {
  // A state is [m, l, unnormalized output]; a key is the state [score, 1, value].
  const weight = (s, m) => (s === -Infinity ? 0 : Math.exp(s - m));
  const merge = ([mA, lA, uA], [mB, lB, uB]) => {
    const m = Math.max(mA, mB), alpha = weight(mA, m), beta = weight(mB, m);
    return [m, alpha * lA + beta * lB, alpha * uA + beta * uB];
  };

  const compute = (scores, values) => {
    const found = {};
    let state = [-Infinity, 0, 0];
    scores.forEach((score, j) => {
      const [m, l, u] = state = merge(state, [score, 1, values[j]]), key = j + 1;
      Object.assign(found, { [`m ${key}`]: m, [`l ${key}`]: l, [`u ${key}`]: u, [`o ${key}`]: u / l });
    });
    return found;
  };

  const text = number => number.toFixed(2).replace('-', '\u2212');
  for (const figure of document.querySelectorAll('figure[data-live="online"]')) {
    const sliders = [...figure.querySelectorAll('input')];
    const values = [...figure.querySelectorAll('[data-value]')].map(cell => Number(cell.dataset.value));
    const places = [...figure.querySelectorAll('[data-show]')];
    const said = figure.querySelector('.live-said');
    const show = () => {
      const scores = sliders.map(slider => slider.valueAsNumber), found = compute(scores, values);
      scores.forEach((score, j) => { found[`s ${j + 1}`] = score; });
      for (const place of places) {
        const [letter, key] = place.dataset.show.split(' ');
        place.textContent = text(found[place.dataset.show]);
        if (letter === 'm') place.toggleAttribute('data-rises', found[`m ${key}`] > found[`m ${key - 1}`]);
      }
      return found;
    };
    const tell = () => {
      said.textContent = `Output ${text(show()[`o ${sliders.length}`])}.`;
    };
    for (const slider of sliders) {
      slider.disabled = false;
      slider.addEventListener('input', show);
      slider.addEventListener('change', tell);
    }
    figure.compute = compute; // for tests/test_live.py
    show();
  }
})();
