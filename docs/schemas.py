"""JSON Schemas of the files that gdp reads, made from the types that it decodes them with."""

from typing import Any

import msgspec


def formats() -> dict[str, type[msgspec.Struct]]:
    """The struct of each format, by its name."""
    from gdp.api.box.models import BoxEntry
    from gdp.cluster.file import ClusterEntry
    from gdp.costs import machine, profile
    from gdp.graph import file as graph_file
    from gdp.placement import constraints, placement
    from gdp.targets.onnxruntime.export import OnnxRuntimeManifest

    return {
        "placement": placement._File,  # noqa: SLF001
        "cluster": ClusterEntry,
        "models": BoxEntry,
        "constraints": constraints._File,  # noqa: SLF001
        "graph": graph_file._File,  # noqa: SLF001
        "machine": machine.MachineRecord,
        "profile": profile._File,  # noqa: SLF001
        "onnxruntime-manifest": OnnxRuntimeManifest,
    }


def schema(name: str) -> dict[str, Any]:
    """The schema of a format; that of a TOML file tells its shape."""
    return {"title": name} | msgspec.json.schema(formats()[name])
