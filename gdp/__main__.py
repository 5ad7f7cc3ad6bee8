"""`python -m gdp` is the `gdp` program."""

from gdp.cli.main import main

main()
