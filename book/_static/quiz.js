// Says at once whether a choice in a quiz is right, and what to reread if it is not. What has been chosen
// stays in this browser's localStorage, under one key, and goes nowhere else. Nothing here is global.
// The HTML is made by book/_tools/quiz.py; without this script the questions can still be read.
(() => {
  'use strict';

  const KEY = 'flashattention-book-quizzes';

  // FNV-1a as in quiz.py. It hides the answer from a glance at the source and no more.
  const hashed = text => {
    let value = 0x811c9dc5;
    for (const byte of new TextEncoder().encode(text)) value = Math.imul(value ^ byte, 0x01000193) >>> 0;
    return value.toString(16).padStart(8, '0');
  };

  // {id of a question: [mark of its text, number of the choice]}; a changed question has another mark.
  let chosen = {}, lasting = true;
  const load = () => {
    try {
      const kept = JSON.parse(localStorage.getItem(KEY));
      chosen = kept && typeof kept === 'object' && !Array.isArray(kept) ? kept : {};
    } catch {
      // No storage, or something else under the key: what has been chosen on this page is kept.
    }
  };
  const save = () => {
    try {
      localStorage.setItem(KEY, JSON.stringify(chosen));
      lasting = true;
    } catch {
      lasting = false;
    }
  };
  const choice = ([id, mark]) => (Array.isArray(chosen[id]) && chosen[id][0] === mark ? chosen[id][1] : null);
  const right = question => hashed(`${question[0]}:${choice(question)}`) === question[2];
  const score = (list, what = '') => `${list.filter(right).length} of ${list.length}${what} right`;

  const shows = [];
  const show = () => shows.forEach(one => one());

  const forget = (list, text) => {
    const button = document.createElement('button');
    Object.assign(button, { type: 'button', className: 'quiz-forget', textContent: text });
    button.addEventListener('click', () => {
      load();
      for (const [id] of list) delete chosen[id];
      save();
      show();
    });
    return button;
  };

  const tools = (list, text) => {
    const row = document.createElement('p');
    row.className = 'quiz-tools';
    const said = document.createElement('span');
    row.append(said, forget(list, text));
    shows.push(() => {
      said.textContent = score(list) + (lasting ? '' : ' (kept only until you leave this page)');
    });
    return row;
  };

  const startQuiz = quiz => {
    const list = [];
    for (const box of quiz.querySelectorAll('.quiz-question')) {
      const { id, mark, key } = box.dataset;
      const question = [id, mark, key];
      const said = box.querySelector('.quiz-said');
      list.push(question);
      box.addEventListener('change', event => {
        load();
        chosen[id] = [mark, event.target.value];
        save();
        show();
      });
      shows.push(() => {
        const value = choice(question);
        for (const button of box.querySelectorAll('input')) button.checked = button.value === value;
        const state = !box.querySelector('input:checked') ? '' : right(question) ? 'right' : 'wrong';
        const text = { '': '', right: 'Right.', wrong: 'Not this one.' }[state];
        if (said.textContent !== text) said.textContent = text;
        box.dataset.state = state;
      });
    }
    quiz.append(tools(list, 'Forget my answers'));
    quiz.dataset.live = '';
  };

  const startProgress = places => {
    const all = [];
    for (const place of places) {
      const list = JSON.parse(place.dataset.progress);
      all.push(...list);
      shows.push(() => { place.textContent = score(list, ' questions'); });
    }
    places[0].closest('article').append(tools(all, 'Forget all my answers'));
  };

  const start = () => {
    load();
    document.querySelectorAll('.quiz').forEach(startQuiz);
    const places = [...document.querySelectorAll('.quiz-progress')];
    if (places.length) startProgress(places);
    if (!shows.length) return;
    show();
    const again = () => { load(); show(); };
    addEventListener('storage', event => { if (event.key === KEY || event.key === null) again(); });
    addEventListener('pageshow', event => { if (event.persisted) again(); });
  };
  if (document.readyState === 'loading') document.addEventListener('DOMContentLoaded', start);
  else start();
})();
