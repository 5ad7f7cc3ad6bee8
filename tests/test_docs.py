"""What the documentation says exists; `.ci/run` builds the pages themselves."""

import re
import runpy
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

TOP = Path(__file__).resolve().parent.parent
PAGES = sorted([TOP / "README.md", TOP / "CONTRIBUTING.md", *(TOP / "docs").rglob("*.md")])
# Made from the repository when the pages are built.
GENERATED = {
    TOP / "docs" / f"{name}.md"
    for name in ("architecture", "changelog", "contributing", "security", "reference/devices")
}
SCHEMAS = runpy.run_path(str(TOP / "docs" / "schemas.py"))


def named(page: Path) -> str:
    return str(page.relative_to(TOP))


def test_the_readme_is_one_page_with_the_two_commands_that_are_tried() -> None:
    lines = (TOP / "README.md").read_text().splitlines()
    assert len(lines) <= 150
    assert len([x for x in lines if re.match(r"    python3 -m venv \.venv && ", x)]) == 2


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_and_figures_of_a_page_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if target.startswith("http"):
            continue
        assert (page.parent / target).exists(), f"{page}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_programs_and_files_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text()
    for module in re.findall(r"-m ((?:benchmarks|pretrain)\.\w+)", text):
        path = TOP / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or path.is_dir(), f"{page}: {module}"
    for path in re.findall(r"(?:benchmarks|pretrain|finetune|examples)/[\w/]+\.(?:py|toml)", text):
        assert (TOP / path).exists(), f"{page}: {path}"


def test_the_pages_list_every_export_format_and_planning_target() -> None:
    from gdp.targets.table import EXPORTERS, PLANNERS

    readme = (TOP / "README.md").read_text()
    cell = re.search(r"^\| runtime \|.*\| (.*) \|$", readme, re.MULTILINE)
    assert cell is not None
    assert sorted(cell[1].split(", ")) == sorted(row.title for row in EXPORTERS.values())
    assert set(re.findall(r"`--for ([\w-]+)`", readme)) == set(PLANNERS)
    formats = (TOP / "docs" / "reference" / "files.md").read_text().split("## Exports")[1]
    listed = re.findall(r"^\| `([\w-]+)` \|", formats.split("\n## ")[0], re.MULTILINE)
    assert sorted(listed) == sorted(EXPORTERS)


def test_every_page_is_in_the_table_of_contents() -> None:
    listed = set(re.findall(r"[\w/-]+\.md", (TOP / "mkdocs.yml").read_text()))
    assert listed == {
        str(page.relative_to(TOP / "docs"))
        for page in [*PAGES, *GENERATED]
        if page.is_relative_to(TOP / "docs")
    }


def test_figures_are_whole_and_fetch_nothing() -> None:
    figures = sorted((TOP / "docs" / "figures").glob("*.svg"))
    assert figures
    for figure in figures:
        text = figure.read_text()
        ElementTree.fromstring(text)
        assert "href" not in text


@pytest.mark.parametrize("name", SCHEMAS["formats"]())
def test_a_schema_of_every_format_is_an_object_that_takes_no_unknown_key(name: str) -> None:
    made = SCHEMAS["schema"](name)
    entry = made["$defs"][made["$ref"].rpartition("/")[2]]
    assert entry["type"] == "object"
    assert name == "onnxruntime-manifest" or entry["additionalProperties"] is False


def test_the_placement_and_the_rules_that_pages_show_are_read() -> None:
    kinds = SCHEMAS["formats"]()
    shown = (TOP / "docs" / "reference" / "files.md").read_text()
    msgspec.json.decode(shown.split("```json\n")[1].split("```")[0], type=kinds["placement"])
    shown = (TOP / "docs" / "how-to" / "constraints.md").read_text()
    rules = shown.split("```toml\n")[1].split("```")[0]
    assert msgspec.toml.decode(rules, type=kinds["constraints"]).pin[0].match == "encoder/*"


def test_the_cluster_that_a_page_shows_is_read(tmp_path: Path) -> None:
    import gdp

    shown = (TOP / "docs" / "how-to" / "unequal-gpus.md").read_text()
    text = shown.split("```toml\n")[1].split("```")[0]
    (tmp_path / "box.toml").write_text(text)
    box = gdp.Cluster.load(tmp_path / "box.toml")
    assert box.device_names == ("cpu", "big", "small")
    assert (
        box.devices[2].speed("float16") == tomllib.loads(text)["device"][2]["flop_per_s"]["float16"]
    )
