"""Programs for the machine of the chapter *A machine with three registers*.

Each function returns a tuple of instructions. Matrices are square: ``a`` and ``b`` with
n rows and columns are in memory, ``c`` is written. A softmax reads ``x[0]`` ...
``x[n-1]`` and writes ``out[0]`` ... ``out[n-1]``. The docstrings count one cycle per
instruction, for every n. An n that is not an integer raises TypeError, an n below 1
ValueError.
"""

from flashlib.plain_checks import check_count

from .isa import ADD, DIV, EXP, LOAD, MAC, MAC_Z, MAX, MOV, MUL, STORE, SUB


def dot(n, i=0, j=0):
    """c[i][j], the product of row i of ``a`` and column j of ``b``, in 3 registers.

    2n loads, n multiply-accumulates, 1 store: 3n + 1 cycles. ``dot(2)`` is the page's
    c00. Raises ValueError for an i or j that the matrix does not have.
    """
    check_count("n", n)
    for name, index in (("i", i), ("j", j)):
        if index not in range(n):
            raise ValueError(f"{name}: expected 0 to {n - 1}, got {index!r}")
    program = []
    for k in range(n):
        program += [LOAD(f"a[{i}][{k}]", 0), LOAD(f"b[{k}][{j}]", 1)]
        program.append(_accumulate(0, 1, 2, first=k == 0))
    return (*program, STORE(2, f"c[{i}][{j}]"))


def inner_product(n):
    """C = A B, one element after the other, in 3 registers: one running sum.

    Each element begins with the term in which the last one ended, and neighbors in the
    order of the elements share a row or a column, so one factor is still in its
    register. 2n^3 - n^2 + 1 loads, n^3 multiply-accumulates, n^2 stores: 3n^3 + 1
    cycles.
    """
    check_count("n", n)
    program, ports = [], [None, None]
    for number, (i, j) in enumerate(_snake(n)):
        terms = range(n) if number % 2 == 0 else range(n - 1, -1, -1)
        for count, k in enumerate(terms):
            program += _fill(ports, i, j, k)
            program.append(_accumulate(0, 1, 2, first=count == 0))
        program.append(STORE(2, f"c[{i}][{j}]"))
    return tuple(program)


def outer_product(n):
    """C = A B as a sum of n outer products, in n^2 + 2 registers: every element of C
    has a running sum.

    Within one outer product neighbors share a factor. n (n^2 + 1) loads, n^3
    multiply-accumulates, n^2 stores: 2n^3 + n^2 + n cycles.
    """
    check_count("n", n)
    program, ports = [], [None, None]
    for k in range(n):
        for i, j in _snake(n):
            program += _fill(ports, i, j, k)
            program.append(_accumulate(0, 1, 2 + n * i + j, first=k == 0))
    for total in range(n * n):
        program.append(STORE(2 + total, f"c[{total // n}][{total % n}]"))
    return tuple(program)


def blocked_product(n, block):
    """C = A B in square blocks, for ``ports="any"``, in block^2 + block + 1 registers.

    A block of C is the sum of n outer products. For each of them a column of the
    block's rows of ``a`` is loaded once and kept, and the row of ``b`` passes through
    one register. 2 n^3 / block loads, n^3 multiply-accumulates, n^2 stores. ``block=1``
    keeps one sum and reuses nothing; ``block=n`` loads every element once. Raises
    ValueError unless ``block`` divides n.
    """
    check_count("n", n)
    if block not in range(1, n + 1) or n % block:
        raise ValueError(f"block: expected a divisor of n = {n}, got {block!r}")
    passing, column, sums = 0, 1, 1 + block
    starts, inside = range(0, n, block), range(block)
    program = []
    for top, left in ((top, left) for top in starts for left in starts):
        for k in range(n):
            program += [LOAD(f"a[{top + i}][{k}]", column + i) for i in inside]
            for j in inside:
                program.append(LOAD(f"b[{k}][{left + j}]", passing))
                for i in inside:
                    total = sums + block * i + j
                    program.append(_accumulate(column + i, passing, total, k == 0))
        for total in range(block * block):
            i, j = divmod(total, block)
            program.append(STORE(sums + total, f"c[{top + i}][{left + j}]"))
    return tuple(program)


