"""What an installation of gdp is made of: the bytes of each distribution that it needs.

python benchmarks/installed_size.py            # the core
python benchmarks/installed_size.py exact docs # with these extras
"""

import re
import sys
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution

from gdp.units import format_bytes
from gdp.version import DISTRIBUTION


def needed(name: str, extras: Iterable[str] = ()) -> dict[str, int]:
    """Bytes on disk by distribution, with all that it needs; those not installed are left out."""
    sizes: dict[str, int] = {}
    waiting: list[tuple[str, tuple[str, ...]]] = [(name, tuple(extras))]
    while waiting:
        one, wanted = waiting.pop()
        key = re.sub(r"[-_.]+", "-", one).lower()
        if key in sizes:
            continue
        try:
            found = distribution(one)
        except PackageNotFoundError:
            continue
        paths = [found.locate_file(file) for file in found.files or ()]
        sizes[key] = sum(path.stat().st_size for path in paths if path.is_file())  # type: ignore[attr-defined]
        for line in found.requires or ():
            requirement, _, marker = line.partition(";")
            extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", marker)
            if extra is None or extra[1] in wanted:
                parsed = re.match(r"\s*([\w.-]+)\s*(?:\[([\w,\s-]+)\])?", requirement)
                if parsed is not None:
                    more = tuple(x.strip() for x in (parsed[2] or "").split(",") if x.strip())
                    waiting.append((parsed[1], more))
    return sizes


def main(extras: list[str]) -> None:
    """Print the table, largest first."""
    sizes = needed(DISTRIBUTION, extras)
    for name, size in sorted(sizes.items(), key=lambda entry: -entry[1]):
        print(f"{name:32s} {format_bytes(size):>12s}")
    print(f"{'all':32s} {format_bytes(sum(sizes.values())):>12s}")


if __name__ == "__main__":
    main(sys.argv[1:])
