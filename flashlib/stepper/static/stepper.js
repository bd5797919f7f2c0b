// Turns every figure.stepper on the page from a table into something to step through.
// The data beside the table is described in flashlib/stepper/frame.py. Nothing here is global.
(() => {
  'use strict';

  const element = (tag, name, text) => {
    const made = document.createElement(tag);
    if (name) made.className = name;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const drawn = (tag, attributes) => {
    const made = document.createElementNS('http://www.w3.org/2000/svg', tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    return made;
  };

  const slug = title => `step-${title.toLowerCase().replace(/[^a-z0-9]+/g, '-').replace(/^-|-$/g, '')}`;

  const marked = (made, mark) => {
    if (mark) made.dataset.mark = mark; else delete made.dataset.mark;
  };

  // Keeps one element for each item of a panel: makes what is new, drops what has gone, updates the rest.
  const keep = (host, make, update) => {
    const known = new Map();
    return (items, marks) => {
      for (const [item, made] of known) {
        if (!(item in items)) { made.remove(); known.delete(item); }
      }
      for (const [item, content] of Object.entries(items)) {
        if (item === '') continue;
        if (!known.has(item)) { known.set(item, make(item, content)); host.append(known.get(item)); }
        const made = known.get(item);
        marked(made, marks[item]);
        update(made, content, item);
      }
    };
  };

  // Each kind of panel: builds its elements in a host and returns a function that shows (items, marks).
  const kinds = {
    cells(panel, host) {
      const box = element('div', 'stepper-cells');
      if (panel.columns) box.style.setProperty('--columns', panel.columns);
      box.classList.add(panel.columns ? 'stepper-matrix' : 'stepper-vector');
      const cells = panel.cells.map(name => {
        const cell = element('div', 'stepper-cell');
        const names = panel.notes ? ['name', 'value', 'note'] : ['name', 'value'];
        const parts = names.map(part => element('span', `stepper-${part}`));
        parts[0].textContent = name;
        cell.append(...parts);
        box.append(cell);
        return { cell, parts };
      });
      host.append(box);
      return (items, marks) => cells.forEach(({ cell, parts }, number) => {
        const [value, note] = items[number] || ['', ''];
        parts[1].textContent = value || '\u2013';
        if (panel.notes) parts[2].textContent = note;
        cell.classList.toggle('stepper-empty', !value);
        marked(cell, marks[number]);
      });
    },

    // One matrix, or with parts several on a plane.
    grid(panel, host) {
      const { rows, columns, colour, slow, parts } = panel;
      const side = parts ? Math.max(2, Math.min(18, 300 / columns))
        : Math.max(2, Math.min(15, 120 / Math.max(rows, columns)));
      const edge = parts ? 20 : 3;
      const [width, height] = [side * columns + 2 * edge, side * rows + 2 * edge];
      const picture = drawn('svg', {
        class: 'stepper-grid', width, height, viewBox: `${-edge} ${-edge} ${width} ${height}`, 'aria-hidden': 'true',
      });
      const stored = drawn('g', {}), held = drawn('g', {}), above = drawn('g', {});
      for (const [name, top, left, high, wide, whole, beside] of parts || [['', 0, 0, rows, columns, slow]]) {
        const frame = { x: left * side, y: top * side, width: wide * side, height: high * side };
        const ground = drawn('g', { class: whole ? '' : 'stepper-fast' });
        ground.append(drawn('rect', { class: 'stepper-ground', ...frame }));
        picture.append(ground);
        above.append(drawn('path', {
          class: 'stepper-lines',
          d: [...Array(high + 1).keys()].map(i => `M${frame.x} ${frame.y + i * side}h${frame.width}`).join('')
            + [...Array(wide + 1).keys()].map(j => `M${frame.x + j * side} ${frame.y}v${frame.height}`).join(''),
        }));
        const label = drawn('text', {
          class: 'stepper-label', 'text-anchor': beside ? 'end' : 'middle',
          x: frame.x + (beside ? -5 : frame.width / 2), y: frame.y + (beside ? frame.height / 2 + 5 : -5),
        });
        label.textContent = name;
        picture.append(label);
      }
      picture.append(stored, held, above);
      host.append(picture);
      const place = ([top, bottom, left, right, layer, own = colour]) => drawn('rect', {
        class: `stepper-${layer} stepper-colour-${own}`, x: left * side, y: top * side,
        width: (right - left) * side, height: (bottom - top) * side,
      });
      const layers = [[stored, 'stored'], [held, 'in']].map(([group, layer]) => [
        keep(group, (item, content) => place(content), () => {}), layer]);
      return (items, marks) => layers.forEach(([show, layer]) => show(
        Object.fromEntries(Object.entries(items).filter(([, content]) => content[4] === layer)), marks));
    },

    table(panel, host) {
      const box = element('div', 'stepper-scroll'), table = element('table', 'stepper-state');
      const [head, body] = [element('thead'), element('tbody')];
      const row = (group, names, tag) => {
        const made = element('tr');
        made.append(...names.map((name, number) => element(number ? tag : 'th', '', name)));
        made.firstChild.scope = 'row';
        group.append(made);
        return [...made.children];
      };
      row(head, panel.columns, 'th').forEach(cell => { cell.scope = 'col'; });
      const blank = panel.columns.slice(1).map(() => '');
      const cells = panel.rows.flatMap(name => row(body, [name, ...blank], 'td').slice(1));
      table.append(head, body);
      box.tabIndex = 0;
      box.setAttribute('role', 'group');
      box.setAttribute('aria-label', `${panel.title}: ${panel.group}`);
      box.append(table);
      host.append(box);
      return (items, marks) => cells.forEach((cell, number) => {
        cell.textContent = items[number] ?? '\u2013';
        marked(cell, marks[number]);
      });
    },

    bar(panel, host) {
      const bar = element('div', 'stepper-bar');
      host.append(bar);
      return keep(bar, item => element('span', 'stepper-part', item), (made, [words, colour]) => {
        made.classList.add(`stepper-colour-${colour}`);
        made.style.width = `${100 * words / panel.max}%`;
      });
    },

    counters(panel, host) {
      const row = element('p', 'stepper-counters');
      host.append(row);
      return keep(row, item => {
        const pair = element('span', '', `${item} `);
        pair.append(element('b'));
        return pair;
      }, (made, text) => { made.lastChild.textContent = text; });
    },
  };

  kinds.plane = kinds.grid;

  const build = (panel, group) => {
    const host = element('div', `stepper-panel stepper-panel-${panel.kind}`);
    if (panel.title) host.append(element('p', 'stepper-title', panel.title));
    const show = kinds[panel.kind](panel, host);
    const text = element('p', 'stepper-text');
    host.append(text);
    group.append(host);
    return (items, marks) => {
      show(items, marks);
      text.textContent = items[''] || '';
      text.hidden = !items[''];
    };
  };

  const start = figure => {
    figure.dataset.live = '';
    const data = JSON.parse(figure.querySelector('script[type="application/json"]').textContent);
    const last = data.steps.length - 1;
    const title = figure.querySelector('figcaption').textContent;

    // What every panel shows after each step: its items from before, changed.
    let state = data.panels.map(() => ({}));
    const states = data.steps.map(step => {
      state = state.map((items, panel) => {
        const next = { ...items, ...step.set[panel] };
        for (const item of Object.keys(next)) if (next[item] === null) delete next[item];
        return next;
      });
      return state;
    });

    const live = element('div', 'stepper-live');
    live.tabIndex = 0;
    live.setAttribute('role', 'group');
    live.setAttribute('aria-label', `${title}: step with the left and right arrow keys, Home and End`);
    live.dataset.lmSuppressShortcuts = 'true';  // JupyterLab leaves the keys to us

    const tools = element('div', 'stepper-tools');
    const button = (sign, text, act) => {
      const made = element('button', 'stepper-button');
      made.type = 'button';
      const icon = element('span', 'stepper-sign', sign);
      icon.setAttribute('aria-hidden', 'true');
      made.append(icon, element('span', 'stepper-word', text));
      made.addEventListener('click', act);
      tools.append(made);
      return made;
    };
    const previous = button('\u25C0', 'Previous', () => go(now - 1));
    const play = button('\u25B6', 'Play', () => timer ? go(now) : run());
    const next = button('\u25B6', 'Next', () => go(now + 1));
    play.classList.add('stepper-play');
    const slider = element('input', 'stepper-slider');
    Object.assign(slider, { type: 'range', min: 0, max: last, step: 1 });
    slider.setAttribute('aria-label', `Step of ${title}`);
    slider.addEventListener('input', () => go(Number(slider.value)));
    const where = element('span', 'stepper-where');
    tools.append(slider, where);

    const said = element('p', 'stepper-said');
    said.setAttribute('aria-live', 'polite');
    live.append(tools, said);

    const body = element('div', 'stepper-body');
    body.tabIndex = 0;  // what is taller than the screen scrolls in here
    body.setAttribute('role', 'group');
    body.setAttribute('aria-label', `Panels of ${title}`);
    let source, lines = [];
    if (data.lines.length) {
      source = element('ol', 'stepper-source');
      source.tabIndex = 0;
      source.setAttribute('aria-label', 'Program');
      lines = data.lines.map(text => element('li', '', text));
      source.append(...lines);
      source.addEventListener('click', event => {
        const line = lines.indexOf(event.target);
        const step = data.steps.findIndex(one => one.line === line);
        if (line >= 0 && step >= 0) go(step);
      });
      body.append(source);
    }
    const panels = element('div', 'stepper-panels');
    let group, name;
    const shows = data.panels.map(panel => {
      if (!group || panel.group !== name) {
        name = panel.group;
        const section = element('div', 'stepper-group');
        group = element('div', 'stepper-row');
        section.append(element('p', 'stepper-heading', name), group);
        panels.append(section);
      }
      return build(panel, group);
    });
    const legend = element('p', 'stepper-legend');
    for (const [mark, text] of Object.entries(data.legend)) {
      const sign = element('span', '', text);
      sign.dataset.mark = mark;
      legend.append(sign);
    }
    panels.append(legend);
    body.append(panels);
    live.append(body);

    let now = 0, timer = null;
    const show = () => {
      const step = data.steps[now];
      shows.forEach((draw, panel) => draw(states[now][panel], step.mark[panel] || {}));
      lines.forEach((item, number) => {
        if (number === step.line) item.setAttribute('aria-current', 'step');
        else item.removeAttribute('aria-current');
      });
      if (source) {  // its own box scrolls, never the page
        const item = lines[step.line ?? 0];
        source.scrollTop = item.offsetTop - (source.clientHeight - item.offsetHeight) / 2;
      }
      said.replaceChildren(element('strong', '', step.head), ': ', element('span', '', step.say));
      where.textContent = `${now} / ${last}`;
      slider.value = now;
      slider.setAttribute('aria-valuetext', `step ${now} of ${last}`);
      // aria-disabled, as a disabled button would lose the focus.
      previous.setAttribute('aria-disabled', now === 0);
      next.setAttribute('aria-disabled', now === last);
    };
    const pause = () => {
      clearInterval(timer);
      timer = null;
      play.firstChild.textContent = '\u25B6';
      play.lastChild.textContent = 'Play';
      said.setAttribute('aria-live', 'polite');
    };
    const move = step => { now = Math.max(0, Math.min(last, step)); show(); };
    const go = step => { pause(); move(step); remember(); };

    // The address names the step: #step-of-the-title=12. A notebook's address is not ours.
    const address = `${slug(title)}=`;
    let later;
    const remember = () => {
      clearTimeout(later);  // browsers refuse many changes in a row
      if (figure.closest('article')) later = setTimeout(() => history.replaceState(null, '', `#${address}${now}`), 200);
    };
    const recall = () => {
      if (!location.hash.startsWith(`#${address}`)) return;
      pause();
      move(Number(location.hash.slice(address.length + 1)) || 0);
      figure.scrollIntoView();
    };
    addEventListener('hashchange', recall);
    const run = () => {
      if (now === last) move(0);
      said.setAttribute('aria-live', 'off');  // a reader that speaks could not keep up
      play.firstChild.textContent = '\u275A\u275A';
      play.lastChild.textContent = 'Pause';
      timer = setInterval(() => {
        move(now + 1);
        if (now === last || !figure.isConnected) { pause(); remember(); }
      }, Math.max(350, Math.min(1200, 40000 / last)));
    };

    live.addEventListener('keydown', event => {
      if (event.altKey || event.ctrlKey || event.metaKey || event.shiftKey) return;
      const step = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: last }[event.key];
      if (step !== undefined) go(step);
      else if (event.key === ' ' && event.target === live) play.click();
      else return;
      event.preventDefault();
      event.stopPropagation();
    });

    const table = figure.querySelector('details');
    table.open = false;
    let opened;
    addEventListener('beforeprint', () => { opened = table.open; table.open = true; });
    addEventListener('afterprint', () => { table.open = opened; });
    table.before(live);
    show();
    recall();
  };

  const all = () => document.querySelectorAll('figure.stepper:not([data-live])').forEach(start);
  if (document.readyState === 'loading') document.addEventListener('DOMContentLoaded', all);
  else all();
  document.addEventListener('stepper', all);  // a script has put a figure on the page
})();
