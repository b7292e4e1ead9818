"""The reference pages that are made from the code name all that the code has.

What must be there is found another way than the pages find it: options from the
parsers themselves, public names by importing the modules.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
import shutil
import tomllib
from typing import TYPE_CHECKING

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config
from pages import DOCS, in_code_type
from sources import ROOT
from test_owners import GIVEN

import kvtier
import kvtier.plugin_api
from kvtier.core import metrics
from kvtier.errors import ConfigError
from kvtier.plugin_api.backend import BackendContext, Namespace
from kvtier.plugin_api.option_fields import options_of
from kvtier.plugin_api.options import INTEGER_MAX
from kvtier.settings.extra_config import read_settings
from kvtier.settings.plugins import BACKENDS, backend_class
from kvtier.settings.runtime_config import RuntimeConfig, TierConfig
from kvtier.tools.cli.main import COMMANDS, make_app
from tests.support.docs_scripts import docs_script

if TYPE_CHECKING:
    from types import ModuleType

TIERS = DOCS / "reference/tiers"
PUBLIC = [
    "kvtier",
    "kvtier.testing",
    *(
        f"kvtier.plugin_api.{each.name}"
        for each in pkgutil.iter_modules(kvtier.plugin_api.__path__)
    ),
]


@pytest.fixture(scope="module")
def command_line() -> str:
    """Return the page as mkdocs hands it on."""
    marked = (DOCS / "reference/command-line.md").read_text()
    text: str = docs_script("write_command_line").on_page_markdown(marked)
    assert "<!--" not in text
    return text


@pytest.fixture(scope="module")
def python_api(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the page as mkdocs builds it, without the others."""
    docs, site = (tmp_path_factory.mktemp(each) for each in ("docs", "site"))
    shutil.copy(DOCS / "reference/python-api.md", docs)
    project = str(ROOT / "mkdocs.yml")
    build(load_config(project, docs_dir=str(docs), site_dir=str(site), nav=None, hooks=[]))
    return (site / "python-api.html").read_text()


def section(page: str, title: str) -> str:
    """Return what stands under a heading, up to the next heading of any level."""
    found = re.search(
        rf"^#+ {re.escape(title)}(?: \{{.*\}})?\n(.*?)(?=^#+ |\Z)", page, re.MULTILINE | re.DOTALL
    )
    assert found, f"no heading {title}"
    return found[1]


def test_every_command_and_option_is_on_its_page(command_line: str) -> None:
    for chain in [*((name,) for name in COMMANDS if name != "bench"), ("bench", "tier")]:
        text = section(command_line, f"kvtier {' '.join(chain)}")
        command = make_app()
        for name in chain:
            command = command[name]
        for argument in command.assemble_argument_collection():
            row = re.search(rf"^\* `{argument.name}[ `,].*?: (.+)$", text, re.MULTILINE)
            assert row, f"{chain}: no row for {argument.name}"
            assert len(row[1].split()) > 1, f"{chain} {argument.name}: says too little"
        ours = text.replace("--no-enable-prefix-caching", "")  # vLLM's own flag
        assert not re.search("--(no|empty)-", ours), "a flag needs no opposite"


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_on_its_page(name: str, python_api: str) -> None:
    assert entry(python_api, name)
    module = importlib.import_module(name)
    for public in getattr(module, "__all__", None) or defined_in(module):
        text = entry(python_api, f"{name}.{public}")
        thing = getattr(module, public)
        if inspect.isclass(thing) and thing.__module__.startswith("kvtier"):
            missing = [one for one in members(thing) if not re.search(rf">{one}\b", text)]
            assert not missing, f"{name}.{public}: {missing} not on the page"


def entry(page: str, path: str) -> str:
    """Return what stands under the heading of a module or of a name in it, up to the next one."""
    _, found, below = page.partition(f' id="{path}" class="doc doc-heading">')
    assert found, f"{path} is not on the page"
    return re.split(r"<h[23]\b|</article>", below)[0]


def defined_in(module: ModuleType) -> list[str]:
    """Return the names that a module defines itself, or assigns, and does not hide."""
    own = []
    for name, thing in vars(module).items():
        if name.startswith("_") or inspect.ismodule(thing):
            continue
        is_made_here = getattr(thing, "__module__", None) == module.__name__
        if is_made_here and (inspect.isclass(thing) or inspect.isfunction(thing)):
            own.append(name)
    return own


def members(thing: type) -> list[str]:
    """Return the methods, properties and fields that a class itself has for others."""
    return [
        name
        for name in {**vars(thing), **inspect.get_annotations(thing)}
        if not name.startswith("_")
    ]


def test_the_python_api_is_what_third_parties_may_import_and_no_more() -> None:
    """A module of another folder on the page would be a promise that the folders do not make."""
    page = (DOCS / "reference" / "python-api.md").read_text()
    assert sorted(re.findall(r"^::: (.*)$", page, re.MULTILINE)) == sorted(PUBLIC)


