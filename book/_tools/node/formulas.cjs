// Renders formulas for formulas.py: one line of JSON in, [TeX, is it displayed?], and one out, {html} or {error}.
const { createInterface } = require('node:readline');
const katex = require('katex');

createInterface({ input: process.stdin }).on('line', line => {
  const [tex, displayMode] = JSON.parse(line);
  let answer;
  try {
    answer = { html: katex.renderToString(tex, { displayMode, strict: 'error' }) };
  } catch (error) {
    answer = { error: error.message };
  }
  process.stdout.write(`${JSON.stringify(answer)}\n`);
});
