"""Do two threads of Python launch PyTorch's kernels faster than one?

    python -m benchmarks.launch_threads [--calls 1000] [--repeat 7]

Needs the extra `torch` and two idle cores. Blocks of a decoder with one token of 64 numbers, whose
arithmetic takes next to nothing: the time of a call is the interpreter's and the dispatcher's, what
comes before a kernel of a GPU is launched. Each thread has a block of its own and calls it as often
as one thread does; wall-clock seconds of a call, all calls counted, for one thread and for several
in turn in one process. Were launches concurrent, two threads would take half of one's seconds.
"""

import threading
import time
from statistics import median
from typing import Any

import click

WIDTH = 64


def block(torch: Any) -> Any:
    """A block of a decoder, attention and a gated MLP: 14 ops and four views."""
    linear = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(7)]
    query, key, value, out, gate, up, down = linear
    norms = [torch.nn.LayerNorm(WIDTH) for _ in range(2)]
    attend = torch.nn.functional.scaled_dot_product_attention

    def call(x: Any) -> Any:
        h = norms[0](x)
        x = x + out(attend(query(h)[None], key(h)[None], value(h)[None])[0])
        h = norms[1](x)
        return x + down(torch.nn.functional.silu(gate(h)) * up(h))

    return call


def seconds_a_call(torch: Any, blocks: list[Any], calls: int) -> float:
    """Wall-clock seconds over all calls, a thread for each block."""

    def work(call: Any) -> None:
        x = torch.zeros(1, WIDTH)
        with torch.inference_mode():
            for _ in range(calls):
                call(x)

    threads = [threading.Thread(target=work, args=(call,)) for call in blocks]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return (time.perf_counter() - begin) / (calls * len(blocks))


@click.command(help=__doc__)
@click.option("--calls", default=1000, show_default=True)
@click.option("--repeat", default=7, show_default=True)
def main(calls: int, repeat: int) -> None:
    import torch

    torch.set_num_threads(1)
    blocks = [block(torch) for _ in range(4)]
    rows: dict[int, list[float]] = {1: [], 2: [], 4: []}
    seconds_a_call(torch, blocks[:1], calls)
    for _ in range(repeat):
        for count, row in rows.items():
            row.append(seconds_a_call(torch, blocks[:count], calls))
    for count, row in rows.items():
        ratios = [many / one for many, one in zip(row, rows[1], strict=True)]
        click.echo(
            f"{count} threads: {median(row) * 1e6:.0f} us a call, {median(ratios):.2f} times one "
            f"thread's ({repeat} rounds: {min(ratios):.2f} to {max(ratios):.2f})"
        )


if __name__ == "__main__":
    main()
