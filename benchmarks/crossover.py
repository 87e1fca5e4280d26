"""From how many rows on a dense product with a weight dequantized for it beats the kernel for codes.

    OMP_NUM_THREADS=1 python benchmarks/crossover.py

The table `DENSE_FROM` of `llmq/backends/gpu/linear.py` holds the outcome. CPU time of one thread, median of
rounds in which both sides take turns. Dated outputs lie beside this script.
"""

import platform
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from llmq.backends.gpu import linear
from llmq.config import SCHEMES
from llmq.quant import quantize

ROWS = (8, 16, 32, 64, 96, 128, 192, 256, 512)
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536), (8192, 2048))
ROUNDS = 7

#: Rows from which a side is chosen, for each side.
SIDES = {"kernel": 1 << 30, "dense": 1}


def main() -> None:
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}, {platform.processor()}")
    print(f"{'':28}" + "".join(f"{rows:>8}" for rows in ROWS))
    schemes = {4: SCHEMES["int4_blockwise"].model_copy(update={"group_size": 64}), 8: SCHEMES["int8_per_channel"]}
    for num_bits, scheme in schemes.items():
        for shape in SHAPES:
            weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
            layer = linear.make_linear(quantize(weight, scheme), None, torch.device("cpu"), torch.bfloat16)
            ratios = "".join(f"{kernel_over_dense(layer, shape[1], rows):8.2f}" for rows in ROWS)
            print(f"int{num_bits} {shape[0]:>5} x {shape[1]:<5} kernel/dense {ratios}", flush=True)


@torch.inference_mode()
def kernel_over_dense(layer: linear.Linear, num_features: int, rows: int) -> float:
    x = torch.randn(rows, num_features).to(torch.bfloat16)
    times: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(ROUNDS):
        for side, least in SIDES.items():
            layer.dense_from = least
            times[side].append(seconds(lambda: layer(x, rows)))
    return statistics.median(times["kernel"]) / statistics.median(times["dense"])


def seconds(call: Callable[[], object]) -> float:
    call()
    start, count = time.process_time(), 0
    while time.process_time() - start < 0.02:
        call()
        count += 1
    return (time.process_time() - start) / count


if __name__ == "__main__":
    main()
