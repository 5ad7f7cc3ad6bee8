"""Compiled programs kept between processes, so that only the first run of all compiles."""

from gdp.files.kept import cache_folder


def use_cache() -> None:
    """Let XLA keep its programs in the cache folder, unless the user has chosen another one."""
    import jax

    if getattr(jax.config, "jax_compilation_cache_dir", None) is not None:
        return
    try:
        folder = cache_folder() / "xla"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return  # a home that is read-only, or none at all, costs time, not the answer
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
