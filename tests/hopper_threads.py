"""Kernels for compute capability 9.0 with their roles as threads, in place of their own
in a test; roles.py runs them.
"""

from types import SimpleNamespace

import roles
import torch

from flashlib.kernels import (
    gluon_backward,
    gluon_bias,
    gluon_forward,
    gluon_fused,
    gluon_keep,
    gluon_keys,
    gluon_lists,
    gluon_order,
    gluon_scores,
    gluon_tasks,
    hopper,
    hopper_backward,
)

SHARED = gluon_bias, gluon_scores
FORWARD_MODULES = *SHARED, gluon_lists, gluon_forward, gluon_keep, gluon_tasks, hopper
BACKWARD_MODULES = *SHARED, gluon_backward, gluon_keys, gluon_order, gluon_fused
BACKWARD_MODULES += (hopper_backward,)


def threads(name, module, functions, modules, monkeypatch):
    """The kernel of a module as threads, on a GPU of two multiprocessors."""
    names = {key: x for module in modules for key, x in vars(module).items()}
    kernel = roles.Threads(name, functions, names)
    kernel.arg_names = getattr(module, name).arg_names
    monkeypatch.setattr(module, name, kernel)
    few = SimpleNamespace(multi_processor_count=2, L2_cache_size=2**26)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: few)
