"""Beartype as the tests use it: an int is a float, as PEP 484 says."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
