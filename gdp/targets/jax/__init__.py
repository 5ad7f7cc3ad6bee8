"""JAX: executes placements of traced functions in jitted pieces."""

from gdp.targets.target import Exporter, Runtime, Target


def _devices() -> list[str]:
    import jax

    return [f"{device.platform}:{device.id} ({device.device_kind})" for device in jax.devices()]


def _refusals() -> tuple[type[Exception], ...]:
    import jax

    return (jax.errors.JaxRuntimeError,)


TARGET = Target(
    "jax",
    Runtime("JAX", "jax", "jax", "gdp.targets.jax.run:run_jax", _devices, refusals=_refusals),
    Exporter("JAX", "gdp.targets.jax.export:export", "jax"),
)