def test_every_public_name_says_what_it_is(python_api: str) -> None:
    """An entry of the page without a text would only repeat the name."""
    paths = re.findall(r'<h[23] id="(kvtier[\w.]*)"', python_api)
    assert len(paths) > len(PUBLIC)
    docstrings = {path: re.split("<table>|<h4", entry(python_api, path))[0] for path in paths}
    assert not [path for path, text in docstrings.items() if "<p>" not in text]


CONFIGURATION = DOCS / "reference/configuration.md"
SOUND: dict[str, dict[str, object]] = {
    "fs": {"root_dir": "/kv"},
    "disk": {"path": "/kv", "capacity_bytes": 1 << 30},
    "memory": {"capacity_bytes": 1 << 20},
}


def refusal(kind: str | None, **given: object) -> str:
    """Return what is said of an option of a type of tier, or of the runtime (None)."""
    try:
        if kind is None:
            read_settings(given, slot_count=8, block_bytes=4096)
        else:
            tier = TierConfig.from_mapping(1, {"type": kind, **SOUND[kind], **given})
            context = BackendContext(4096, Namespace({}), tier.name)
            backend_class(kind).check_options(tier.options, context)
    except ConfigError as refused:
        return str(refused)
    return ""  # it may have this value


def row_of(kind: str | None, key: str) -> str:
    """Return the row of an option, in the table of its type of tier or in a common one."""
    heads = ("vLLM's keys", "kvtier's keys") if kind is None else ("Every tier",)
    parts = CONFIGURATION.read_text().split("\n## ")
    own = [] if kind is None else [(TIERS / f"{kind}.md").read_text()]
    for text in [*own, *(part for part in parts if part.startswith(heads))]:
        row = re.search(rf"^\| \[?`{key}`.*$", text, re.MULTILINE)
        if row is not None:
            return row[0]
    raise AssertionError(f"no row for {key} of {kind}")


@pytest.mark.parametrize("kind", [None, *SOUND])
def test_every_option_has_a_row_with_its_bounds(kind: str | None) -> None:
    """The keys and the bounds are those that refusals name."""
    known = refusal(kind, no_such_key=1).partition("Known keys: ")[2].rstrip(".").split(", ")
    common = ["type", "isolation", "on_unusable", "start_timeout_s"] if kind else []
    for key in [*known, *common]:
        row = row_of(kind, key)
        assert len(row.rpartition(" | ")[2].split()) > 1, f"{key}: no meaning"
        for value in (-1, 10**30, "no such word"):
            said = refusal(kind, **{key: value})
            for bound in re.findall(r"(?:at least|above|at most) (\d[\d.e+]*)", said):
                is_told_once = bound.rstrip(".") in {"1e+06", str(INTEGER_MAX)}
                assert is_told_once or re.search(rf"\b{bound.rstrip('.')}\b", row), said
            for words in re.findall(r"must be one of (.*)\.", said):
                assert all(f'"{word}"' in row for word in words.split(", ")), said


def test_the_tables_of_options_are_those_that_the_code_makes() -> None:
    maker = docs_script("write_reference")
    for page in maker.PAGES.rglob("*.md"):
        text = page.read_text()
        assert maker.made(text) == text, f"{page} is stale: run python docs/write_reference.py"


def test_each_promise_is_proven_in_one_layer_and_its_page_says_where() -> None:
    maker = docs_script("write_promises")
    page = maker.PAGE.read_text()
    promised = re.findall(
        r"^\| (\d+) \|", page.partition("## Which test shows it")[0], re.MULTILINE
    )
    proofs = maker.proofs()
    assert sorted(proofs) == [int(each) for each in promised]
    assert not {number: [*layers] for number, layers in proofs.items() if len(layers) > 1}
    assert maker.made(page) == page, "it is stale: run python docs/write_promises.py"


def test_each_proof_in_the_model_is_asked_for() -> None:
    """An invariant always is; nobody would miss the call of another check."""
    model = "".join(path.read_text() for path in ROOT.glob("tests/model/*.py"))
    called = re.findall(r"(?<!@invariant\(\)\n)^ *def (p\d+_\w+)", model, re.MULTILINE)
    assert called
    assert not [name for name in called if model.count(f"{name}(") < 2]


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


COUNTED = re.compile(r"""\.(?:add|report)\(\s*(?:"(?:load|store)", )?"(\w+_\w+)\"""")
SENT_BY_COMMANDS = {"requests_list"}


@pytest.mark.parametrize("kind", ["disk", "fs", "mooncake", "redis", "s3"])
def test_what_a_backend_counts_is_declared_as_a_metric(kind: str) -> None:
    """What is not, is exported nowhere."""
    folder = ROOT / "backends/kvtier_backends" / kind
    counted = set(COUNTED.findall("".join(path.read_text() for path in folder.rglob("*.py"))))
    assert len(counted) >= 5
    assert counted - SENT_BY_COMMANDS <= backend_class(kind).metrics.keys()


