// A displayed formula that is wider than its box scrolls: formulas.css shows the edge. The keyboard reaches it, and any
// other box that scrolls. The browser measures a box once it has laid it out.
document.fonts.ready.then(() => {
  const observer = new ResizeObserver(entries => {
    for (const { target } of entries) {
      const wide = target.scrollWidth > target.clientWidth + 1;
      target.classList.toggle('wide', wide && target.matches('.katex-display'));
      if (wide) target.tabIndex = 0; else target.removeAttribute('tabindex');
    }
  });
  const boxes = 'div.math > .katex-display, pre, .cell_output > .output, .pst-scrollable-table-container';
  for (const box of document.querySelectorAll(boxes)) observer.observe(box);
});
