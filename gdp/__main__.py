"""`python -m gdp` is the `gdp` program."""

from gdp.cli import main

main()
