"""``python -m benchmarks NAME``: measure, print a table, write JSON, and plot."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from . import distributed, memory, overhead, record, scaling

BENCHMARKS = {
    "overhead": overhead,
    "memory": memory,
    "scaling": scaling,
    "distributed": distributed,
}


def main() -> int:
    """Run one benchmark."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=BENCHMARKS)
    parser.add_argument("--quick", action="store_true", help="only to see that it works")
    parser.add_argument("--output", type=Path, default=Path("results"), help="a folder")
    parser.add_argument("--compare", type=Path, metavar="JSON", help="a saved run of the same name")
    options = parser.parse_args()
    saved = None
    if options.compare is not None:
        try:
            saved = record.load(options.compare, options.name)
        except (OSError, ValueError) as error:
            parser.error(f"--compare: {error}")
    options.output.mkdir(parents=True, exist_ok=True)

    benchmark = BENCHMARKS[options.name]
    run = record.of(options.name, benchmark.run(quick=options.quick), options.quick)
    path = record.save(run, options.output)
    rows = benchmark.table(run["records"])
    print(record.as_text(rows))
    if saved is not None:
        print(f"\ndivided by {options.compare} (MXNet {saved['versions']['mxnet']}):\n")
        print(record.as_text(record.divide(rows, benchmark.table(saved["records"]))))
    picture = path.with_suffix(".png")
    benchmark.plot(run["records"]).savefig(picture, dpi=120)
    print(f"\nwrote {path} and {picture}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
