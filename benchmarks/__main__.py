"""Measure something, print its tables and save a record; or write all tables from saved records."""

from __future__ import annotations

import argparse
import sys
from importlib.metadata import version
from pathlib import Path

from . import convergence, costs, curvature, documents, flights, memory, pays, record

MODULES = (flights, curvature, convergence, costs, memory, pays)
BENCHMARKS = {module.__name__.partition(".")[2]: module for module in MODULES}


def main() -> int:
    """Run one benchmark, or write the documents."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add = parser.add_argument
    add("name", choices=[*BENCHMARKS, "tables"])
    add("--quick", action="store_true", help="only to see that it works")
    add("--output", type=Path, default=Path("results"), help="the folder of the records")
    text = "flights, curvature: some problems, whose records replace those in the file"
    add("--only", nargs="+", metavar="PROBLEM", help=text)
    text = "costs: a folder with another version of gluon_svrg, as well"
    add("--baseline", type=Path, help=text)
    options = parser.parse_args()
    if options.name == "tables":
        for path in documents.write(options.output, BENCHMARKS):
            print(f"wrote {path}")
        return 0

    benchmark = BENCHMARKS[options.name]
    settings: dict = {"baseline": options.baseline} if benchmark is costs else {}
    settings.update({"only": options.only} if options.only else {})
    options.output.mkdir(parents=True, exist_ok=True)
    records = benchmark.run(options.quick, **settings)
    path = record.save(options.name, records, options.quick, options.output, options.only)
    for name, text in benchmark.tables({version("mxnet"): records}).items():
        print(f"{name}:\n\n{text}\n")
    print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
