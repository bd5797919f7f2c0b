"""What each step means: plain PyTorch that runs in float64, one module a step, no
cleverness.
"""
