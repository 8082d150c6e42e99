"""What is installed: what an editable install, the wheel and the source distribution hold, built
from a copy of the checkout as pip builds them."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

import pytest

from fsdp_compat import __version__
from tests.support.programs import ROOT, python

BUILD = "import sys; from setuptools import build_meta as it; getattr(it, sys.argv[1])(sys.argv[2])"
PACKAGED = f"fsdp_compat-{__version__}"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, as a build writes into it."""
    folder = tmp_path_factory.mktemp("packaging") / "checkout"
    python(".ci/fresh_copy.py", ROOT, folder)
    return folder


def built(copy: Path, kind: str, folder: Path) -> Path:
    """Build the editable install, the wheel or the source distribution; return its file."""
    python("-c", BUILD, f"build_{kind}", folder, folder=copy, PYTHONPATH="")
    (path,) = folder.glob(f"{PACKAGED}*")
    return path


def files_below(folder: Path) -> set[str]:
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix() for path in found}


def test_mypy_finds_the_package_after_an_editable_install(copy: Path, tmp_path: Path) -> None:
    """README's commands install it so. mypy reads the paths of an environment, but not its import
    hooks, which are setuptools' other way of editable installs."""
    wheel = built(copy, "editable", tmp_path)
    python("-m", "venv", "--without-pip", tmp_path / "venv")
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    (tmp_path / "user").mkdir()
    command = ["-m", "mypy", "--python-executable", tmp_path / "venv" / "bin" / "python"]
    command += ["--follow-imports=skip", "-c", "from fsdp_compat import fully_shard"]
    ran = python(*command, folder=tmp_path / "user", PYTHONPATH="")
    assert ran.stdout.startswith("Success")


def test_the_wheel_holds_the_package_and_nothing_else(copy: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(built(copy, "wheel", tmp_path)) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert found == {f"fsdp_compat/{name}" for name in files_below(copy / "fsdp_compat")}
    assert "fsdp_compat/py.typed" in found


def test_the_source_distribution_holds_all_of_a_checkout(copy: Path, tmp_path: Path) -> None:
    with tarfile.open(built(copy, "sdist", tmp_path)) as archive:
        files = {member.name.partition("/")[2] for member in archive if member.isfile()}
    made = ("build/", "fsdp_compat.egg-info/", "PKG-INFO")
    found, expected = (
        {name for name in names if not name.startswith(made)}
        for names in (files, files_below(copy))
    )
    assert found == expected
    assert "tests/test_packaging.py" in found and "examples/README.md" in found
