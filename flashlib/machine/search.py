"""The proven minimum number of cycles of a small matrix product (chapter *A machine with three registers*).

:func:`min_cycles` searches over all programs for C = A B made of LOAD, STORE, MAC_Z, MAC and MOV, one cycle
each. Programs may load an input again, recompute, store an unfinished sum and load it back. Not searched are
programs that use the other arithmetic: a MUL with factors in any registers would do away with the rule of the
ports.

**Why no program is missed.** The search visits states of a normal form. Every program can be brought into it
without becoming longer:

1. *Values.* Memory holds no constants, only the elements of A and B, so every value is a polynomial in them
   with natural coefficients and no constant term. Nothing ever cancels. Take a final element
   c_ij = sum_k a_ik b_kj and go back through the instructions that it came from. A MAC made it from u*v + w;
   all terms of u*v and of w are terms of c_ij. Were there two terms in u*v, say k and k', then u*v would also
   have a cross term (a_ik b_k'j, or a_ik a_ik'), which c_ij has not. So u and v are a_ik and b_kj for one k,
   and w is what remains of the sum, made in the same way. Hence each c_ij is a chain of one MAC_Z and MACs,
   one for each k, in some order. (This is why no trick in the manner of Strassen can occur: without
   subtraction there is none.) Drop all instructions that no final element came from: what remains has exactly
   rows * columns * inner multiply-accumulates. Recomputing does not help.
2. *Inputs.* They stay in memory; a cell that was overwritten by something else would only have to be spared.
   A LOAD does whatever a MOV of an input does, in the same cycle, so nothing is lost if inputs come from
   memory always, into the registers in which a MAC wants them. An input that no later MAC wants is dropped at
   once; any other whenever its register is needed.
3. *Sums.* A running sum is wanted by one MAC only, so it has one path from where it was made to where it is
   wanted, and is in one place at a time: a register or memory. In memory it may as well lie in its own cell
   c[i][j], which is free until the final STORE. That final STORE can stand directly behind the last MAC.
4. *Fixed ports.* The addend of a MAC cannot be a factor too, so running sums are wanted in R2, R3, ... Yet a
   MAC may put its sum in R0 or R1, over a factor; then it has to be stored or moved away, for no MAC can run
   until then. Other ways of a sum into R0 or R1 and out again save nothing: as no MAC runs meanwhile, the
   loads, stores and moves between can be put in an order in which the sum goes straight to its end.
5. *Names.* Registers of one kind are interchangeable, so a state knows only what is held, not where: the
   inputs held, and for each element of C the terms that its sum has so far and whether the sum is in a
   register, in memory or (fixed ports) in R0 or R1.

**Why the result is a minimum.** The search is A* with a bound from below: the multiply-accumulates and final
stores that are missing, one LOAD for each input that is wanted and not held, and one LOAD or MOV for each sum
that is not where a MAC wants it. These are different instructions, so the bound is never too high; and no
instruction lowers it by more than one. Therefore, when the search reaches the product with t cycles, it has
visited every state from which fewer than t could still have been possible.
"""

import heapq
from dataclasses import dataclass

from .isa import LOAD, MAC, MAC_Z, MOV, STORE
from .machine import PORTS

# Where a running sum is.
REGISTER, MEMORY, PORT = range(3)


@dataclass(frozen=True)
class Optimum:
    """The result of a search.

    cycles      the minimum
    program     a program that takes so many, for ``Machine(registers, ports)``
    states      how many states the search went through to exclude fewer
    """

    cycles: int
    program: tuple
    states: int


