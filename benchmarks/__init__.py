"""What the book's records are measured with: ``python -m benchmarks`` on a CUDA GPU.

passes.py    the shapes, the methods and how each result is judged
speed.py     times and memory of the passes forward, steps, backward, hopper, masks,
             fa3
fa3.py       FA-3 as a contender, where its library is
fa4.py       FA-4 as a contender, where its package is
decoding.py  times of one step of decoding
eight_bits.py attention in eight bits and its error, next to bfloat16
scores.py    masks, changed scores and sinks, next to FlexAttention
latent.py    times of latent attention, expanded and absorbed
host.py      what a call costs the host, eager calls next to CUDA graphs, training
ring.py      one sequence on several GPUs, started by torchrun
traffic.py   bytes through HBM, counted by Nsight Compute
ablations.py what one change does to a kernel, with everything else as it was
last_step.py the changes from `overlapped` to `persistent`, for ablations.py
traces.py    when each role of a Hopper kernel waits
probes.py    what the tensor cores keep of a sum, found with crafted inputs
tensor_cores.py one product on the tensor cores, for probes.py
runs.py      how a record is measured task by task, and continued by a later run
timing.py    how one call is timed, and the parts that every record has
"""
