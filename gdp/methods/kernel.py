"""How the methods' kernels are compiled: as the simulator's."""

from gdp.sim.kernel import BARE, ENTRY, INLINE, INNER, INNER_INLINE

__all__ = ["BARE", "ENTRY", "INLINE", "INNER", "INNER_INLINE"]
