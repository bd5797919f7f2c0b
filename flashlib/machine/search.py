"""The proven minimum number of cycles of a small matrix product.

:func:`min_cycles` searches all programs for C = A B made of LOAD, STORE, MAC_Z, MAC and
MOV, one cycle each. Programs may load an input again, recompute, and store an
unfinished sum and load it back. Programs with the other arithmetic are not searched: a
MUL takes its factors from any register, so it would evade the rule of the ports.

**Why no program is missed.** The search visits states of a normal form. Every program
can be brought into it without becoming longer:

1. *Values.* Memory holds no constants, only the elements of A and B, so every value is
   a polynomial in them with natural coefficients and no constant term, and nothing ever
   cancels. Trace a final element c_ij = sum_k a_ik b_kj back through its instructions.
   It came from a MAC as u*v + w, and all terms of u*v and of w are terms of c_ij. If
   u*v had two terms, k and k', it would also have a cross term (a_ik b_k'j, or a_ik
   a_ik'), which c_ij does not have. So u and v are a_ik and b_kj for one k, and w is
   the rest of the sum, computed in the same way. Hence each c_ij is a chain of one
   MAC_Z and MACs, one for each k, in some order. (Without subtraction there is no trick
   like Strassen's.) Drop all instructions that no final element depends on: exactly
   rows * columns * inner multiply-accumulates remain, so recomputing does not help.
2. *Inputs.* They stay in memory, because overwriting one has no use. A LOAD does
   whatever a MOV of an input does, in the same cycle, so inputs always come from
   memory, straight into the registers in which a MAC needs them. An input that no later
   MAC needs is dropped at once; any other input when its register is needed.
3. *Sums.* One MAC uses a running sum, so the sum is in one place at a time, a register
   or memory. In memory it can use its own cell c[i][j], which is free until the final
   STORE, and that STORE can directly follow the last MAC.
4. *Fixed ports.* The addend of a MAC cannot be a factor too, so running sums belong in
   R2, R3, ... A MAC may still write its sum to R0 or R1, over a factor; no MAC can run
   until the sum is stored or moved away. Other paths of a sum through R0 or R1 save
   nothing: no MAC runs meanwhile, so the loads, stores and moves in between can be
   reordered until the sum goes straight to its destination.
5. *Names.* Registers of one kind are interchangeable. A state therefore records what is
   held, not where: the inputs held, and for each element of C the terms in its sum so
   far and whether the sum is in a register, in memory or (fixed ports) in R0 or R1.

**Why the result is a minimum.** The search is A* with a lower bound: the missing
multiply-accumulates and final stores, one LOAD for each input that is needed and not
held, and one LOAD or MOV for each sum that is not where a MAC needs it. These are
different instructions, so the bound is never too high, and no instruction lowers it by
more than one. When the search reaches the product with t cycles, it has therefore
visited every state from which fewer than t were still possible.
"""

import heapq
from dataclasses import dataclass

from flashlib.plain_checks import check_count

from .isa import LOAD, MAC, MAC_Z, MOV, STORE
from .machine import check_ports

# Where a running sum is.
REGISTER, MEMORY, PORT = range(3)


@dataclass(frozen=True)
class Optimum:
    """The result of a search."""

    cycles: int  # the minimum
    program: tuple  # one that takes this many, for ``Machine(registers, ports)``
    states: int  # that the search visited to exclude fewer cycles


def min_cycles(registers, ports="fixed", shape=(2, 2, 2), sums=None):
    """Return the minimum number of cycles of a product C = A B, proved by exhausting
    all shorter programs, as an :class:`Optimum`.

    registers   number of registers, at least 1
    ports       where the factors of a MAC must be: "fixed" for R0 and R1, in either
                order; "any" for any registers
    shape       (rows of A, columns of B, columns of A); the elements are a[i][k],
                b[k][j] and c[i][j]
    sums        how many elements of C may be unfinished at once, or None for any
                number; 1 finds the best program of inner products

    Raises TypeError for numbers that are not integers; ValueError for other bad
    arguments, and when there are too few registers for any program. In that case all
    states have been visited.
    """
    if not isinstance(shape, tuple) or len(shape) != 3:
        raise ValueError(f"shape: expected (rows, columns, inner), got {shape!r}")
    names = ("registers", "rows", "columns", "inner", "sums")
    counts = (registers, *shape, 1 if sums is None else sums)
    for name, number in zip(names, counts, strict=True):
        check_count(name, number)
    check_ports(ports)
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
        f"registers must be more than {registers} for this product: with "
        f"ports={ports!r} all {len(finished)} states were visited, and none of them "
        "holds it"
    )


