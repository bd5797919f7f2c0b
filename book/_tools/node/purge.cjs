// purge.cjs SITE: drops the rules of the joined style sheets that no page and no script of the site can use.
const { writeFileSync } = require('node:fs');
const { PurgeCSS } = require('purgecss');

const site = process.argv[2];
new PurgeCSS().purge({
  content: [`${site}/**/*.html`, `${site}/_static/**/*.js`, `!${site}/_static/scripts/fontawesome.js`],
  css: [`${site}/_static/page-*.css`],
  // Bootstrap and stepper.js compose these names; no script sets data-bs-theme, the theme has data-theme.
  safelist: { greedy: [/tooltip/, /data-(?!bs-theme)/, /^stepper-/] },
}).then(sheets => sheets.forEach(({ file, css }) => writeFileSync(file, css)));
