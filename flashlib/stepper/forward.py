"""Two forward passes side by side: which tile of scores each step computes, what moves,
and m, l and O so far.

Both sides come as *traces of a forward pass*:

    {"T_q": int, "T_k": int, "d": int, "d_v": int,
     "steps": [{"queries": [first, end], "keys": [first, end],
                "reads": [[array, first row, end row], ...], "read_words": int,
                "writes": [[array, first row, end row], ...], "written_words": int,
                "stored": [[[number, ...], ...], ...],
                "m": [number, ...], "l": [number, ...],
                "O": [[number, ...], ...]}, ...]}

A step is one turn of the inner loop; what moves before the loop and after it belongs to
its first and last turn. The arrays are Q, K, V, O and the statistics m, l, L, in
natural logarithms. ``stored`` has the rows of each of ``writes``. ``m``, ``l`` and
``O`` are those of the step's queries right after its scores are used, before anything
that ends the loop.

Standard attention stores S and P between its three passes. Its steps are a tile of
scores, a row of the softmax or a tile of the output, the step's queries and keys say
which. S and P are among the arrays, and only steps of the output have ``O``, the sum
over the keys so far; no step has ``m`` or ``l``.

``inner_steps`` computes such a trace from a schedule on the two-level memory.
"""

import math
from functools import cached_property

from flashlib.stepper import frame

DECIMALS = 3
# A sentence with more factors does not fit its line.
MOST_FACTORS = 3
# How far apart two orders of float32 sums may end, relative to the largest number.
SAME = 2.0**-16
PAIR_COLOR, HELD_COLOR, READ_COLOR, WRITTEN_COLOR = 3, 8, 0, 4
SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
NOTHING = "reads nothing; writes nothing"
SIZES = ("T_q", "T_k", "d", "d_v")
NAMES = ("FlashAttention", "FlashAttention-2")


def show_forward(first, second, *, title, alt, names=NAMES):
    """Return a figure that steps through two forward passes of one problem, an inner
    step of each at a time.

    first, second   each a :class:`flashlib.iomodel.TwoLevelMemory` made with
                    ``trace=True``, after a schedule that keeps m, l and O or stores S
                    and P; or what its ``trace()`` returned; or a trace of a forward
                    pass
    title, alt      as for :class:`flashlib.stepper.frame.Figure`
    names           what the two sides are called

    A side with fewer steps stops at its end. Raises TypeError and ValueError as
    :func:`flashlib.stepper.show_program`, and for two sides whose sizes or final
    outputs differ.
    """
    for name in names:
        frame.check_text("names", name)
    if len(set(names)) != 2:
        raise ValueError(f"names: expected two different texts, got {names!r}")
    sides = _side("first", first, names[0]), _side("second", second, names[1])
    _check_one_problem(*sides)

    most = max(side.words for side in sides)
    wide = max(side.width() for side in sides)
    panels = [side.picture(wide) for side in sides]
    panels += [frame.panel("bar", "Words moved", side.name, max=most) for side in sides]
    panels += [side.table() for side in sides]
    texts = [NOTHING, NOTHING, _moved(0, 0), _moved(0, 0)]
    texts += [side.division() for side in sides]
    start = {place: {"": text} for place, text in enumerate(texts)}
    say = "nothing has moved, and no query has seen a key."
    shown, rows = [frame.step("Start", say, start)], []
    for number in range(max(len(side.steps) for side in sides)):
        change, mark, said, moves, states = {}, {}, [], [], []
        for place, side in enumerate(sides):
            views, sentence, texts = side.step(number)
            for view, (items, marks) in enumerate(views):
                change[place + 2 * view], mark[place + 2 * view] = items, marks
            said.append(sentence)
            moves += texts[:-1]
            states += texts[-1:]
        shown.append(frame.step(f"Step {number + 1}", "\n".join(said), change, mark))
        rows.append([str(number + 1), *moves, *states])
    columns = ["Step"]
    for name in names:
        columns += [name, "Read; written", "Words so far"]
    columns += [f"State in {name}" for name in names]
    summary = "; ".join([*(x.summary() for x in sides), "both end with the same O"])
    legend = {
        "pair": "scores computed in this step",
        "past": "computed before",
        "read": "read from slow memory",
        "written": "written to it",
        "both": "read and written",
        "held": "in fast memory, not moved",
    }
    return frame.Figure(
        title=title, alt=alt, summary=summary, panels=panels, steps=shown,
        columns=columns, rows=rows, legend=legend,
    )  # fmt: skip


