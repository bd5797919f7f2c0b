// The figure `online` (book/_tools/live.py): eight scores, m, l and the outputs after each key, the merge of two halves.
(() => {
  // A state is [m, l, unnormalized output]; a key is the state [score, 1, value].
  const weight = (s, m) => (s === -Infinity ? 0 : Math.exp(s - m));
  const merge = ([mA, lA, uA], [mB, lB, uB]) => {
    const m = Math.max(mA, mB), alpha = weight(mA, m), beta = weight(mB, m);
    return [m, alpha * lA + beta * lB, alpha * uA + beta * uB];
  };
  const none = [-Infinity, 0, 0];

  const compute = (scores, values) => {
    const keys = scores.map((score, j) => [score, 1, values[j]]), half = keys.length / 2;
    const states = {};
    keys.reduce((state, key, j) => (states[j + 1] = merge(state, key)), none);
    states.A = keys.slice(0, half).reduce(merge, none);
    states.B = keys.slice(half).reduce(merge, none);
    states.merged = merge(states.A, states.B);
    const found = {};
    for (const [name, [m, l, u]] of Object.entries(states))
      Object.assign(found, { [`m ${name}`]: m, [`l ${name}`]: l, [`u ${name}`]: u, [`o ${name}`]: u / l });
    for (const part of ['A', 'B']) found[`f ${part}`] = weight(states[part][0], states.merged[0]);
    // In two passes, as the chapter on standard attention does it.
    const top = Math.max(...scores), exps = scores.map(score => Math.exp(score - top));
    const sum = exps.reduce((a, b) => a + b);
    found.softmax = exps.reduce((o, e, j) => o + (e / sum) * values[j], 0);
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
      const { 'o merged': merged, softmax } = show();
      said.textContent = `Merged output ${text(merged)}, softmax ${text(softmax)}.`;
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
