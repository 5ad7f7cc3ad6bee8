"""What MkDocs writes from the code: the command line, file schemas, and pages of the repository."""

import json
from pathlib import Path
from typing import Any

import msgspec
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

TOP = Path(__file__).resolve().parent.parent
PAGES = {"architecture.md": "ARCHITECTURE.md", "changelog.md": "CHANGELOG.md"}


def formats() -> dict[str, type[msgspec.Struct]]:
    """The structs that gdp decodes files with, by the name of the format."""
    from gdp import constraints, placement
    from gdp.cluster.file import ClusterEntry
    from gdp.costs import profile
    from gdp.exporters.onnxruntime import Manifest
    from gdp.graph import file as graph_file

    return {
        "placement": placement._File,
        "cluster": ClusterEntry,
        "constraints": constraints._File,
        "graph": graph_file._File,
        "profile": profile._File,
        "onnxruntime-manifest": Manifest,
    }


def schema(name: str) -> dict[str, Any]:
    """The JSON Schema of a format; TOML files have the same shape."""
    return {"title": name} | msgspec.json.schema(formats()[name])


def on_startup(command: str, dirty: bool) -> None:
    """Give the command line all of its verbs before its page is made."""
    del command, dirty
    from gdp.cli import costs, learn
    from gdp.cli.main import cli

    costs.register(cli)
    learn.register(cli)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages and schemas."""
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(TOP / source).read_text()))
    for name in formats():
        text = json.dumps(schema(name), indent=2) + "\n"
        files.append(File.generated(config, f"reference/schemas/{name}.json", content=text))
    return files