def inner_steps(memory, argument="memory"):
    """Return the trace of a forward pass (see the module) of a schedule, from its
    memory or what ``memory.trace()`` returned.

    An inner step ends when its tile of S or P is freed; what is stored after that,
    before anything is loaded or allocated, still belongs to it. Raises TypeError,
    naming ``argument``, for anything but a trace; ValueError for a trace without S, Q,
    K, V and O, or without what its steps must have.
    """
    trace = frame.read_trace(argument, memory, ("arrays", "steps"))
    arrays = trace["arrays"]
    frame.read_trace(f"{argument}: arrays", arrays, ("Q", "K", "V", "S", "O"))
    steps, over = [], True
    for event in trace["steps"]:
        action, name = event["action"], event["block"][0]
        row, row_end, column, column_end = event["block"][1:]
        if over and (not steps or action in ("load", "allocate")):
            moved = {"reads": [], "read_words": 0, "writes": [], "written_words": 0}
            steps.append(moved | {"stored": []})
            over = False
        one, rows = steps[-1], [name, row, row_end]
        numbers = [[float(x) for x in values] for values in event["values"] or []]
        if name in ("S", "P"):
            over = action == "free"
            one["queries"], one["keys"] = [row, row_end], [column, column_end]
        if action == "load":
            one["reads"].append(rows)
            one["read_words"] += event["words"]
        elif action == "store":
            one["writes"].append(rows)
            one["written_words"] += event["words"]
            one["stored"].append(numbers)
        elif action == "compute" and name in ("m", "l", "O") and not over:
            one[name] = dict(zip(range(row, row_end), numbers, strict=True))
    for number, one in enumerate(steps, start=1):
        queries = range(*one.get("queries", (0, 0)))
        known = {name: one.pop(name, {}) for name in ("m", "l", "O")}
        for name in _kept(one, arrays):
            rows = known[name]
            if not queries or not rows.keys() >= set(queries):
                expected = f"{argument}: expected {name} after each tile"
                raise ValueError(f"{expected}, got none in step {number}")
            rows = [rows[query] for query in queries]
            one[name] = rows if name == "O" else [row[0] for row in rows]
    Q, K, O = (arrays[name] for name in "QKO")
    sizes = {"T_q": Q["rows"], "T_k": K["rows"], "d": Q["columns"], "d_v": O["columns"]}
    return sizes | {"steps": steps}


def _kept(one, arrays):
    """Which of m, l and O are known after a step."""
    if not arrays.get("P", {}).get("slow"):
        return ("m", "l", "O")
    return ("O",) if _moves(one, "reads", "P") else ()


def _moves(one, way, name):
    return any(array == name for array, *_ in one[way])


def _check_one_problem(first, second):
    """Raise ValueError unless two sides have the same sizes and end with the same O."""
    problem = "first and second: expected passes of one problem"
    for size in SIZES:
        a, b = first.trace[size], second.trace[size]
        if a != b:
            raise ValueError(f"{problem}, got {size} = {a} and {b}")
    a, b = ([x for row in side.output() for x in row] for side in (first, second))
    apart = max(abs(x - y) for x, y in zip(a, b, strict=True))
    if not apart <= SAME * max(map(abs, a)):
        raise ValueError(f"{problem}, got outputs that differ by up to {apart:.2g}")


def _side(argument, trace, name):
    """The side of the figure for what ``show_forward`` received."""
    if not isinstance(trace, dict) or "arrays" in trace:
        trace = inner_steps(trace, argument)
    trace = frame.read_trace(argument, trace, (*SIZES, "steps"))
    standard = any(_moves(one, "writes", "P") for one in trace["steps"])
    return (_Standard if standard else _Side)(argument, trace, name)


