"""Serving benchmark for diffusion models: the same program as `triptych bench serve`, same flags."""

import sys

from triptych.cli.bench import bench_app

if __name__ == "__main__":
    bench_app(["serve", *sys.argv[1:]], prog_name="triptych bench")
