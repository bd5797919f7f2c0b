"""The figure `fp8` (see `live.py`): outliers in eight bits, with scales and the
transform on or off.
"""

import torch

from flashlib.reference import fp8

# A query, a key of the same size and a smaller one, with eight columns.
QUERY = (0.9, -1.3, 1.0, 0.6, -0.7, 1.1, -0.4, 1.6)
KEYS = (
    (1.2, 0.5, 1.0, -0.8, 1.4, -0.3, 0.7, -1.1),
    (-0.06, 0.14, 0.08, 0.11, -0.12, 0.04, 0.09, 0.07),
)
# What the large numbers of two columns are multiplied by. The largest number of a row
# with a scale of its own has no error.
LARGE = {2: (1.0, 1.0), 5: (0.755, -0.763)}  # of the query and of the first key
LAST, FIRST = 12, 4  # powers of two: the last of the slider, and where it is at first
ROWS = ("query", "key 1", "key 2")


def numbers(size, apart, turned):
    """{name: number} of the figure, for outliers of this size, a scale for each key
    if apart, and the transform if turned: what each number of a row becomes in eight
    bits, and of each key the score, exact and in eight bits, and its error in percent.
    """
    q, *keys = (torch.tensor(x, dtype=torch.float64) for x in (QUERY, *KEYS))
    k = torch.stack(keys)
    for column, (of_query, of_key) in LARGE.items():
        q[column], k[0, column] = size * of_query, size * of_key
    exact = k @ q
    if turned:
        sign = fp8.signs(len(QUERY))
        q, k = fp8.transform(q, sign), fp8.transform(k, sign)
    q8 = fp8.quantize(q[None, None, None], 1).numbers[0, 0]
    k8 = fp8.quantize(k[None, None], 1 if apart else "tensor").numbers[0, 0]
    found = {"size": size}
    for row, x in zip(ROWS, torch.cat([q8, k8]), strict=True):
        found |= {f"{row} {n}": y for n, y in enumerate(x.tolist(), 1)}
    for key, wanted, score in zip(ROWS[1:], exact, k8 @ q8[0], strict=True):
        found |= {f"exact {key}": wanted.item(), f"score {key}": score.item()}
        found[f"error {key}"] = 100 * (score / wanted - 1).abs().item()
    return found


def text(name, numbers):
    """The text of a place of the figure."""
    if name == "size":
        return f"{numbers[name]:,}"
    digits = 2 if name.startswith(("exact", "score")) else 1
    if name.startswith("key 2"):
        digits = 3
    elif abs(numbers[name]) >= 1000:
        digits = 0
    return f"{numbers[name]:.{digits}f}".replace("-", "\u2212")


def figure():
    """The figure as HTML, for its first input."""
    first = numbers(2**FIRST, False, False)
    signs = fp8.signs(len(QUERY)).tolist()

    def show(name, tag="td"):
        return f'<{tag} data-show="{name}">{text(name, first)}</{tag}>'

    controls = (
        f'<label>outliers <input type="range" min="0" max="{LAST}" value="{FIRST}" '
        f'aria-label="size of the outliers" aria-valuetext="{2**FIRST}" '
        f'autocomplete="off" disabled> {show("size", "span")}</label>\n'
    )
    for said in ("a scale for each key", "transform"):
        controls += (
            '<label><input type="checkbox" autocomplete="off" disabled> '
            f"{said}</label>\n"
        )
    head = "".join(f'<th scope="col">{n}</th>' for n in range(1, len(QUERY) + 1))
    rows = f"<tr><td></td>{head}</tr>\n"
    for row in ROWS:
        cells = "".join(show(f"{row} {n}") for n in range(1, len(QUERY) + 1))
        rows += f'<tr><th scope="row">{row}</th>{cells}</tr>\n'
    heads = ("exact score", "in eight bits", "off by, %")
    scores = "".join(f'<th scope="col">{one}</th>' for one in heads)
    scores = f"<tr><td></td>{scores}</tr>\n"
    for key in ROWS[1:]:
        cells = "".join(show(f"{kind} {key}") for kind in ("exact", "score", "error"))
        scores += f'<tr><th scope="row">{key}</th>{cells}</tr>\n'
    return (
        f'<div class="live-controls">\n{controls}</div>\n'
        f'<table class="live-words live-eight" data-signs="{signs}">\n{rows}</table>\n'
        f'<table class="live-words">\n{scores}</table>\n'
    )
