"""The longest paths behind HEFT's priorities, over `Arrays`."""

from typing import no_type_check

import numba

from gdp.kernels.options import BARE
from gdp.kernels.struct import as_struct
from gdp.problem.arrays import Arrays

as_struct(Arrays)


@numba.njit(**BARE)
@no_type_check
def fill_upward_ranks(a, mean_compute_s, mean_send_s, rank):
    """rank(i) = mean_compute(i) + max over tensors t of i and readers j of (send(t) + rank(j))."""
    num_ops = mean_compute_s.shape[0]
    for i in range(num_ops - 1, -1, -1):
        longest = 0.0
        for x in range(a.out_start[i], a.out_start[i + 1]):
            t = a.out_tensor[x]
            for y in range(a.use_start[t], a.use_start[t + 1]):
                longest = max(longest, mean_send_s[t] + rank[a.use_op[y]])
        rank[i] = mean_compute_s[i] + longest
