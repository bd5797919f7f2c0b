"""Two forward passes beside each other: which tile of scores each makes, what moves, m, l and O so far.

Both sides come as *traces of a forward pass*, whatever recorded them:

    {"T_q": int, "T_k": int, "d": int, "d_v": int,
     "steps": [{"queries": [first, end], "keys": [first, end],
                "reads": [[array, first row, end row], ...], "read_words": int,
                "writes": [[array, first row, end row], ...], "written_words": int,
                "stored": [[[number, ...], ...], ...],
                "m": [number, ...], "l": [number, ...], "O": [[number, ...], ...]}, ...]}

A step is one turn of the inner loop; what moves before the loop and after it belongs to its first and last
turn. The arrays are Q, K, V, O and the statistics m, l, L, in natural logarithms. ``stored`` has the rows of
each of ``writes``. ``m``, ``l`` and ``O`` are those of the step's queries once its scores have been used,
before anything that ends the loop is done to them.

``inner_steps`` makes such a trace from a schedule on the two-level memory, ``flashlib.kernels.trace`` from a
Triton kernel under the interpreter.
"""

import math

from flashlib.stepper.frame import Figure, number_text, require

DECIMALS = 3
# A sentence with more factors outgrows its room.
MOST_FACTORS = 3
# How far apart two orders of float32 sums may end, relative to the largest number.
SAME = 2.0**-16
PAIR_COLOUR, HELD_COLOUR, READ_COLOUR, WRITTEN_COLOUR = 3, 8, 0, 4
SUBSCRIPTS = str.maketrans("0123456789", "₀₁₂₃₄₅₆₇₈₉")
NOTHING = "reads nothing; writes nothing"


def show_forward(first, second, *, title, alt, names=("FlashAttention", "FlashAttention-2")):
    """A figure that steps through two forward passes of one problem, an inner step of each at a time.

    first, second   each a :class:`flashlib.iomodel.TwoLevelMemory` made with ``trace=True``, after a schedule
                    that keeps m, l and O; or what its ``trace()`` returned; or a trace of a forward pass,
                    which ``flashlib.kernels.trace.trace_forward`` makes from a kernel
    title, alt      the line above the figure; what it shows, for those who do not see it
    names           what the two sides are called

    A side that has fewer steps stands still at its end. Raises TypeError and ValueError for other arguments,
    for traces that are empty, too long or tell of no such pass, and for two sides whose sizes or final
    outputs differ.
    """
    if not isinstance(names, (tuple, list)) or [type(name) for name in names] != [str, str]:
        raise TypeError(f"names must be two texts, got {names!r}")
    if not all(name.strip() for name in names) or names[0] == names[1]:
        raise ValueError(f"names must be two different texts that are not empty, got {names!r}")
    sides = [_Side("first", first, names[0]), _Side("second", second, names[1])]
    _require_one_problem(*sides)

    most = max(side.words for side in sides)
    wide = max(side.width() for side in sides)
    panels = [side.picture(wide) for side in sides]
    panels += [{"kind": "bar", "group": "Words moved", "title": side.name, "max": most} for side in sides]
    panels += [side.table() for side in sides]
    start = {0: {"": NOTHING}, 1: {"": NOTHING}, 2: {"": _moved(0, 0)}, 3: {"": _moved(0, 0)}}
    start |= {place: {"": side.division()} for place, side in enumerate(sides, start=4)}
    head, say = "Start", "nothing has moved, and no query has seen a key."
    shown, rows = [{"head": head, "say": say, "line": None, "set": start, "mark": {}}], []
    for number in range(max(len(side.steps) for side in sides)):
        change, mark, said, moves, states = {}, {}, [], [str(number + 1)], []
        for place, side in enumerate(sides):
            views, sentence, texts = side.step(number)
            for panel, (items, marks) in zip((place, place + 2, place + 4), views, strict=True):
                change |= {panel: items} if items else {}
                mark |= {panel: marks} if marks else {}
            said.append(sentence)
            moves += texts[:-1]
            states += texts[-1:]
        head = f"Step {number + 1}"
        shown.append({"head": head, "say": "\n".join(said), "line": None, "set": change, "mark": mark})
        rows.append(moves + states)
    return Figure(
        title=title,
        alt=alt,
        summary=f"{'; '.join(side.summary() for side in sides)}; both end with the same O",
        panels=panels,
        steps=shown,
        columns=[
            "Step",
            *(column for name in names for column in (name, "Read; written", "Words so far")),
            *(f"State in {name}" for name in names),
        ],
        rows=rows,
        legend={
            "pair": "scores made in this step",
            "past": "made before",
            "read": "read from slow memory",
            "written": "written to it",
            "both": "read and written",
            "held": "in fast memory, not moved",
        },
    )


