"""Packages that real uv installs without any index: each is its own build backend, made of the standard library."""

from pathlib import Path

BACKEND = """
import zipfile
from pathlib import Path

HERE = Path(__file__).parent
NAME, NEEDS = {name!r}, {needs!r}
MODULE = NAME.replace("-", "_")


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    return _wheel(wheel_directory, {{f"_{{MODULE}}.pth": str(HERE)}})


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    return _wheel(wheel_directory, {{f"{{MODULE}}.py": (HERE / f"{{MODULE}}.py").read_text()}})


def _wheel(folder, files):
    about = f"{{MODULE}}-0.dist-info"
    needs = "".join(f"Requires-Dist: {{need}}\\n" for need in NEEDS)
    files[f"{{about}}/METADATA"] = f"Metadata-Version: 2.1\\nName: {{NAME}}\\nVersion: 0\\n{{needs}}"
    files[f"{{about}}/WHEEL"] = "Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
    files[f"{{about}}/RECORD"] = ""
    name = f"{{MODULE}}-0-py3-none-any.whl"
    with zipfile.ZipFile(Path(folder) / name, "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
    return name
"""

PROJECT = """[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]

[project]
name = "{name}"
version = "0"
dependencies = {needs}
"""


def write_package(root: Path, name: str, code: str, *, sources: dict[str, str] | None = None) -> Path:
    """A package in a folder of `root`; `sources` are the lines of its `[tool.uv.sources]`, by package."""
    folder = root / name.replace("-", "_")
    folder.mkdir(parents=True)
    needs = list(sources or {})
    project = PROJECT.format(name=name, needs=needs)
    if sources:
        project += "\n[tool.uv.sources]\n" + "".join(f"{need} = {line}\n" for need, line in sources.items())
    (folder / "pyproject.toml").write_text(project)
    (folder / "backend.py").write_text(BACKEND.format(name=name, needs=needs))
    (folder / f"{name.replace('-', '_')}.py").write_text(code)
    return folder
