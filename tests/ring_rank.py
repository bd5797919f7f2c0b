"""Where the process of a rank of test_ring.py begins."""


def start(*arguments):
    """Run ring_worker, which imports Triton."""
    import ring_worker

    ring_worker.main(*arguments)
