"""Where the process of a rank of test_ring.py begins."""

import os


def start(environment, *arguments):
    """Run ring_worker, which imports Triton, in an environment."""
    os.environ.update(environment)
    import ring_worker

    ring_worker.main(*arguments)
