"""Scores of every kind for tests."""

import torch
from device import DEVICE

from flashlib.score_functions import Score, alibi, at, exp, log, of_tanh, softcap, tanh


def cubed(s, b, h, p, j, weight):
    return s + weight * s * s * s


def of_cubed(s, b, h, p, j, weight):
    return 1.0 + 3.0 * weight * s * s


def softplus(s, b, h, p, j, n):
    return log(1.0 + exp(s)) - 0.5 * (abs(p - j) < n + h)


def of_softplus(s, b, h, p, j, n):
    return 1.0 / (1.0 + exp(-s))


def fading(s, b, h, p, j, n):
    return s * exp(-abs(p - j)) + log(n + abs(p - j))


def of_fading(s, b, h, p, j, n):
    return exp(-abs(p - j))


def relative(s, b, h, p, j, table, n):
    return s + at(table, h, p - j + n)


def of_relative(s, b, h, p, j, table, n):
    return 1.0


def weighed(s, b, h, p, j, weights):
    return tanh(s) * at(weights, b, h, p, j)


def of_weighed(s, b, h, p, j, weights):
    return of_tanh(s) * at(weights, b, h, p, j)


def some_scores(B, H, T_k, rng):
    """A few scores for these sizes, some of which read tensors."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))

    def normal(*shape):
        kind = rng.choice([torch.float32, torch.float16])
        return torch.randn(*shape, generator=generator).to(DEVICE, kind)

    cube = Score(cubed, 0.05, derivative=of_cubed)
    table = Score(relative, normal(H, 21), 10, derivative=of_relative)
    return [
        cube, table, softcap(2.0), softcap(30), alibi(normal(H).float().abs()),
        alibi(normal(B, H).abs()), Score(softplus, 3, derivative=of_softplus),
        Score(weighed, normal(B, H, 6, T_k), derivative=of_weighed),
        softcap(1.5).then(table), cube.then(softcap(3.0)).then(alibi(normal(H).abs())),
        Score(fading, 1, derivative=of_fading),
    ]  # fmt: skip
