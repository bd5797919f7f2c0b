// Sections below the window wait for their layout (book.css). Once the page has loaded, each frame lays one of them out:
// all at once would keep a phone busy for a second.
addEventListener('load', () => {
  const waiting = [...document.querySelectorAll('.bd-article section section')];
  const next = () => {
    if (!waiting.length) { document.documentElement.classList.add('whole'); return; }
    waiting.shift().style.contentVisibility = 'visible';
    requestAnimationFrame(() => setTimeout(next));
  };
  if (!document.documentElement.classList.contains('whole')) next();
});

// The page's table of contents marks the section that is read: the last one that reaches the upper part of the window.
(() => {
  const links = new Map();
  for (const link of document.querySelectorAll(".bd-toc .nav-link[href^='#']")) {
    const section = document.getElementById(decodeURIComponent(link.hash.slice(1)));
    if (section) links.set(section, link);
  }
  const seen = new Set();
  const observer = new IntersectionObserver(entries => {
    for (const { target, isIntersecting } of entries) seen[isIntersecting ? 'add' : 'delete'](target);
    for (const marked of document.querySelectorAll('.bd-toc .active')) marked.classList.remove('active');
    const link = links.get([...links.keys()].findLast(section => seen.has(section)));
    link?.classList.add('active');
    for (let item = link?.closest('li'); item; item = item.parentElement.closest('li')) item.classList.add('active');
  }, { rootMargin: '0px 0px -60%' });
  for (const section of links.keys()) observer.observe(section);
})();

// A link into a closed fold opens it; of a <details>, the browser does so itself.
const reveal = () => {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const fold = target?.closest('.toggle-hidden');
  fold?.querySelector('.toggle-button').click();
  if (fold) target.scrollIntoView();
};
addEventListener('hashchange', reveal);
addEventListener('load', reveal);
