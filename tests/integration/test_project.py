"""The project as one gets it: the wheel, the pins, the declared dependencies, the documents."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
CONSTRAINTS = ROOT / "ops" / "constraints"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
ENGINE_FILES = ("torch.txt", "sglang.txt")
SHIPPED = ("aggregator", "model_server", "protos")
PYTHONS = ("3.11", "3.12", "3.13")
CORES = ("aggregator/core", "model_server/core")
LINK = re.compile(r"\[[^\]]*\]\((?!https?:|mailto:|#)([^)#\s]+)")


def uv(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run uv as the Makefile does."""
    found = subprocess.run(
        ["sh", "ops/env/uv.sh"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    environment = {key: value for key, value in os.environ.items() if key != "UV_TORCH_BACKEND"}
    return subprocess.run(
        [found.stdout.strip(), *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def pythons_here() -> list[str]:
    """The supported versions that this machine has; the running one is always there."""
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    found = [v for v in PYTHONS if v != own and uv("python", "find", "--system", v).returncode == 0]
    return [own, *found]


def pins(file: str) -> dict[str, Requirement]:
    """A constraints file by distribution, those for this machine."""
    read: dict[str, Requirement] = {}
    for line in (CONSTRAINTS / file).read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            pin = Requirement(line)
            if pin.marker is None or pin.marker.evaluate():
                read[canonicalize_name(pin.name)] = pin
    return read


def declared(*extras: str) -> set[str]:
    """Distributions that pyproject.toml asks for: the base and some extras."""
    optional = PROJECT["optional-dependencies"]
    wanted = [*PROJECT["dependencies"], *(line for extra in extras for line in optional[extra])]
    return {canonicalize_name(Requirement(line).name) for line in wanted}


def imported(folder: str) -> Iterator[tuple[Path, str]]:
    """Each module that the Python files under a folder import, with the file."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                yield from ((path, name.name) for name in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                yield path, node.module


# --- the wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this checkout with the pinned backend."""
    out = tmp_path_factory.mktemp("wheel")
    backend = str(CONSTRAINTS / "build.txt")
    built = uv("build", "--wheel", "--build-constraints", backend, "--out-dir", str(out))
    assert built.returncode == 0, built.stderr
    (path,) = out.glob("*.whl")
    return path


def test_the_wheel_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
    assert {name.split("/")[0] for name in names} == {*SHIPPED, info}
    assert {f"{package}/py.typed" for package in SHIPPED} <= set(names)
    assert f"{info}/licenses/LICENSE" in names
    assert "protos/embedding/v1/query.proto" in names
    assert "protos/embedding/v1/query_pb2.pyi" in names
    assert not [name for name in names if "__pycache__" in name]


IMPORT_ALL = """
import importlib, pkgutil, sys
import aggregator, model_server.cli, model_server.engines.simulated, model_server.server, protos
names = []
for package in (aggregator, protos, model_server.server):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            names.append(module.name)
            importlib.import_module(module.name)
heavy = {"torch", "transformers", "sglang"} & set(sys.modules)
assert not heavy, heavy
print(len(names), aggregator.__file__)
"""


@pytest.mark.parametrize("version", pythons_here())
def test_the_wheel_works_without_the_sources(wheel: Path, tmp_path: Path, version: str) -> None:
    """Light install: all of the aggregator and the model server's shell, no engine."""
    environment = tmp_path / "environment"
    made = uv("venv", "--quiet", "--python", version, str(environment))
    assert made.returncode == 0, made.stderr
    pinned = str(CONSTRAINTS / "torch.txt")
    python = str(environment / "bin" / "python")
    light = f"token-batching[aggregator] @ {wheel.as_uri()}"
    installed = uv("pip", "install", "--python", python, "--constraints", pinned, light)
    assert installed.returncode == 0, installed.stderr

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    count, where = run(python, "-c", IMPORT_ALL).split()
    assert int(count) > 40
    assert Path(where).is_relative_to(environment)
    for script in ("aggregator", "model-server"):
        assert PROJECT["version"] in run(str(environment / "bin" / script), "--version")


# --- the pins


def test_this_environment_is_the_pinned_one() -> None:
    wrong = {
        name: (installed.version, str(pin.specifier))
        for name, pin in pins("torch.txt").items()
        for installed in metadata.distributions(name=name)
        # PyTorch's own wheels say which they are: 2.15.0+cpu is 2.15.0.
        if not pin.specifier.contains(installed.version.partition("+")[0])
    }
    assert wrong == {}


@pytest.mark.parametrize(
    ("file", "extras"),
    [("torch.txt", ("aggregator", "torch", "dev")), ("sglang.txt", ("sglang", "dev"))],
)
def test_every_dependency_is_pinned(file: str, extras: tuple[str, ...]) -> None:
    pinned = pins(file)
    assert declared(*extras) - set(pinned) == set()
    assert {str(pin.specifier)[:2] for pin in pinned.values()} == {"=="}


def test_the_engines_pins_exclude_each_other() -> None:
    torch, sglang = map(pins, ENGINE_FILES)
    for name in ("torch", "transformers"):
        assert torch[name].specifier != sglang[name].specifier
    under_test = pins("torch-transformers-5.19.txt")["transformers"]
    assert under_test.specifier == sglang["transformers"].specifier


@pytest.mark.parametrize("path", sorted(CONSTRAINTS.iterdir()), ids=lambda path: path.name)
def test_no_registry_is_named(path: Path) -> None:
    assert "://" not in path.read_text(encoding="utf-8")
    assert "index-url" not in path.read_text(encoding="utf-8")


# --- what the code imports


@pytest.mark.parametrize(
    ("folder", "extras"),
    [
        ("aggregator", ("aggregator",)),
        ("model_server", ("torch", "sglang", "vllm", "plots")),
        ("protos", ()),
    ],
)
def test_what_is_imported_is_declared(folder: str, extras: tuple[str, ...]) -> None:
    """Nothing is used that only happens to be installed by something else."""
    provided_by = metadata.packages_distributions()
    allowed = declared(*extras) | {canonicalize_name(PROJECT["name"])}
    undeclared = set()
    for path, module in imported(folder):
        top = module.partition(".")[0]
        if top in sys.stdlib_module_names or top in SHIPPED:
            continue
        # google is shared by several distributions: one declared is enough.
        owners = {canonicalize_name(name) for name in provided_by.get(top, [top])}
        if not owners & allowed:
            undeclared.add((str(path.relative_to(ROOT)), module))
    assert undeclared == set()


@pytest.mark.parametrize("folder", CORES)
def test_cores_import_the_standard_library_alone(folder: str) -> None:
    """import-linter forbids the parts of it that do IO or read clocks."""
    package = folder.partition("/")[0]
    foreign = {
        (path.name, module)
        for path, module in imported(folder)
        if module.partition(".")[0] not in sys.stdlib_module_names
        and not module.startswith((f"{package}.core", "aggregator.core.packing"))
    }
    assert foreign == set()


@pytest.mark.parametrize("folder", ["aggregator", "aggregator/core", "model_server"])
def test_packages_that_others_import_run_no_code(folder: str) -> None:
    assert (ROOT / folder / "__init__.py").read_text(encoding="utf-8").strip() == ""


# --- protos


def test_stubs_are_what_the_protos_give() -> None:
    command = [sys.executable, "ops/protos.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_vendored_proto_is_the_distribution_s() -> None:
    installed = metadata.distribution("googleapis-common-protos").locate_file("google/rpc")
    vendored = ROOT / "ops" / "buf" / "vendor" / "google" / "rpc" / "status.proto"
    assert vendored.read_text() == Path(str(installed), "status.proto").read_text()


# --- documents


def documents() -> list[Path]:
    """The Markdown files of the project."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "ops").rglob("*.md")]
    return sorted(page for page in pages if "node_modules" not in page.parts)


@pytest.mark.parametrize("page", documents(), ids=lambda page: str(page.relative_to(ROOT)))
def test_documents_name_what_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    broken = [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    assert broken == []
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", makefile, re.MULTILINE))
    commands = re.findall(r"(?:^|`|\$ )(?:[A-Z_]+=\S* )*make ([a-z][a-z0-9-]*)", text, re.MULTILINE)
    assert set(commands) - targets == set()


def test_messages_name_targets_that_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", makefile, re.MULTILINE))
    named = set()
    for folder in ("aggregator", "model_server", "ops"):
        for path in (ROOT / folder).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            named |= set(re.findall(r"`make ([a-z][a-z0-9-]*(?:\{engine\})?)", text))
    assert {"env", "env-{engine}", "demo"} <= named
    named.remove("env-{engine}")
    assert named | {"env-sglang", "env-vllm"} <= targets


@pytest.mark.parametrize(
    "page", sorted((ROOT / "ops" / "adr").glob("*.md")), ids=lambda page: page.stem
)
def test_decisions_have_their_four_parts(page: Path) -> None:
    assert re.fullmatch(r"\d{4}(-[a-z0-9]+)+", page.stem)
    headings = re.findall(r"^## (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert headings == ["Context", "Decision", "Consequences", "How to reverse"]


def test_decisions_are_numbered_without_gaps() -> None:
    numbers = sorted(int(page.stem[:4]) for page in (ROOT / "ops" / "adr").glob("*.md"))
    assert numbers == list(range(1, len(numbers) + 1))


def test_without_a_terminal_long_work_says_that_it_goes_on() -> None:
    # It ends when it has been told twice, so its length is no matter of this machine's speed.
    work = 'while [ "$(wc -l < "$TOLD")" -lt 2 ]; do sleep 0.05; done; echo done; exit 3'
    with tempfile.NamedTemporaryFile() as told:
        done = subprocess.run(
            ["sh", "ops/env/telling.sh", "installing", "sh", "-c", work],
            cwd=ROOT,
            env={**os.environ, "TELLING_EVERY_S": "1", "TOLD": told.name},
            stdout=told,
            stderr=subprocess.STDOUT,
            timeout=60,
            check=False,
        )
        lines = Path(told.name).read_text("utf-8").splitlines()
    assert done.returncode == 3
    assert lines[:2] == ["installing: 1 s so far", "installing: 2 s so far"]
    assert lines[-1] == "done"
