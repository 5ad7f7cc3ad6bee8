"""Print the lowest version that pyproject.toml allows of every dependency, as pip's constraints.

Bounds name versions that exist. The tools of `dev` and `docs` are left as pip finds them.
"""

import re
import tomllib
from itertools import chain
from pathlib import Path

pyproject = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
project = pyproject["project"]
extras = [wanted for name, wanted in project["optional-dependencies"].items()
          if name not in ("dev", "docs")]  # fmt: skip
groups = (pyproject["build-system"]["requires"], project["dependencies"], *extras)
bounds = (re.match(r"([\w.-]+)>=([\w.]+)", wanted) for wanted in chain(*groups))
for line in sorted({"==".join(found.groups()) for found in bounds if found}):
    print(line)
