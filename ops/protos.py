"""Generate the stubs of `protos/` so that they import as `protos.embedding.v1`.

protoc writes `from embedding.v1 import ...` because `protos/` is its root; that is not importable,
so imports and the module names in strings (by which messages pickle) are rewritten. With `--check`
nothing is written and the exit status says whether the committed stubs are current.

    python ops/protos.py [--check]
"""

from __future__ import annotations

import re
import sys
import tempfile
from importlib.metadata import distribution
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
REWRITES = (
    (re.compile(r"^(from|import) embedding\.v1\b", re.MULTILINE), r"\1 protos.embedding.v1"),
    (re.compile(r"\bembedding\.v1\.(\w+_pb2)\b"), r"protos.embedding.v1.\1"),
    (re.compile(r"\bprotos\.protos\."), "protos."),
)


def generate(out: Path) -> dict[str, str]:
    """Run protoc into `out`; return the rewritten texts of the stubs by path under `protos/`."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.glob("embedding/**/*.proto"))
    well_known = str(files("grpc_tools") / "_proto")
    google_rpc = str(distribution("googleapis-common-protos").locate_file(""))
    plugins = Path(sys.executable).parent
    status = protoc.main(
        [
            "protoc",
            f"--plugin=protoc-gen-mypy_grpc={plugins / 'protoc-gen-mypy_grpc'}",
            f"-I{PROTOS}",
            f"-I{google_rpc}",
            f"-I{well_known}",
            f"--python_out={out}",
            f"--pyi_out={out}",
            f"--grpc_python_out={out}",
            f"--mypy_grpc_out={out}",
            *sources,
        ]
    )
    if status != 0:
        raise SystemExit(f"protoc ended with status {status}")
    stubs: dict[str, str] = {}
    for path in sorted(out.rglob("*.py*")):
        text = path.read_text(encoding="utf-8")
        for pattern, replacement in REWRITES:
            text = pattern.sub(replacement, text)
        stubs[str(path.relative_to(out))] = text
    return stubs


def main(arguments: list[str]) -> int:
    """Write the stubs, or compare them with those committed."""
    with tempfile.TemporaryDirectory() as folder:
        stubs = generate(Path(folder))
    if arguments == ["--check"]:
        stale = [
            name
            for name, text in stubs.items()
            if not (PROTOS / name).is_file() or (PROTOS / name).read_text(encoding="utf-8") != text
        ]
        for name in stale:
            print(f"protos/{name} is not what the .proto files give; run `make protos`")
        return 1 if stale else 0
    for name, text in stubs.items():
        (PROTOS / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