class _Side:
    """One side of the figure: its panels, and what they show at each step."""

    tile, statistics = "S", ["m", "l"]

    def __init__(self, argument, trace, name):
        self.trace, self.argument, self.name = trace, argument, name
        self.steps = trace["steps"]
        blocks = [x for one in self.steps for x in (*one["reads"], *one["writes"])]
        self.moving = {array for array, *_ in blocks}
        if "L" in self.moving:
            self.statistics = [*self.statistics, "L"]
        self.words = sum(x["read_words"] + x["written_words"] for x in self.steps)
        self.places = self._places()
        self.drawn = {}  # what the picture holds now, without the tiles of past steps
        self.maxima = {}  # {query: m so far}
        self.read = self.written = 0

    @cached_property
    def deferred(self):
        """Whether O is divided by l only at the end of the loop, not at each step."""
        return any(self._output(one) != one["O"] for one in self.steps)

    def output(self):
        """The rows of O in slow memory at the end; ValueError if one is missing."""
        rows = {}
        for one in self.steps:
            for (name, start, end), values in _written(one):
                if name == "O":
                    rows |= zip(range(start, end), values, strict=True)
        if sorted(rows) != list(range(self.trace["T_q"])):
            expected = f"{self.argument}: expected every row of O to be written"
            raise ValueError(f"{expected}, got {sorted(rows)}")
        return [rows[query] for query in sorted(rows)]

    # -- Panels

    def _places(self):
        """{array: (top, left, rows, columns)}; K and V are transposed above S."""
        T_q, T_k, d, d_v = (self.trace[size] for size in SIZES)
        top, left = d + d_v + 2.5, d + 1.2
        right = left + T_k + 1.2
        places = {
            "Q": (top, 0, T_q, d),
            "K": (0, left, d, T_k),
            "V": (d + 0.7, left, d_v, T_k),
            "S": (top, left, T_q, T_k),
            "O": (top, right, T_q, d_v),
        }
        for number, name in enumerate(self.statistics):
            places[name] = (top, right + d_v + 0.7 + 1.7 * number, T_q, 1)
        return {name: [round(x, 1) for x in place] for name, place in places.items()}

    def width(self):
        """The width of the picture in cells."""
        ends = [left + columns for _, left, _, columns in self.places.values()]
        return round(max(ends), 1)

    def order(self):
        """What the outer loop goes through."""
        if len(self.steps) == 1:
            return "one step"
        same = self.steps[0]["keys"] == self.steps[1]["keys"]
        return f"{'keys' if same else 'queries'} outside"

    def picture(self, width):
        parts = []
        for name, place in self.places.items():
            label, transposed = self.tile if name == "S" else name, name in ("K", "V")
            parts.append([label, *place, name in self.moving, transposed])
        rows = max(top + rows for top, _, rows, _ in self.places.values())
        shape = {"rows": rows, "columns": width, "parts": parts}
        title = f"{self.name}: {self.order()}"
        return frame.panel("plane", "What is combined, and what moves", title, **shape)

    def division(self):
        """When O is divided, for below the table."""
        when = "in the last step of its queries" if self.deferred else "at every step"
        return f"O is divided by l {when}."

    def table(self):
        outputs = [f"O{i}".translate(SUBSCRIPTS) for i in range(self.trace["d_v"])]
        columns = ["i", *self.statistics[:2], *outputs, *self.statistics[2:]]
        rows = [str(query) for query in range(self.trace["T_q"])]
        group = "What is known about query i"
        return frame.panel("table", group, self.name, columns=columns, rows=rows)

    # -- Steps

    def step(self, number):
        """The (items, marks) of each panel, the sentence, the table's row."""
        if number >= len(self.steps):
            gone, self.drawn = dict.fromkeys(self.drawn), {}
            picture = gone | {"": NOTHING} if gone else {}
            views = (picture, {}), ({}, {}), ({}, {})
            return views, f"{self.name} is done.", [""] * 4
        one = self.steps[number]
        self.read += one["read_words"]
        self.written += one["written_words"]
        views = self._draw(one), (self._bar(), {}), self._state(one)
        queries, keys = _range(one["queries"]), _range(one["keys"])
        takes = f"{self.name} processes queries {queries} with keys {keys}"
        return views, f"{takes}. {self._does(one)}", self._texts(one)

    def _stored(self, name, one):
        """The rows of an array that a step wrote, those of its queries, or None."""
        query, query_end = one["queries"]
        for (other, start, end), values in _written(one):
            if other == name and start <= query and query_end <= end:
                return values[query - start : query_end - start]
        return None

    def _output(self, one):
        """O as a step leaves it: the end of the loop may have divided it by l."""
        return self._stored("O", one) or one["O"]

    def _log_sums(self, one):
        """L of a step's queries if the step wrote it, or an empty list."""
        return [value for (value,) in self._stored("L", one) or []]

    def _mark(self, name, rows, one):
        """Whether a step reads or writes the block of an array that it works on."""

        def moves(way):
            blocks = [(start, end) for other, start, end in one[way] if other == name]
            return any(start <= rows[0] and rows[1] <= end for start, end in blocks)

        marks = {(1, 1): "both", (1, 0): "read", (0, 1): "written", (0, 0): "held"}
        return marks[moves("reads"), moves("writes")]

    def _draw(self, one):
        tile = f"S[{_range(one['queries'])}, {_range(one['keys'])}]"
        blocks = {tile: ("S", one["queries"], self._tile_mark(one))}
        for name in self._used(one):
            rows = one["keys" if name in "KV" else "queries"]
            mark = self._mark(name, rows, one)
            exists = name != "L" or mark != "held"  # L exists once it is written
            if name != "S" and exists:
                blocks[f"{name}[{_range(rows)}]"] = (name, rows, mark)
        # Blocks of other rows: a side that keeps several blocks stores them together.
        for name, *rows in one["writes"]:
            if name not in ("S", "P"):  # their tile is there already
                blocks.setdefault(f"{name}[{_range(rows)}]", (name, rows, "written"))
        now = {}
        for item, (name, rows, _) in blocks.items():
            color = PAIR_COLOR if name == "S" else HELD_COLOR
            now[item] = [*self._rectangle(name, rows, one["keys"]), "in", color]
        items = frame.difference(self.drawn, now)
        items[f"past {tile}"] = [*now[tile][:4], "stored", PAIR_COLOR]
        items[""] = f"reads {_names(one['reads'])}; writes {_names(one['writes'])}"
        self.drawn = now
        return items, {item: mark for item, (_, _, mark) in blocks.items()}

    def _tile_mark(self, one):
        return "pair"

    def _used(self, one):
        """The arrays that a step has blocks of in fast memory."""
        return self.places

    def _rectangle(self, name, rows, keys):
        """[top, bottom, left, right] of rows of an array, or of a tile of S."""
        top, left, height, width = self.places[name]
        down, across = (rows, keys) if name == "S" else (rows, (0, width))
        if name in ("K", "V"):
            down, across = (0, height), rows
        return [top + down[0], top + down[1], left + across[0], left + across[1]]

    def _bar(self):
        items = {}
        if self.read:
            items["read"] = [self.read, READ_COLOR]
        if self.written:
            items["written"] = [self.written, WRITTEN_COLOR]
        return items | {"": _moved(self.read, self.written)}

    def _state(self, one):
        output = self._output(one)
        columns = {"m": one["m"], "l": one["l"]}
        columns |= enumerate(zip(*output, strict=True))
        if "L" in self.statistics:
            nothing, final = [None] * len(output), self._log_sums(one)
            columns["L"] = final or nothing
            if final:  # L replaces m and l
                columns["m"] = columns["l"] = nothing
        return self._cells(one, columns)

    def _cells(self, one, columns):
        """The (items, marks) of the table for {column: numbers of the queries}."""
        items, marks = {}, {}
        for place, (name, numbers) in enumerate(columns.items()):
            array = "O" if isinstance(name, int) else name
            mark = self._mark(array, one["queries"], one)
            for query, number in zip(range(*one["queries"]), numbers, strict=True):
                item = query * len(columns) + place
                items[item] = None if number is None else _short(number)
                if number is not None:
                    marks[item] = mark
        return items, marks

    # -- Texts

    def _does(self, one):
        """What a step does with its tile, in sentences."""
        output = self._output(one)
        does = ["divides O by l"] if not self.deferred or output != one["O"] else []
        if one["writes"]:
            stored = dict.fromkeys(array for array, *_ in one["writes"])
            does.append(f"stores {frame.listed(list(stored))}")
        end = ", ".join(does)
        end = f" {end[0].upper()}{end[1:]}." if does else ""
        return f"{self._sums(one)}.{end}"

    def _sums(self, one):
        """What happens to the sums over earlier keys."""
        before = dict(self.maxima)
        self.maxima |= zip(range(*one["queries"]), one["m"], strict=True)
        known = [query for query in range(*one["queries"]) if query in before]
        factors = [math.exp(before[query] - self.maxima[query]) for query in known]
        if not known:
            return "Their m, l and O start here"
        if all(factor == 1.0 for factor in factors):
            return "No new maximum"
        times = frame.listed(list(map(_factor, factors)))
        if len(factors) > MOST_FACTORS:
            times = f"{_factor(min(factors))} to {_factor(max(factors))}"
        return f"New maximum: earlier sums are multiplied by {times}"

    def _known(self, one):
        """The numbers of a step's queries, for the table of all steps."""
        state = [f"{name} {_row(one[name])}" for name in ("m", "l")]
        state.append(f"O {_rows(self._output(one))}")
        if final := self._log_sums(one):
            state.append(f"L {_row(final)}")
        return "; ".join(state)

    def _texts(self, one):
        tile = f"queries {_range(one['queries'])}, keys {_range(one['keys'])}"
        moved = f"{_names(one['reads'])}; {_names(one['writes'])}"
        return [tile, moved, str(self.read + self.written), self._known(one)]

    def summary(self):
        read = sum(one["read_words"] for one in self.steps)
        return f"{self.name}: {_moved(read, self.words - read)}"