def inner_steps(memory):
    """The trace of a forward pass (see the module) that a schedule on the two-level memory left.

    memory: a :class:`flashlib.iomodel.TwoLevelMemory` made with ``trace=True``, or what its ``trace()``
    returned. An inner step ends when its tile of scores S is freed; what is stored after that, before
    anything is loaded or made, still belongs to it.

    Raises TypeError for what is no trace, ValueError for a trace without S, Q, K, V and O, and for one that
    does not tell m, l and O after each tile.
    """
    return _inner_steps("memory", memory)


def _inner_steps(argument, memory):
    trace = memory.trace() if callable(getattr(memory, "trace", None)) else memory
    require(argument, trace, ("arrays", "steps"))
    arrays = trace["arrays"]
    require(f"{argument}, in its arrays,", arrays, ("Q", "K", "V", "S", "O"))
    steps, over = [], True
    for event in trace["steps"]:
        action, (name, row, row_end, column, column_end) = event["action"], event["block"]
        if over and (not steps or action in ("load", "allocate")):
            steps.append({"reads": [], "read_words": 0, "writes": [], "written_words": 0, "stored": []})
            over = False
        step = steps[-1]
        if name == "S":
            over = action == "free"
            step["queries"], step["keys"] = [row, row_end], [column, column_end]
        elif action == "load":
            step["reads"].append([name, row, row_end])
            step["read_words"] += event["words"]
        elif action == "store":
            step["writes"].append([name, row, row_end])
            step["written_words"] += event["words"]
            step["stored"].append(_numbers(event["values"]))
        elif action == "compute" and name in ("m", "l", "O") and not over:
            step[name] = dict(zip(range(row, row_end), _numbers(event["values"]), strict=True))
    for number, step in enumerate(steps, start=1):
        queries = range(*step.get("queries", (0, 0)))
        for name in ("m", "l", "O"):
            known = step.get(name, {})
            if not queries or any(query not in known for query in queries):
                raise ValueError(f"{argument} must tell {name} after each tile of S, not so in step {number}")
            step[name] = [known[query] if name == "O" else known[query][0] for query in queries]
    sizes = {"T_q": arrays["Q"]["rows"], "T_k": arrays["K"]["rows"]}
    return sizes | {"d": arrays["Q"]["columns"], "d_v": arrays["O"]["columns"], "steps": steps}


def _numbers(rows):
    """Rows of a trace of the memory, where infinities are texts, as numbers."""
    return [[float(value) for value in row] for row in rows]


def _require_one_problem(first, second):
    """Raise ValueError unless two sides have the same sizes and end with the same O."""
    problem = "first and second must be passes of one problem"
    for size in ("T_q", "T_k", "d", "d_v"):
        a, b = first.trace[size], second.trace[size]
        if a != b:
            raise ValueError(f"{problem}, got {size} = {a} and {b}")
    a, b = ([x for row in side.output() for x in row] for side in (first, second))
    apart = max(abs(x - y) for x, y in zip(a, b, strict=True))
    if not apart <= SAME * max(map(abs, a)):
        raise ValueError(f"{problem}, got outputs that differ by up to {apart:.2g}")


