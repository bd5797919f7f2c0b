"""Judge the kernels, time them next to PyTorch's and write the records.

Without a pass: all of them except hbm, which needs ncu and permission to read its
counters. The passes hopper and fa3 time FA-3, where its library is there
(benchmarks/fa3.py), and fa4, latent and scores FA-4 (benchmarks/fa4.py). Records go to
flashlib/records, and the README's figure is drawn anew when the forward or the hopper
record is.
"""

import argparse
import functools
import pathlib
import sys
import time

import torch

from benchmarks import (
    ablations,
    decoding,
    eight_bits,
    fa3,
    fa4,
    host,
    latent,
    passes,
    probes,
    scores,
    speed,
    timing,
    traces,
    traffic,
)
from flashlib import plot, records

ROOT = pathlib.Path(__file__).resolve().parents[1]
RECORDS = ROOT / "flashlib" / "records"
FIGURE = ROOT / "book" / "_static" / "ladder.png"
DRAWN = "forward", "hopper"  # the records in it
# {record: (quick, say) -> (record, lines that say what of ours has failed)}; those that
# can be continued take a path and an end, too: see benchmarks/runs.py.
SPEEDS = {name: functools.partial(speed.run, name) for name in passes.plan()}
PASSES = SPEEDS | {
    "latent": latent.run, "scores": scores.run, "fp8": eight_bits.run,
    "traces": traces.run, "ablations": ablations.run, "host": host.run,
    "decoding": decoding.run, "hbm": traffic.run, "probes": probes.run,
}  # fmt: skip
WHOLE = {"hbm"}  # passes whose record cannot be continued
ON_HOPPER = "hopper", "fp8", "probes", "traces"
RIVALS = {"hopper": fa3, "fa3": fa3, "fa4": fa4}  # without which a pass says less
DEFAULT = [name for name in PASSES if name != "hbm"]


def draw(measured, path):
    """Draw the README's figure, with the newest record's date in the PNG's text.

    Records of another GPU than the newest one's are left out.
    """
    newest = max((record.data for record in measured), key=lambda data: data["date"])
    gpu = newest["gpu"]["name"]
    same = [record for record in measured if record.data["gpu"]["name"] == gpu]
    picture = plot.bars(same, T=8192)
    path.write_bytes(picture.png(ground="white", Record=newest["date"]))


def options(arguments=None):
    """The parsed command line."""
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    names = f"of {', '.join(PASSES)}"
    parser.add_argument(
        "passes", nargs="*", metavar="pass", help=f"{names}; default: all but hbm"
    )
    quick = "few shapes; written only with --output"
    parser.add_argument("--quick", action="store_true", help=quick)
    folder = "folder to write to; default: flashlib/records"
    parser.add_argument("--output", type=pathlib.Path, metavar="DIR", help=folder)
    again = "continue the records of the folder, and begin no shape after that time"
    parser.add_argument("--resume", type=float, metavar="SECONDS", help=again)
    args = parser.parse_args(arguments)
    if unknown := set(args.passes) - PASSES.keys():
        parser.error(f"pass: expected some {names}, got {', '.join(sorted(unknown))}")
    if args.resume is not None and args.output is None:
        parser.error("--resume: expected --output, got none")
    if args.resume is not None and (whole := WHOLE & set(args.passes)):
        names = f"expected passes that can be continued, got {', '.join(whole)}"
        parser.error(f"--resume: {names}")
    if args.output is None and not args.quick:
        args.output = RECORDS
    if args.output is not None and not args.output.is_dir():
        parser.error(f"--output: expected an existing folder, got {args.output}")
    return args


def main(arguments=None):
    args = options(arguments)
    if not torch.cuda.is_available():
        sys.exit("benchmarks: expected a CUDA GPU, found none")
    start, failures, made = time.monotonic(), [], {}

    def say(text):
        print(f"[{time.monotonic() - start:4.0f} s] {text}", flush=True)

    for name in args.passes or DEFAULT:
        if name in ON_HOPPER and torch.cuda.get_device_capability() != (9, 0):
            say(f"{name}: its kernels need compute capability 9.0, left out")
            continue
        if name in RIVALS and (reason := RIVALS[name].missing()):
            say(f"{name}: {RIVALS[name].NAME} is left out: {reason}")
            if name != "hopper":  # which has other contenders
                continue
        more = {}
        if args.resume is not None:
            path = args.output / f"{name}.json"
            more = {"path": path, "end": start + args.resume}
        data, failed = PASSES[name](args.quick, say, **more)
        made[name] = records.Record(name, data)  # raises if a cell is not whole
        failures += [f"{name}: {line}" for line in failed]
        if args.output is not None:
            timing.write(data, args.output / f"{name}.json")
            say(f"wrote {name}.json")
    if made.keys() & set(DRAWN) and args.output == RECORDS:
        draw([made.get(name) or records.load(name) for name in DRAWN], FIGURE)
    if failures:
        sys.exit("benchmarks: these were not timed:\n  " + "\n  ".join(failures))


if __name__ == "__main__":
    main()
