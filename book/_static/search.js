// Ranks what Sphinx's search finds: page titles, words of the glossary, then headings and
// numbers ("P.1"), each as whole words before beginnings of words. Pages that merely
// contain the words come last. Only the search page loads this file.
(() => {
  const stemmer = new Stemmer();
  const KINDS = { page: 30, term: 20, heading: 10 };
  const MOST = 30; // entries; pages that contain the words are all shown
  Scorer.partialTitle = Scorer.partialTerm; // for parts of words, below whole ones

  // The words of a text: "P.1" is one, "log-sum-exp" three.
  const words = (text) =>
    (text.toLowerCase().match(/[\p{L}\p{N}]+(?:\.[\p{L}\p{N}]+)*/gu) ?? [])
      .map((word) => stemmer.stemWord(word));

  // 0 where an entry lacks a word of the query.
  function fit(query, entry) {
    if (query.join() === entry.join()) return 400;
    if (query.every((word) => entry.includes(word)))
      return entry.join().startsWith(query.join()) ? 300 : 200;
    const begins = (word) => word.length > 2 && entry.some((e) => e.startsWith(word));
    return query.every((word) => entry.includes(word) || begins(word)) ? 100 : 0;
  }

  // All that can be found by its title: [kind, title, file, anchor].
  function* entries() {
    const { alltitles, titles } = Search._index;
    for (const [file, title] of titles.entries()) yield ["page", title, file, ""];
    for (const [title, places] of Object.entries(alltitles))
      for (const [file, id] of places)
        if (id) yield [id.startsWith("term-") ? "term" : "heading", title, file, "#" + id];
  }

  Search._performSearch = (query, searchTerms, excludedTerms) => {
    const { docnames, filenames, titles } = Search._index;
    const all = query.toLowerCase().split(/\s+/).filter((word) => word[0] !== "-");
    const some = all.filter((word) => !stopwords.includes(word));
    const wanted = words((some.length ? some : all).join(" "));
    if (!wanted.length) return [];
    const found = [];
    for (const [kind, title, file, anchor] of entries()) {
      // A chapter is found by its file name too: "online" is its word everywhere.
      const name = kind === "page" ? docnames[file].split("/").pop() : "";
      const entry = words(title.replace(/<span.*?<\/span>/, "")); // without its number
      const match = Math.max(fit(wanted, entry), fit(wanted, [...words(name), ...entry]));
      if (!match) continue;
      const where = kind === "page" ? null : titles[file];
      const score = match + KINDS[kind] - entry.length;
      found.push([docnames[file], title, anchor, where, score, filenames[file]]);
    }
    const order = (a, b) => b[4] - a[4] || a[1].localeCompare(b[1]);
    const shown = found.sort(order).slice(0, MOST);
    const known = new Set(shown.filter((item) => !item[2]).map((item) => item[0]));
    let rest = Search.performTermsSearch(searchTerms, excludedTerms);
    const whole = rest.filter((item) => item[4] > Scorer.partialTerm);
    if (shown.length || whole.length) rest = whole; // "TMA" is not in "softmax"
    rest = rest.filter((item) => !known.has(item[0])).sort(order);
    return [...shown, ...rest].reverse(); // Sphinx takes results from the end
  };

  // From a disk, pages cannot be fetched for their summaries.
  if (location.protocol === "file:") DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = false;
})();