class _Product:
    """The states of one search, and the moves between them.

    A state is (inputs, elements): the inputs held, as the bits of an integer, and for
    each element of C a pair (terms, place), the terms of its sum so far as bits.
    (0, REGISTER) is an element that has not begun; one with all terms has been stored.
    """

    def __init__(self, registers, ports, shape, sums):
        rows, columns, inner = shape
        self.fixed, self.sums = ports == "fixed", sums
        self.names = [f"a[{i}][{k}]" for i in range(rows) for k in range(inner)]
        self.names += [f"b[{k}][{j}]" for k in range(inner) for j in range(columns)]
        self.bits = {name: 1 << number for number, name in enumerate(self.names)}
        elements = [(i, j) for i in range(rows) for j in range(columns)]
        self.results = [f"c[{i}][{j}]" for i, j in elements]
        # The two inputs of each term of each element.
        both = {(i, k, j): self.bits[f"a[{i}][{k}]"] | self.bits[f"b[{k}][{j}]"]
                for i, j in elements for k in range(inner)}  # fmt: skip
        self.factors = [[both[i, k, j] for k in range(inner)] for i, j in elements]
        self.inner, self.complete = inner, (1 << inner) - 1
        # Registers for inputs, and for sums that stay.
        self.pools = range(registers), range(registers)
        if self.fixed:
            self.pools = range(min(registers, 2)), range(2, registers)

    def done(self, state):
        return all(terms == self.complete for terms, _ in state[1])

    def wanted(self, elements):
        """The inputs that some missing term needs, as bits."""
        found = 0
        for (terms, _), factors in zip(elements, self.factors, strict=True):
            for k, both in enumerate(factors):
                if not terms >> k & 1:
                    found |= both
        return found

    def bound(self, state):
        """A lower bound on the cycles still needed."""
        inputs, elements = state
        cycles = (self.wanted(elements) & ~inputs).bit_count()
        for terms, place in elements:
            if terms != self.complete:
                cycles += 1 + self.inner - terms.bit_count() + (place != REGISTER)
        return cycles

    def moves(self, state):
        """Yield (cycles, move, state after); a move is (kind, number, term)."""
        inputs, elements = state
        unfinished = [place for terms, place in elements if 0 < terms < self.complete]
        sums = unfinished.count(REGISTER)
        held = [bit for bit in self.bits.values() if inputs & bit]
        used = len(held) + (unfinished.count(PORT) if self.fixed else sums)
        # What a new value replaces: nothing if a register is free, else any one input.
        replaced = replaced_by_sum = [0] if used < len(self.pools[0]) else held
        if self.fixed:
            replaced_by_sum = [0] if sums < len(self.pools[1]) else []

        def after(cycles, move, gone, terms, place):
            number = move[1]
            changed = (*elements[:number], (terms, place), *elements[number + 1 :])
            return cycles, move, (inputs & ~gone & self.wanted(changed), changed)

        missing = self.wanted(elements) & ~inputs
        for number, bit in enumerate(self.bits.values()):
            if missing & bit:
                for gone in replaced:
                    yield 1, ("load", number, None), (inputs & ~gone | bit, elements)

        for number, (terms, place) in enumerate(elements):
            if terms == self.complete:
                continue
            if terms and place != MEMORY:
                yield after(1, ("spill", number, None), 0, terms, MEMORY)
            if terms and place != REGISTER:
                kind = "reload" if place == MEMORY else "move"
                for gone in replaced_by_sum:
                    yield after(1, (kind, number, None), gone, terms, REGISTER)
            begins = not terms and self.sums and len(unfinished) >= self.sums
            if place != REGISTER or begins:
                continue
            for k, both in enumerate(self.factors[number]):
                if terms >> k & 1 or both & ~inputs:
                    continue
                longer, move = terms | 1 << k, ("mac", number, k)
                last = longer == self.complete
                for gone in [0] if terms else replaced_by_sum:
                    yield after(1 + last, move, gone, longer, REGISTER)
                for gone in held if self.fixed else ():  # over one of the factors
                    stays = REGISTER if last else PORT
                    yield after(1 + last, move, gone, longer, stays)

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
            alive = {name for name, bit in self.bits.items() if inputs & bit}
            for result, (terms, place) in zip(self.results, elements, strict=True):
                if 0 < terms < self.complete and place != MEMORY:
                    alive.add(result)
            old = where.get(name)
            others = {x: r for x, r in where.items() if x in alive and x != name}
            stays = kind != "load" and elements[number][1] == REGISTER
            target = old
            if not (stays and old in self.pools[1]):  # a sum that stays, stays in place
                pool = (*self.pools[stays], *self.pools[0])
                target = next((r for r in pool if r not in others.values()), None)
            if kind in ("load", "reload"):
                program.append(LOAD(name, target))
            elif kind == "spill":
                program.append(STORE(old, name))
            elif kind == "move":
                program.append(MOV(old, target))
            else:
                both = self.factors[number][k]
                factors = [where[x] for x, bit in self.bits.items() if both & bit]
                mac = MAC_Z if old is None else MAC
                addend = () if old is None else (old,)
                program.append(mac(*sorted(factors), *addend, target))
                if elements[number][0] == self.complete:
                    program.append(STORE(target, name))
            where = others | ({name: target} if name in alive else {})
        return tuple(program)
