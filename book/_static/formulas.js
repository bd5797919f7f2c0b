// A displayed formula that is wider than its box scrolls: formulas.css shows the edge, and the keyboard reaches it.
document.fonts.ready.then(() => {
  const observer = new ResizeObserver(entries => {
    for (const { target } of entries) {
      const wide = target.scrollWidth > target.clientWidth + 1;
      target.classList.toggle('wide', wide);
      if (wide) target.tabIndex = 0; else target.removeAttribute('tabindex');
    }
  });
  for (const formula of document.querySelectorAll('div.math > .katex-display')) observer.observe(formula);
});