def min_cycles(registers, ports="fixed", shape=(2, 2, 2), sums=None):
    """The minimum number of cycles of a product C = A B, proved by exhausting all that is shorter.

    registers   number of registers, at least 1
    ports       "fixed": the factors of a MAC stand in R0 and R1, either way round; "any": in any registers
    shape       (rows of A, columns of B, columns of A); the elements are a[i][k], b[k][j] and c[i][j]
    sums        None, or how many elements of C may be under way at once: 1 asks for the best program that
                finishes each element before it begins the next, as inner products do

    Returns an :class:`Optimum`. Raises ValueError for bad arguments, and when there is no program at all
    because there are too few registers; then too all states have been visited.
    """
    if not isinstance(shape, tuple) or len(shape) != 3:
        raise ValueError(f"shape must be (rows, columns, inner), got {shape!r}")
    for name, number in (("registers", registers), *zip(("rows", "columns", "inner"), shape, strict=True)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {number!r}")
    if ports not in PORTS:
        raise ValueError(f"ports must be 'fixed' or 'any', got {ports!r}")
    if sums is not None and (not isinstance(sums, int) or isinstance(sums, bool) or sums < 1):
        raise ValueError(f"sums must be None or an integer of at least 1, got {sums!r}")
    product = _Product(registers, ports, shape, sums)
    start = (0, ((0, REGISTER),) * (shape[0] * shape[1]))
    cost, reached = {start: 0}, {start: None}
    queue = [(product.bound(start), 0, 0, start)]
    finished, count = set(), 0
    while queue:
        *_, state = heapq.heappop(queue)
        if state in finished:
            continue
        if product.done(state):
            return Optimum(cost[state], product.program(state, reached), len(finished))
        finished.add(state)
        for cycles, move, after in product.moves(state):
            total = cost[state] + cycles
            if total < cost.get(after, total + 1):
                cost[after], reached[after] = total, (state, move)
                count += 1
                remaining = product.bound(after)
                heapq.heappush(queue, (total + remaining, remaining, count, after))
    raise ValueError(
        f"registers must be more than {registers} for this product: with ports={ports!r} all {len(finished)} "
        "states were visited, and none of them holds it"
    )


class _Product:
    """The states of one search, and the moves between them.

    A state is (inputs, elements): a set of inputs held, as the bits of an integer, and for each element of C
    a pair (terms, place), the terms of its sum so far as bits. (0, REGISTER) is an element not yet begun; one
    with all terms has been stored.
    """

    def __init__(self, registers, ports, shape, sums):
        rows, columns, inner = shape
        self.fixed, self.sums = ports == "fixed", sums
        self.names = [f"a[{i}][{k}]" for i in range(rows) for k in range(inner)]
        self.names += [f"b[{k}][{j}]" for k in range(inner) for j in range(columns)]
        self.results = [f"c[{i}][{j}]" for i in range(rows) for j in range(columns)]
        bit = {name: 1 << number for number, name in enumerate(self.names)}
        # The two inputs that term k of an element wants.
        self.factors = [
            [bit[f"a[{i}][{k}]"] | bit[f"b[{k}][{j}]"] for k in range(inner)]
            for i in range(rows)
            for j in range(columns)
        ]
        self.inner, self.complete = inner, (1 << inner) - 1
        if self.fixed:  # inputs share the ports; sums that stay have the other registers
            self.pools = range(min(registers, 2)), range(2, registers)
        else:  # one pool for both
            self.pools = range(registers), range(registers)

    def done(self, state):
        return all(terms == self.complete for terms, _ in state[1])

    def wanted(self, elements):
        """The inputs that some missing term wants, as bits."""
        found = 0
        for (terms, _), factors in zip(elements, self.factors, strict=True):
            for k, both in enumerate(factors):
                if not terms >> k & 1:
                    found |= both
        return found

    def bound(self, state):
        """Cycles that are certainly still needed."""
        inputs, elements = state
        cycles = (self.wanted(elements) & ~inputs).bit_count()
        for terms, place in elements:
            if terms != self.complete:
                cycles += 1 + self.inner - terms.bit_count() + (place != REGISTER)
        return cycles

    def moves(self, state):
        """All (cycles, move, state after): move is (kind, number of the input or element, term)."""
        inputs, elements = state
        open_sums = [place for terms, place in elements if 0 < terms < self.complete]
        sums = open_sums.count(REGISTER)
        held = [1 << number for number in range(len(self.names)) if inputs >> number & 1]
        used = len(held) + (open_sums.count(PORT) if self.fixed else sums)
        # What to give up for a new value: nothing where a register is empty, else any one input.
        room = [0] if used < len(self.pools[0]) else held
        room_for_sum = ([0] if sums < len(self.pools[1]) else []) if self.fixed else room

        def after(cycles, move, given_up, number, terms, place):
            changed = (*elements[:number], (terms, place), *elements[number + 1 :])
            return cycles, move, (inputs & ~given_up & self.wanted(changed), changed)

        missing = self.wanted(elements) & ~inputs
        for number in range(len(self.names)):
            if missing >> number & 1:
                for given_up in room:
                    yield 1, ("load", number, None), (inputs & ~given_up | 1 << number, elements)

        for number, (terms, place) in enumerate(elements):
            if terms == self.complete:
                continue
            if terms and place != MEMORY:
                yield after(1, ("spill", number, None), 0, number, terms, MEMORY)
            if terms and place != REGISTER:
                kind = "reload" if place == MEMORY else "move"
                for given_up in room_for_sum:
                    yield after(1, (kind, number, None), given_up, number, terms, REGISTER)
            if place != REGISTER or (not terms and self.sums and len(open_sums) >= self.sums):
                continue
            for k, both in enumerate(self.factors[number]):
                if terms >> k & 1 or both & ~inputs:
                    continue
                longer = terms | 1 << k
                move, last = ("mac", number, k), longer == self.complete
                for given_up in [0] if terms else room_for_sum:
                    yield after(1 + last, move, given_up, number, longer, REGISTER)
                if self.fixed:  # over one of the factors
                    for given_up in held:
                        place_after = REGISTER if last else PORT
                        yield after(1 + last, move, given_up, number, longer, place_after)

    def program(self, state, reached):
        """The instructions of the path to a state, with registers assigned."""
        path = []
        while reached[state]:
            before, move = reached[state]
            path.append((move, state))
            state = before
        where, program = {}, []  # where: {name of an input or of a sum: its register}
        for (kind, number, k), (inputs, elements) in reversed(path):
            name = self.names[number] if kind == "load" else self.results[number]
            alive = {self.names[bit] for bit in range(len(self.names)) if inputs >> bit & 1}
            alive |= {
                result
                for result, (terms, place) in zip(self.results, elements, strict=True)
                if 0 < terms < self.complete and place != MEMORY
            }
            stays = kind != "load" and elements[number][1] == REGISTER
            taken = {register for other, register in where.items() if other in alive and other != name}
            free = (r for r in (*self.pools[stays], *self.pools[0]) if r not in taken)
            old = where.get(name)
            # A sum that is where sums stay is continued in place.
            target = old if stays and old in self.pools[1] else next(free, None)
            if kind in ("load", "reload"):
                program.append(LOAD(name, target))
            elif kind == "spill":
                program.append(STORE(old, name))
            elif kind == "move":
                program.append(MOV(old, target))
            else:
                both = self.factors[number][k]
                factors = [name for bit, name in enumerate(self.names) if both >> bit & 1]
                left, right = sorted(where[factor] for factor in factors)
                program.append(MAC_Z(left, right, target) if old is None else MAC(left, right, old, target))
                if elements[number][0] == self.complete:
                    program.append(STORE(target, name))
            where[name] = target
            where = {other: register for other, register in where.items() if other in alive}
        return tuple(program)