class _Side:
    """One side of the figure: its panels, and what they show at each step."""

    def __init__(self, argument, trace, name):
        if callable(getattr(trace, "trace", None)) or (isinstance(trace, dict) and "arrays" in trace):
            trace = _inner_steps(argument, trace)
        require(argument, trace, ("T_q", "T_k", "d", "d_v", "steps"))
        if not trace["steps"]:
            raise ValueError(f"{argument} has no step: there is nothing to step through")
        self.argument, self.trace, self.steps, self.name = argument, trace, trace["steps"], name
        self.moving = {block[0] for step in self.steps for block in (*step["reads"], *step["writes"])}
        self.statistics = ["m", "l", *(["L"] if "L" in self.moving else [])]
        # Whether O waits for its division until the loop ends; else each step divides it.
        self.deferred = any((self._stored("O", step) or step["O"]) != step["O"] for step in self.steps)
        self.words = sum(step["read_words"] + step["written_words"] for step in self.steps)
        self.places = self._places()
        self.drawn = {}  # what the picture holds now, the tiles made before aside
        self.maxima = {}  # {query: m so far}
        self.read = self.written = 0

    def output(self):
        """O as slow memory holds it at the end, row by row; ValueError where a row is missing."""
        rows = {}
        for step in self.steps:
            for (name, start, end), values in zip(step["writes"], step["stored"], strict=True):
                if name == "O":
                    rows |= zip(range(start, end), values, strict=True)
        if sorted(rows) != list(range(self.trace["T_q"])):
            raise ValueError(f"{self.argument} must write every row of O, got {sorted(rows)}")
        return [rows[query] for query in sorted(rows)]

    # ------------------------------------------------------------------------------------------------
    # Panels

    def _places(self):
        """{array: (top, left, rows, columns)} in the picture; K and V lie on their side above S."""
        T_q, T_k, d, d_v = (self.trace[size] for size in ("T_q", "T_k", "d", "d_v"))
        top, left = d + d_v + 2, d + 1.2
        right = left + T_k + 1.2
        places = {"Q": (top, 0, T_q, d), "K": (0, left, d, T_k), "V": (d + 0.7, left, d_v, T_k)}
        places |= {"S": (top, left, T_q, T_k), "O": (top, right, T_q, d_v)}
        for number, name in enumerate(self.statistics):
            places[name] = (top, right + d_v + 0.7 + 1.7 * number, T_q, 1)
        return {name: tuple(round(x, 1) for x in place) for name, place in places.items()}

    def width(self):
        """Of the picture, in cells."""
        return round(max(left + columns for _, left, _, columns in self.places.values()), 1)

    def picture(self, width):
        return {
            "kind": "plane",
            "group": "What meets, and what moves",
            "title": f"{self.name}: {self._order()}",
            "rows": max(top + rows for top, _, rows, _ in self.places.values()),
            "columns": width,
            "parts": [
                ["" if name == "S" else name, *place, name in self.moving, name in ("K", "V")]
                for name, place in self.places.items()
            ],
        }

    def _order(self):
        """Which loop is the outer one."""
        if len(self.steps) == 1:
            return "one step"
        return "keys outside" if self.steps[0]["keys"] == self.steps[1]["keys"] else "queries outside"

    def division(self):
        """When O is divided, for below the table."""
        when = "in the last step of its queries" if self.deferred else "at every step"
        return f"O is divided by l {when}."

    def table(self):
        outputs = [f"O{column}".translate(SUBSCRIPTS) for column in range(self.trace["d_v"])]
        return {
            "kind": "table",
            "group": "What is known of query i",
            "title": self.name,
            "columns": ["i", "m", "l", *outputs, *self.statistics[2:]],
            "rows": [str(query) for query in range(self.trace["T_q"])],
        }

    # ------------------------------------------------------------------------------------------------
    # Steps

    def step(self, number):
        """What a step shows: (items, marks) of picture, bar, table; its sentence; its texts of the row."""
        if number >= len(self.steps):
            gone, self.drawn = dict.fromkeys(self.drawn), {}
            views = (gone | {"": NOTHING} if gone else {}, {}), ({}, {}), ({}, {})
            return views, f"{self.name} has ended.", [""] * 4
        step = self.steps[number]
        self.read, self.written = self.read + step["read_words"], self.written + step["written_words"]
        # O as the step leaves it: what ends the loop may have divided it by l.
        output = self._stored("O", step) or step["O"]
        views = self._draw(step), (self._bar(), {}), self._state(step, output)
        return views, self._sentence(step, output), self._texts(step, output)

    def _stored(self, name, step):
        """The rows of an array that a step wrote, those of its queries; None where it wrote no such."""
        query, query_end = step["queries"]
        for (other, start, end), values in zip(step["writes"], step["stored"], strict=True):
            if other == name and start <= query and query_end <= end:
                return values[query - start : query_end - start]
        return None

    def _mark(self, name, rows, step):
        """How a step treats the block of an array that it works on."""
        read, written = (
            any(other == name and start <= rows[0] and rows[1] <= end for other, start, end in step[way])
            for way in ("reads", "writes")
        )
        return "both" if read and written else "read" if read else "written" if written else "held"

    def _draw(self, step):
        tile = f"S[{_range(step['queries'])}, {_range(step['keys'])}]"
        blocks = {tile: ("S", step["queries"], "pair")}
        for name in self.places:
            rows = step["keys" if name in "KV" else "queries"]
            mark = self._mark(name, rows, step)
            if name != "S" and not (name == "L" and mark == "held"):  # L exists once it is written
                blocks[f"{name}[{_range(rows)}]"] = (name, rows, mark)
        # Blocks of other rows: a side that keeps several blocks stores them together.
        for name, *rows in step["writes"]:
            blocks.setdefault(f"{name}[{_range(rows)}]", (name, rows, "written"))
        now = {}
        for item, (name, rows, _) in blocks.items():
            colour = PAIR_COLOUR if name == "S" else HELD_COLOUR
            now[item] = [*self._rectangle(name, rows, step["keys"]), "in", colour]
        items = {item: None for item in self.drawn if item not in now}
        items |= {item: content for item, content in now.items() if item not in self.drawn}
        items[f"past {tile}"] = [*now[tile][:4], "stored", PAIR_COLOUR]
        items[""] = f"reads {_names(step['reads'])}; writes {_names(step['writes'])}"
        self.drawn = now
        return items, {item: mark for item, (_, _, mark) in blocks.items()}

    def _rectangle(self, name, rows, keys):
        """[top, bottom, left, right] of rows of an array in the picture; of S, the tile of these keys."""
        top, left, height, width = self.places[name]
        down, across = (rows, keys) if name == "S" else (rows, (0, width))
        if name in ("K", "V"):
            down, across = (0, height), rows
        return [top + down[0], top + down[1], left + across[0], left + across[1]]

    def _bar(self):
        words = {"read": [self.read, READ_COLOUR], "written": [self.written, WRITTEN_COLOUR]}
        moved = {way: content for way, content in words.items() if content[0]}
        return moved | {"": _moved(self.read, self.written)}

    def _state(self, step, output):
        columns = {"m": step["m"], "l": step["l"]}
        columns |= {column: [row[column] for row in output] for column in range(self.trace["d_v"])}
        if "L" in self.statistics:
            final = self._stored("L", step)
            columns["L"] = [value for (value,) in final] if final else [None] * len(output)
            if final:  # which m and l have become
                columns["m"] = columns["l"] = [None] * len(output)
        items, marks = {}, {}
        for place, (name, numbers) in enumerate(columns.items()):
            mark = self._mark("O" if isinstance(name, int) else name, step["queries"], step)
            for query, number in zip(range(*step["queries"]), numbers, strict=True):
                item = query * len(columns) + place
                items[item] = None if number is None else _short(number)
                if number is not None:
                    marks[item] = mark
        return items, marks

    # ------------------------------------------------------------------------------------------------
    # Texts

    def _sentence(self, step, output):
        stored = _listed(list(dict.fromkeys(block[0] for block in step["writes"])))
        does = ["divides O by l"] if not self.deferred or output != step["O"] else []
        does += [f"stores {stored}"] if stored else []
        end = f" {does[0][0].upper()}{', '.join(does)[1:]}." if does else ""
        queries, keys = _range(step["queries"]), _range(step["keys"])
        return f"{self.name} takes queries {queries} with keys {keys}. {self._sums(step)}.{end}"

    def _sums(self, step):
        """What becomes of the sums over earlier keys."""
        factors, begins = [], True
        for query, m in zip(range(*step["queries"]), step["m"], strict=True):
            if query in self.maxima:
                begins = False
                factors.append(math.exp(self.maxima[query] - m))
            self.maxima[query] = m
        if begins:
            return "Their m, l and O begin"
        if all(factor == 1.0 for factor in factors):
            return "No new maximum"
        if len(factors) > MOST_FACTORS:
            return f"New maximum: earlier sums times {_factor(min(factors))} to {_factor(max(factors))}"
        return f"New maximum: earlier sums times {_listed(list(map(_factor, factors)))}"

    def _texts(self, step, output):
        state = [f"m {_row(step['m'])}", f"l {_row(step['l'])}"]
        state.append(f"O {', '.join(f'({_row(numbers)})' for numbers in output)}")
        final = self._stored("L", step)
        if final:
            state.append(f"L {_row([value for (value,) in final])}")
        tile = f"queries {_range(step['queries'])}, keys {_range(step['keys'])}"
        moved = f"{_names(step['reads'])}; {_names(step['writes'])}"
        return [tile, moved, str(self.read + self.written), "; ".join(state)]

    def summary(self):
        read = sum(step["read_words"] for step in self.steps)
        return f"{self.name}: {_moved(read, self.words - read)}"


def _range(part):
    return f"{part[0]}:{part[1]}"


def _names(blocks):
    return ", ".join(dict.fromkeys(block[0] for block in blocks)) or "nothing"


def _listed(texts):
    return " and ".join(filter(None, [", ".join(texts[:-1]), *texts[-1:]]))


def _moved(read, written):
    return f"{read} read + {written} written = {read + written} words"


def _short(number):
    """With so few decimals that columns align; a number that is too large for them in powers of ten."""
    return f"{number:z.{DECIMALS}f}" if abs(number) < 1000 else number_text(number)


def _factor(number):
    return "1" if number == 1.0 else _short(number)


def _row(numbers):
    return ", ".join(map(_short, numbers))