def safe_softmax(n):
    """The safe softmax in 3 registers and three passes: maximum, sum, quotients.

    3n loads, n stores, 11n - 1 cycles: 2n - 1 for the maximum, 4n for the sum, 5n for
    the quotients.
    """
    check_count("n", n)
    x, m, l = 0, 1, 2
    program = [LOAD("x[0]", m)]
    for i in range(1, n):
        program += [LOAD(f"x[{i}]", x), MAX(x, m, m)]
    for i in range(n):
        program += [LOAD(f"x[{i}]", x), SUB(x, m, x), EXP(x, x)]
        program.append(MOV(x, l) if i == 0 else ADD(l, x, l))
    return (*program, *_normalize(n, x, m, l))


def online_softmax(n):
    """The safe softmax in 4 registers and two passes: maximum and sum together, then
    quotients.

    2n loads, n stores, 14n - 4 cycles: 5 for the first element, 9 for each of the
    others, 5n for the quotients.
    """
    check_count("n", n)
    x, m, l = 0, 1, 2
    program = [LOAD("x[0]", x), MOV(x, m), SUB(x, m, x), EXP(x, x), MOV(x, l)]
    for i in range(1, n):
        program += online_step(i)
    return (*program, *_normalize(n, x, m, l))


def online_step(i):
    """The instructions that take one more element ``x[i]`` into the running maximum m
    (R1) and the running sum l (R2), for i >= 1: 1 load, 9 cycles. R0 and R3 are
    overwritten.
    """
    x, m, l, factor = 0, 1, 2, 3
    return (
        LOAD(f"x[{i}]", x),
        MOV(m, factor),
        MAX(m, x, m),
        SUB(factor, m, factor),  # old maximum - new maximum
        SUB(x, m, x),
        EXP(factor, factor),
        EXP(x, x),
        MUL(l, factor, l),
        ADD(l, x, l),
    )


def welford_step(i):
    """The instructions that take one more element ``x[i]`` into the number of elements
    (R1), their mean (R2) and the sum of their squared distances from it (R3), by
    Welford's algorithm: 2 loads, 9 cycles. The cell ``one`` holds 1. R0 and R4 are
    overwritten.
    """
    x, number, mean, z, change = 0, 1, 2, 3, 4
    return (
        LOAD(f"x[{i}]", x),
        SUB(x, mean, x),  # deviation from the old mean
        LOAD("one", change),
        ADD(number, change, number),
        DIV(x, number, change),
        ADD(mean, change, mean),
        SUB(x, change, change),  # deviation from the new mean
        MUL(x, change, x),
        ADD(z, x, z),
    )


def _normalize(n, x, m, l):
    """The last pass of both: e^(x - m) / l for each element, 5n cycles."""
    program = []
    for i in range(n):
        program += [LOAD(f"x[{i}]", x), SUB(x, m, x), EXP(x, x)]
        program += [DIV(x, l, x), STORE(x, f"out[{i}]")]
    return program


def _accumulate(left, right, total, first):
    return MAC_Z(left, right, total) if first else MAC(left, right, total, total)


def _fill(ports, i, j, k):
    """The loads that bring a[i][k] to R0 and b[k][j] to R1; updates ``ports``."""
    wanted = [f"a[{i}][{k}]", f"b[{k}][{j}]"]
    loads = [
        LOAD(cell, port) for port, cell in enumerate(wanted) if ports[port] != cell
    ]
    ports[:] = wanted
    return loads


def _snake(n):
    """All (i, j), every other row backwards, so that neighbors differ in one index."""
    for i in range(n):
        for j in range(n) if i % 2 == 0 else range(n - 1, -1, -1):
            yield i, j