NO_METRICS = {
    "theirs",
    "x_total",
    "vllm_jobs",
    "vllm_unknown_jobs",
    "vllm_blocks_not_trusted",
}  # not here


def test_every_metric_that_is_named_anywhere_is_there() -> None:
    """A test waited two minutes for one that had another name, and pages kept old names."""
    defined = {**metrics.primary_definitions(), **metrics.tier_definitions()}
    for kind in PROJECT["entry-points"][BACKENDS]:
        if kind != "vllm":  # not where there is no vLLM
            defined |= metrics.backend_definitions(kind, backend_class(kind).metrics)
    files = [
        *ROOT.glob("*.md"),
        *(path for path in DOCS.rglob("*.md")),
        *(path for part in ("kvtier", "stress", "tests") for path in (ROOT / part).rglob("*.py")),
    ]
    named = {
        (match[1], path.name)
        for path in files
        for match in re.finditer(r"kvtier:([a-z_]+[a-z])(?![a-z_])", path.read_text())
        if not match[1].startswith("shelf_")
    }
    known = {name.removeprefix(metrics.PREFIX) for name in defined}
    unknown = {
        (name, where)
        for name, where in named
        if re.sub("_(total|bucket|sum|count)$", "", name) not in known
        if name not in NO_METRICS
    }
    assert not unknown


@pytest.mark.parametrize("kind", PROJECT["entry-points"][BACKENDS])
def test_every_type_of_tier_has_a_page_with_its_options_that_readers_find(kind: str) -> None:
    page = (TIERS / f"{kind}.md").read_text()
    assert "<!-- made by docs/write_reference.py: kvtier" in page
    assert f"](../reference/tiers/{kind}.md)" in (DOCS / "how-to/choose-a-tier.md").read_text()


MAY_NAME_ALL = {
    "CHANGELOG.md",
    "docs/how-to/choose-a-tier.md",  # compares them
    "kvtier/tools/bench/tier.py",  # the clients that it measures beside: another tier needs none
    "mkdocs.yml",
    "pyproject.toml",
    "README.md",  # what to begin with
}


def test_no_other_list_has_all_backends() -> None:
    """A list of all would need a line for the next one. What is listed is found by entry points."""
    kinds = {kind for kind in PROJECT["entry-points"][BACKENDS] if kind not in {"memory", "vllm"}}
    pages = [*ROOT.glob("*.*"), *DOCS.rglob("*.*"), *ROOT.glob("kvtier/**/*.py")]
    names_all = {
        page.relative_to(ROOT).as_posix()
        for page in pages
        if page.suffix in {".md", ".py", ".toml", ".yml"}
        if kinds <= set(re.findall(r"\b(\w+)[`\"]", page.read_text()))
    }
    assert names_all <= MAY_NAME_ALL


DATA = {"extra_config", "identifier", "kv_transfer_params", "mm_features"}
"""What kvtier replaces of vLLM's that is no function."""


def test_every_function_of_vllms_that_kvtier_wraps_is_on_its_page() -> None:
    """Operators who suspect one of the two look there; methods had been added without a line."""
    written = {key.rpartition(".")[2] for key in GIVEN if key.startswith("kvtier.vllm.")}
    wrapped = {name for name in written - DATA if not name.startswith("kvtier_")}
    text = section((DOCS / "reference/vllm-releases.md").read_text(), "What kvtier relies on")
    rows = text.partition("| wrapped |")[2].partition("\n\n")[0].splitlines()
    on_page = [name for row in rows for name in in_code_type(row.split("|")[1])]
    assert sorted(wrapped) == sorted(name.rpartition(".")[2] for name in on_page)


@pytest.mark.parametrize("kind", [RuntimeConfig, TierConfig])
def test_every_field_of_a_configuration_is_an_option(kind: type) -> None:
    """All others are made from something else."""
    made_of = {"slot_count", "block_bytes", "tiers", "options", "admission_options"}
    made_of |= {"may_be_request_scoped"}
    fields = {field.name for field in dataclasses.fields(kind)}
    assert fields - made_of == set(options_of(kind))


def test_long_names_may_break_at_their_joints_and_short_ones_and_code_blocks_stay() -> None:
    """Browsers broke keys in the midst of a word, in tables and in text."""
    fit = docs_script("fit_names").on_page_content
    long = "kvtier:tier_promotions_dropped"
    assert fit(f"<td><code>{long}</code></td>") == (
        '<td><code class="long">kvtier:<wbr>tier_<wbr>promotions_<wbr>dropped</code></td>'
    )
    short, block = "<p><code>--block-bytes SIZE</code></p>", f"<pre><code>{long}</code></pre>"
    for kept in (short, block, f'<code><a href="#{long}">link</a></code>'):
        assert fit(kept) == kept
