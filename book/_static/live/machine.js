// The figure `machine` (book/_tools/register_machine.py): an editor for programs, which a worker runs. Programs and
// solved exercises stay in this browser's localStorage, under one key, and go nowhere else.
(() => {
  'use strict';

  const KEY = 'flashattention-book-machine';
  const PATIENCE = 10_000; // ms for a program; the longest that can be stepped through take far less
  const worker_address = new URL('machine-worker.mjs', document.currentScript.src);
  const figure = document.querySelector('figure.bench');
  const exercises = JSON.parse(figure.querySelector('script').textContent);
  const part = name => figure.querySelector(name);
  const [exercise, registers, ports, task] = ['exercise', 'registers', 'ports', 'task'].map(name => part(`.bench-${name}`));
  const [run, stop, said, result, forget] = ['run', 'stop', 'said', 'result', 'forget'].map(name => part(`.bench-${name}`));
  const editor = part('textarea'), numbers = part('.bench-editor pre'), progress = part('.bench-progress span');
  const starting = run.textContent;
  const own = { start: editor.value, registers: registers.value, ports: ports.value };

  // {name of an exercise, or "": {text, solved}}
  let kept = {}, lasting = true;
  const load = () => {
    try {
      const found = JSON.parse(localStorage.getItem(KEY));
      kept = found && typeof found === 'object' && !Array.isArray(found) ? found : {};
    } catch {
      // No storage, or something else under the key: what is on this page stands.
    }
  };
  const change = (name, what) => {
    load();
    kept[name] = { ...kept[name], ...what };
    try {
      localStorage.setItem(KEY, JSON.stringify(kept));
      lasting = true;
    } catch {
      lasting = false;
    }
  };

  const say = (text, state = '', line = null) => {
    said.textContent = text;
    said.dataset.state = state;
    editor.toggleAttribute('aria-invalid', state === 'wrong');
    number(line);
  };
  const number = wrong => {
    const count = editor.value.split('\n').length;
    editor.rows = Math.max(count, 6);
    numbers.replaceChildren(...Array.from({ length: editor.rows }, (_, n) => {
      const made = document.createElement(n + 1 === wrong ? 'mark' : 'span');
      made.textContent = `${n + 1}\n`;
      return made;
    }));
  };
  const score = () => {
    const names = Object.keys(exercises), done = names.filter(name => kept[name]?.solved);
    progress.textContent = `${done.length} of ${names.length} solved, kept ` + (lasting ? 'in this browser' : 'until you leave this page');
    for (const option of exercise.options)
      if (option.value) option.textContent = (kept[option.value]?.solved ? '\u2713 ' : '') + exercises[option.value].title;
  };
  const open = () => {
    const chosen = exercises[exercise.value] ?? own, text = kept[exercise.value]?.text;
    editor.value = typeof text === 'string' ? text : chosen.start;
    registers.value = chosen.registers;
    ports.value = chosen.ports;
    registers.disabled = ports.disabled = chosen !== own;
    task.hidden = chosen === own;
    if (chosen !== own) task.href = chosen.address;
    result.replaceChildren();
    say('');
  };

  let worker, timer;
  const end = () => {
    clearTimeout(timer);
    if (document.activeElement === stop) run.focus();
    stop.disabled = true;
    run.removeAttribute('aria-disabled');
  };
  const quit = (text, state) => {
    worker?.terminate();
    worker = undefined;
    run.textContent = starting;
    end();
    say(text, state);
  };
  const show = found => {
    end();
    if ('failed' in found) return quit(`The machine stopped: ${found.failed}`, 'wrong');
    result.innerHTML = found.figure ?? '';
    say(found.said, found.solved ? 'right' : 'figure' in found ? '' : 'wrong', found.line);
    if (!found.figure) return;
    // The step of an earlier run, which the stepper writes into the address, is not meant.
    if (location.hash.startsWith('#step-')) history.replaceState(null, '', location.pathname + location.search);
    document.dispatchEvent(new Event('stepper'));
    if (found.solved) change(exercise.value, { solved: true });
    score();
  };
  const ask = () => {
    if (run.getAttribute('aria-disabled')) return;
    run.setAttribute('aria-disabled', 'true');
    stop.disabled = false;
    const question = [exercise.value, editor.value, registers.valueAsNumber, ports.value];
    if (!worker) {
      say('The machine is starting\u2026');
      worker = new Worker(worker_address, { type: 'module' });
      worker.addEventListener('error', () => quit('The machine could not be loaded.', 'wrong'));
      run.textContent = 'Run';
    } else {
      timer = setTimeout(() => quit('The program took too long and was stopped.', 'wrong'), PATIENCE);
    }
    worker.onmessage = ({ data }) => show(data);
    worker.postMessage(question);
  };

  // A link to the figure opens it.
  const unfold = () => { if (location.hash === `#${figure.id}`) part('details').open = true; };
  addEventListener('hashchange', unfold);
  unfold();
  load();
  if (location.protocol === 'file:') {
    say('Browsers cannot run the machine on a page opened from a file. Serve the book with "make serve".');
    return;
  }
  for (const control of [exercise, registers, ports, editor, run, forget]) control.disabled = false;
  run.addEventListener('click', ask);
  stop.addEventListener('click', () => quit('Stopped.'));
  exercise.addEventListener('change', () => { if (!stop.disabled) quit(''); open(); });
  editor.addEventListener('input', () => { say(''); change(exercise.value, { text: editor.value }); });
  editor.addEventListener('keydown', event => {
    if (event.key !== 'Enter' || !(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    ask();
  });
  forget.addEventListener('click', () => {
    try { localStorage.removeItem(KEY); } catch { /* nothing was kept */ }
    kept = {};
    open();
    score();
  });
  addEventListener('storage', event => { if (event.key === KEY || event.key === null) { load(); score(); } });
  open();
  score();
})();
