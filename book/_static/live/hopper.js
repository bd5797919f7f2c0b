// The figure `hopper` (book/_tools/live.py): the clocks of each step, from the simulator's own runs.
(() => {
  for (const figure of document.querySelectorAll('figure[data-live="hopper"]')) {
    const states = JSON.parse(figure.querySelector('script').textContent);
    const step = figure.querySelector('select'), sliders = [...figure.querySelectorAll('input')];
    const show = () => {
      const [slots, groups] = sliders.map(slider => slider.value);
      const [numbers, paths] = states[`${step.value} ${slots} ${groups}`];
      figure.querySelectorAll('svg path').forEach((path, number) => path.setAttribute('d', paths[number]));
      figure.querySelectorAll('svg g:has(rect)').forEach((lane, number) =>
        lane.setAttribute('visibility', number <= groups ? 'visible' : 'hidden'));
      const texts = { slots, groups, ...numbers };
      for (const spot of figure.querySelectorAll('[data-show]')) spot.textContent = texts[spot.dataset.show];
    };
    for (const control of [step, ...sliders]) {
      control.disabled = false;
      control.addEventListener('input', show);
    }
    show();
  }
})();
