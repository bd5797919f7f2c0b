// Tables with the class "entries": the button in a head sorts by its column, and two lists choose the rows of one source
// and of one kind. A source is a bold word in its cell; kinds are separated by commas. The choice is in the address.
for (const table of document.querySelectorAll('table.entries')) {
  const body = table.tBodies[0], rows = [...body.rows];
  const heads = [...table.tHead.rows[0].cells];
  const column = title => heads.findIndex(head => head.textContent === title);
  const text = (row, index) => row.cells[index].textContent.trim();
  const bold = (row, index) => [...row.cells[index].querySelectorAll('strong')].map(word => word.textContent);
  const filters = [
    { name: 'source', index: column('Source and place'), values: bold },
    { name: 'kind', index: column('Kind'), values: (row, index) => text(row, index).split(', ') },
  ];

  const bar = document.createElement('div');
  bar.className = 'entries-bar';
  const said = document.createElement('output');
  const show = () => {
    for (const row of rows)
      row.hidden = filters.some(({ list, index, values }) => list.value && !values(row, index).includes(list.value));
    said.textContent = `${rows.filter(row => !row.hidden).length} of ${rows.length}`;
  };
  const address = new URL(location);
  for (const filter of filters) {
    const label = document.createElement('label'), list = document.createElement('select');
    const found = new Set(rows.flatMap(row => filter.values(row, filter.index)));
    list.append(new Option('all', ''), ...[...found].map(value => new Option(value, value)));
    list.value = found.has(address.searchParams.get(filter.name)) ? address.searchParams.get(filter.name) : '';
    list.addEventListener('change', () => {
      address.searchParams.delete(filter.name);
      if (list.value) address.searchParams.set(filter.name, list.value);
      history.replaceState(null, '', address);
      show();
    });
    filter.list = list;
    label.append(`${filter.name[0].toUpperCase()}${filter.name.slice(1)} `, list);
    bar.append(label);
  }
  bar.append(said);
  table.parentElement.before(bar);
  show();

  for (const title of ['No.', 'Source and place', 'Kind']) {
    const index = column(title), head = heads[index], words = head.firstElementChild;
    const button = document.createElement('button');
    button.type = 'button';
    button.append(...words.childNodes);
    words.append(button);
    button.addEventListener('click', () => {
      const down = head.getAttribute('aria-sort') === 'ascending';
      for (const other of heads) other.removeAttribute('aria-sort');
      head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
      const order = (a, b) => text(a, index).localeCompare(text(b, index), 'en', { numeric: true });
      body.append(...rows.toSorted((a, b) => (down ? order(b, a) : order(a, b))));
    });
  }
}
