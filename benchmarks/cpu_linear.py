"""What packed weights gain on a CPU, by shape and number of rows: the measurement behind the rules of `engine/cpu_linear`.

    OMP_NUM_THREADS=1 python -m benchmarks.cpu_linear

Both products run in turns on one thread, over several weights so that the caches are cold; the best CPU time counts.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.nn.functional as F

from benchmarks.report import finish, refuse
from engine import cpu_linear

COLD_BYTES = 100 * 2**20
TOLERANCE = 1e-3


def measure(in_features: int, out_features: int, rows: int) -> tuple[float, float]:
    """Milliseconds of torch's product and of the packed one."""
    generator = torch.Generator().manual_seed(rows)
    num_weights = min(12, max(2, COLD_BYTES // (4 * in_features * out_features)))
    shape = (out_features, in_features)
    weights = [torch.randn(shape, generator=generator) * 0.03 for _ in range(num_weights)]
    packed = [cpu_linear.pack(weight) for weight in weights]
    x = torch.randn(rows, in_features, generator=generator)
    best = [float("inf")] * 2
    for turn in range(min(60, max(4, int(2.5e9 / (in_features * out_features * rows + 1e6))))):
        index = turn % num_weights
        started = time.thread_time()
        plain = F.linear(x, weights[index])
        between = time.thread_time()
        product = cpu_linear.packed_product(x, packed[index], None)
        ended = time.thread_time()
        best = [min(best[0], between - started), min(best[1], ended - between)]
        if not torch.allclose(plain, product, atol=TOLERANCE):
            refuse(f"the products of {rows} rows, {in_features} -> {out_features}, differ")
    return best[0] * 1000, best[1] * 1000


def main() -> None:
    """Print a line a shape and the result line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,128")
    parser.add_argument("--shapes", default="512x512,1024x640,2048x640,640x1536,640x4096,2048x2048,2048x8192,640x65536")
    options = parser.parse_args()
    if not cpu_linear.has_packing():
        refuse("this torch has no packed products")
    torch.set_num_threads(1)
    table: dict[str, dict[int, float]] = {}
    with torch.inference_mode():
        for shape in options.shapes.split(","):
            in_features, out_features = map(int, shape.split("x"))
            table[shape] = {}
            for rows in map(int, options.rows.split(",")):
                plain, packed = measure(in_features, out_features, rows)
                table[shape][rows] = round(plain / packed, 2)
            print(shape, table[shape], flush=True)
    finish(vars(options), {"times_plain": table})


if __name__ == "__main__":
    main()
