"""What MkDocs adds from the code and the repository: verbs, file schemas, pages kept elsewhere."""

import json
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from schemas import formats, schema

TOP = Path(__file__).resolve().parent.parent
PAGES = {
    "architecture.md": "ARCHITECTURE.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages and schemas."""
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=(TOP / source).read_text()))
    for name in formats():
        text = json.dumps(schema(name), indent=2) + "\n"
        files.append(File.generated(config, f"reference/schemas/{name}.json", content=text))
    return files
