"""The few sizes that problems are padded to, so that compilation is rare."""

OP_SIZES = (256, 512, 1024, 2048, 4096, 16384, 65536, 262144, 1048576)
DEVICE_SIZES = (4, 8, 16, 32, 64, 128)


def bucket(count: int, sizes: tuple[int, ...]) -> int:
    """The smallest size that holds `count`; beyond the largest, the next multiple of it.

    >>> bucket(5, (4, 8)), bucket(17, (4, 8))
    (8, 24)
    """
    for size in sizes:
        if count <= size:
            return size
    return -(-count // sizes[-1]) * sizes[-1]
