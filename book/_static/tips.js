// Hovering over or focusing a reference shows what it refers to: an equation, a figure,
// an algorithm, a term or a work. Escape closes it. The box is Bootstrap's popover,
// which the theme has on every page.
(() => {
  const REFERENCE = "article.bd-article a.reference[href*='#']";
  const TARGET = /#(?:(?:equation|fig|alg|term)-|id\d+$)/; // as in _tools/tips.py
  const LEFT_OUT = ".headerlink, button, details, script, .visually-hidden";
  const DELAY = 200; // ms; the pointer may cross a link, and may travel into the box
  // Bootstrap would add the link's own title as a head.
  const TEMPLATE = `<div class="popover" role="tooltip">
    <div class="popover-arrow"></div><div class="popover-body"></div></div>`;
  const file = document.currentScript.dataset.tips;
  let popover, wanted, timer, received;

  // The targets on other pages, by the address that links have.
  function elsewhere() {
    received ??= new Promise((resolve) => {
      window.receiveTips = resolve;
      const root = document.documentElement.dataset.content_root;
      const script = document.createElement("script");
      script.src = root + file;
      document.head.append(script);
    });
    return received;
  }

  // A copy of what a link refers to, or null.
  async function copy(link) {
    const address = link.getAttribute("href");
    const box = document.createElement("div");
    if (address.startsWith("#")) {
      let target = document.getElementById(decodeURIComponent(address.slice(1)));
      while (target?.matches("dt")) target = target.nextElementSibling;
      if (!target) return null;
      box.append(target.cloneNode(true));
    } else {
      const html = (await elsewhere())[address];
      if (!html) return null;
      box.innerHTML = html;
      for (const name of ["href", "src"])
        for (const part of box.querySelectorAll(`[${name}]`))
          part.setAttribute(name, new URL(part.getAttribute(name), link.href).href);
    }
    for (const part of box.querySelectorAll(LEFT_OUT)) part.remove();
    for (const part of box.querySelectorAll("[id]")) part.removeAttribute("id");
    return box;
  }

  function close() {
    clearTimeout(timer);
    wanted = null;
    popover?.dispose();
    popover = null;
  }

  async function open(link) {
    if (wanted === link) return;
    close();
    wanted = link;
    const content = await copy(link);
    if (!content || wanted !== link) return;
    popover = new bootstrap.Popover(link, {
      animation: false,
      container: link.closest("article"),
      content,
      customClass: "tip",
      fallbackPlacements: ["bottom"],
      html: true,
      placement: "top",
      template: TEMPLATE,
      trigger: "manual",
    });
    popover.show();
  }

  function later(action) {
    clearTimeout(timer);
    timer = setTimeout(action, DELAY);
  }

  const reference = (event) => {
    const link = event.target.closest?.(REFERENCE);
    return link && TARGET.test(link.getAttribute("href")) ? link : null;
  };
  document.addEventListener("mouseover", (event) => {
    const link = reference(event);
    if (link) later(() => open(link));
    else if (event.target.closest(".tip")) clearTimeout(timer);
    else if (wanted !== document.activeElement) later(close);
  });
  document.addEventListener("focusin", (event) => {
    const link = reference(event);
    if (link) open(link);
    else if (!event.target.closest(".tip")) close();
  });
  document.addEventListener("focusout", () => later(close));
  document.addEventListener("click", (event) => {
    if (!event.target.closest(".tip")) close();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") close();
  });
})();