class _Standard(_Side):
    """A side that stores all of S, then all of P, before it begins with O."""

    tile, statistics = "S, P", []

    def order(self):
        return "S, P, O"

    def division(self):
        return "O begins once all of P is stored."

    def _used(self, one):
        if _moves(one, "writes", "S"):
            return ("Q", "K")
        return ("V", "O") if "O" in one else ()

    def _tile_mark(self, one):
        if _moves(one, "writes", "S"):
            return "written"
        return "read" if "O" in one else "both"

    def _state(self, one):
        columns = zip(*one.get("O", []), strict=True)
        return self._cells(one, dict(enumerate(columns)))

    def _does(self, one):
        if _moves(one, "writes", "S"):
            return "Stores their scores S."
        if "O" not in one:
            return "Loads this row of S and stores its softmax P."
        does = "Loads P and adds P V to O."
        return f"{does} Stores O." if _moves(one, "writes", "O") else does

    def _known(self, one):
        if "O" in one:
            return f"O {_rows(one['O'])}"
        ((name, *_),) = one["writes"]
        return f"{name} {_rows(one['stored'][0])}"


def _written(one):
    return zip(one["writes"], one["stored"], strict=True)


def _range(part):
    return f"{part[0]}:{part[1]}"


def _names(blocks):
    return ", ".join(dict.fromkeys(block[0] for block in blocks)) or "nothing"


def _moved(read, written):
    return f"{read} read + {written} written = {read + written} words"


def _short(number):
    """Few fixed decimals, so that columns align; powers of ten for large numbers."""
    few = abs(number) < 1000
    return f"{number:z.{DECIMALS}f}" if few else frame.number_text(number)


def _factor(number):
    return "1" if number == 1.0 else _short(number)


def _row(numbers):
    return ", ".join(map(_short, numbers))


def _rows(matrix):
    return ", ".join(f"({_row(numbers)})" for numbers in matrix)
