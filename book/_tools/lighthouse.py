"""Measure pages of the built book with Lighthouse, as a phone and as a computer.

    python book/_tools/lighthouse.py _build/html book/index book/online book/errata

The median performance of three runs on simulated networks, with compressed files; the
other marks must be 100. Simulation scales what this machine took, so other work on it
lowers the performance: the load is printed with the table.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

from serve import start

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "_build/node/node_modules/.bin/lighthouse"
RUNS = 3
OTHERS = ("accessibility", "best-practices", "seo")
MODES = {"mobile": [], "desktop": ["--preset=desktop"]}
BARS = {"book/index": (85, 98)}  # the least performance, mobile and desktop
BAR = (75, 95)


def measure(url, options):
    """{category: mark from 0 to 100} of one run, and what it lacks of 100."""
    flags = "--headless=new" + (" --no-sandbox" if os.geteuid() == 0 else "")
    command = [PROGRAM, url, *options, "--quiet", "--output=json"]
    command += [f"--chrome-flags={flags}"]
    env = {**os.environ, "CHROME_PATH": shutil.which("chromium") or ""}
    run = subprocess.run(command, env=env, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"lighthouse failed on {url}: {run.stderr[-500:]}")
    report = json.loads(run.stdout)
    marks, lacks = {}, set()
    for name, category in report["categories"].items():
        marks[name] = round(100 * (category["score"] or 0))
        for item in category["auditRefs"] if name in OTHERS else []:
            audit = report["audits"][item["id"]]
            if item["weight"] and audit["score"] is not None and audit["score"] < 1:
                lacks.add(f"{name}: {audit['title']}")
    return marks, lacks


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("site", type=Path)
    parser.add_argument("pages", nargs="+")
    arguments = parser.parse_args()
    server = start(arguments.site)
    missed = []
    print(f"{'page':24} {'mode':8} performance  {'  '.join(OTHERS)}")
    for page in arguments.pages:
        url = f"http://localhost:{server.server_port}/{page}.html"
        for bar, (mode, options) in zip(
            BARS.get(page, BAR), MODES.items(), strict=True
        ):
            runs = [measure(url, options) for _ in range(RUNS)]
            speed = statistics.median(marks["performance"] for marks, _ in runs)
            others = {name: min(marks[name] for marks, _ in runs) for name in OTHERS}
            row = "  ".join(f"{others[name]:{len(name)}}" for name in OTHERS)
            print(f"{page:24} {mode:8} {speed:5} ({bar:2})   {row}", flush=True)
            lacks = sorted(set().union(*(lacks for _, lacks in runs)))
            missed += [f"{page}, {mode}: {lack}" for lack in lacks]
            if speed < bar:
                missed.append(f"{page}, {mode}: performance {speed}, expected {bar}")
    server.shutdown()
    print(f"load of this machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print("\n".join(missed))
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
