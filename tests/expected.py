"""How tests say what they expect."""

import pytest
import torch


def refused(error, message):
    """A context that expects one clear line: an error whose message starts so."""
    return pytest.raises(error, match=rf"\A{message}(?!(.|\n)*\n)")


def with_id(table):
    """Rows (error, message, ...) as parameters, each named by its message."""
    return [pytest.param(*row, id=row[1]) for row in table]


def same(found, wanted):
    """Whether two lists of tensors agree in every bit."""
    return all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))


def in_memory_order(x, like):
    """Whether x is dense and stored in the order of like, unless that is expanded."""
    order = range(x.ndim - 1)
    if 0 not in like.stride():  # not expanded
        order = sorted(order, key=lambda n: -like.stride(n))
    return x.permute(*order, x.ndim - 1).is_contiguous()
