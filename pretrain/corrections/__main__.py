"""`python -m pretrain.corrections`; see `pretrain.corrections.ship`."""

from pretrain.corrections.ship import main

main()
