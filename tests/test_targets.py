"""What commands write never destroys what gdp did not write, nor what they read."""

import gzip
import json
import os
import stat
import threading
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from gdp import cli_costs, cli_learn
from gdp.cli import cli
from gdp.files import write_atomic
from gdp.graph_file import save_graph
from gdp.targets import TargetError
from test_cli import branches, TOY

cli_costs.register(cli)
cli_learn.register(cli)
FOREIGN = "years of work"


def gdp(*arguments: object) -> Result:
    return CliRunner().invoke(cli, [str(argument) for argument in arguments])


def refused(*arguments: object, match: str) -> None:
    found = gdp(*arguments)
    assert isinstance(found.exception, TargetError), (found.output, found.exception)
    message = str(found.exception)
    assert match in message, message
    assert "\n" not in message
