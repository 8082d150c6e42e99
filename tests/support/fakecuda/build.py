"""Make an environment with the CUDA build of torch on fakecuda, from the top of a checkout:

    python -m tests.support.fakecuda.build FOLDER

FOLDER becomes a virtual environment with that build of torch, what the tests need, and the
checkout. It takes minutes the first time, mostly for downloads; again, it compiles only what has
changed. Needs a C++ compiler, binutils and the headers of Python."""

from __future__ import annotations

import argparse
import collections
import configparser
import functools
import hashlib
import importlib.metadata
import re
import subprocess
import sysconfig
import venv
from collections.abc import Iterable
from pathlib import Path

TORCH = "torch==2.14.1"
HEADERS = ("nvidia-cuda-runtime==13.0.*", "nvidia-cuda-crt==13.0.*")
HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[2]

RUNTIME = "libcudart.so.13"
SOURCES = {RUNTIME: "runtime.cpp", "libnccl.so.2": "nccl.cpp", "libcuda.so.1": "driver.cpp"}
# Libraries of symbols without a version, by how the symbols begin.
UNVERSIONED = {
    "cuFile": "libcufile.so.0",
    "cusparseLt": "libcusparseLt.so.0",
    "curand": "libcurand.so.10",
    "nccl": "libnccl.so.2",
    "nvshmem": "libnvshmem_host.so.3",
    "nvrtc": "libnvrtc.so.13",
    "cu": "libcuda.so.1",
}
# What stubs return. The others end the process with their name.
CONSTANTS = {
    "cudnnGetVersion": 92400,
    "cudnnGetCudartVersion": 13000,
    "cublasLtGetVersion": 130101,
    "cuptiSubscribe": 999,
    "cuptiActivityRegisterCallbacks": 999,
    "cuptiActivityEnable": 999,
    "cuptiGetVersion": 999,
    "cuptiActivityDisable": 0,
    "cuptiFinalize": 0,
    "cuptiUnsubscribe": 0,
    "cuptiActivityFlushAll": 0,
    "cuptiActivitySetAttribute": 0,
}
STOP = """#include <stdio.h>
#include <stdlib.h>
__attribute__((noreturn)) static void stop(const char* name) {
  fprintf(stderr, "fakecuda: %s is not available\\n", name);
  abort();
}
"""


def run(*command: object) -> str:
    return subprocess.run(
        [*map(str, command)], check=True, stdout=subprocess.PIPE, text=True
    ).stdout


class Environment:
    """The virtual environment in a folder."""

    def __init__(self, folder: Path) -> None:
        base = {"base": str(folder), "platbase": str(folder)}
        self.folder = folder
        self.site = Path(sysconfig.get_path("purelib", vars=base))
        self.torch = self.site / "torch"
        self.lib = self.torch / "lib"
        # Not in site-packages, from which torch would load the real runtime.
        self.headers = folder / "headers"
        self.objects = folder / "objects"

    # -- packages

    def install(self) -> None:
        if not (self.folder / "pyvenv.cfg").exists():
            venv.create(self.folder, with_pip=True)
        self._pip("--no-deps", TORCH)
        (torch,) = importlib.metadata.distributions(name="torch", path=[str(self.site)])
        setup = configparser.ConfigParser()
        setup.read(CHECKOUT / "setup.cfg", encoding="utf-8")
        extra = setup["options.extras_require"]["test"].split("\n")
        needed = [each for each in torch.requires or () if "extra ==" not in each]
        needed = [each for each in needed if not re.match("nvidia|cuda|triton", each)]
        self._pip(*needed, *filter(None, extra))
        if not self.headers.exists():
            self._pip("--no-deps", "--target", self.headers, *HEADERS)
        (self.site / "checkout.pth").write_text(f"{CHECKOUT}\n", encoding="utf-8")

    def _pip(self, *arguments: object) -> None:
        pip = (self.folder / "bin" / "python", "-m", "pip", "install")
        run(*pip, "--quiet", "--no-warn-conflicts", *arguments)

    # -- libraries

    def compile(self) -> None:
        """Put the libraries beside those of torch, which finds them there."""
        self.objects.mkdir(exist_ok=True)
        sources = [HERE / "build.py", HERE / "observer.h"]
        libraries = dict.fromkeys([RUNTIME, *SOURCES, *self._libraries()])
        for library in libraries:
            source = [HERE / SOURCES[library]] if library in SOURCES else []
            if self._is_outdated(self.lib / library, [*sources, *source]):
                self._link(library)
        sources += [HERE / "ops.cpp", HERE.parent / "cpu_kernels.h"]
        if self._is_outdated(self.site / "fakecuda_ops.so", sources):
            self._compile_ops()
        (self.site / "fakecuda_load.py").write_bytes((HERE / "load.py").read_bytes())
        info = self.site / "fakecuda-1.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fakecuda\nVersion: 1\n")
        (info / "entry_points.txt").write_text("[torch.backends]\nfakecuda = fakecuda_load:load\n")

    def _is_outdated(self, target: Path, sources: Iterable[Path]) -> bool:
        """Return whether a file was not made from these sources, and note that it will be."""
        key = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
        note = self.objects / f"{target.name}.key"
        if target.exists() and note.exists() and note.read_text() == key:
            return False
        target.unlink(missing_ok=True)
        note.write_text(key)
        print(f"compiling {target.name}", flush=True)
        return True

    def _of_torch(self) -> list[Path]:
        return sorted(self.lib.glob("lib*torch*.so")) + sorted(self.lib.glob("libc10*.so"))

    @functools.cache  # noqa: B019
    def _libraries(self) -> tuple[str, ...]:
        """Return the libraries of CUDA that torch is linked to."""
        needed = "".join(run("readelf", "-dW", path) for path in self._of_torch())
        return tuple(dict.fromkeys(re.findall(r"NEEDED.*\[(lib(?:cu|nv|nccl).*)\]", needed)))

    @functools.cache  # noqa: B019
    def _symbols(self) -> dict[str, dict[str, str]]:
        """Return what torch needs of each library: the version, or "", of each symbol."""
        of_version, symbols = dict[str, str](), collections.defaultdict[str, dict[str, str]](dict)
        for path in self._of_torch():
            library = ""
            for line in run("readelf", "-VW", path).splitlines():
                if match := re.search(r"Version: 1  File: (\S+)", line):
                    library = match[1]
                elif match := re.search(r"Name: (\S+)  Flags", line):
                    of_version[match[1]] = library
        for path in self._of_torch():
            for line in run("nm", "-D", "--undefined-only", path).splitlines():
                name, _, version = line.split()[-1].partition("@")
                version = version.lstrip("@")
                begins = (lib for start, lib in UNVERSIONED.items() if name.startswith(start))
                library = of_version.get(version, "") if version else next(begins, "")
                symbols[library][name] = version
        return symbols

    def _link(self, library: str) -> None:
        """Link a library of our source, if any, and of stubs for all other symbols."""
        symbols, defined = self._symbols().get(library, {}), set[str]()
        objects: list[Path] = []
        if library in SOURCES:
            objects.append(self.objects / f"{library}.o")
            flags = ("-std=c++20", "-O2", "-fPIC", f"-I{self._includes()}")
            run("g++", *flags, "-c", HERE / SOURCES[library], "-o", objects[0])
            lines = run("nm", "-g", "--defined-only", objects[0]).splitlines()
            defined = {line.split()[-1] for line in lines}
        stubs = self.objects / f"{library}.stubs.c"
        stubs.write_text(STOP + "".join(map(stub, sorted(set(symbols) - defined))))
        objects.append(stubs.with_suffix(".o"))
        run("gcc", "-O1", "-fPIC", "-fno-builtin", "-w", "-c", stubs, "-o", objects[-1])
        names = collections.defaultdict[str, list[str]](list)
        for name, version in symbols.items():
            names[version].append(name)
        default = next(filter(None, names), "")
        for name in defined - set(symbols):
            if name.startswith(("fakecuda", "cuda", "__cuda", "nccl")):
                names[default].append(name)
        script = self.objects / f"{library}.map"
        nodes = {v: "".join(f"{name};" for name in each) for v, each in names.items() if v}
        script.write_text("".join(f"{v} {{ global: {each} }};\n" for v, each in nodes.items()))
        versions = [f"-Wl,--version-script={script}"] if nodes else []
        runtime = [self.lib / RUNTIME] if library in SOURCES and library != RUNTIME else []
        soname = f"-Wl,-soname,{library}"
        target = self.lib / library
        run("g++", "-shared", soname, *versions, *objects, *runtime, "-lrt", "-o", target)

    def _compile_ops(self) -> None:
        include = self.torch / "include"
        run(
            *("g++", "-std=c++20", "-O1", "-DNDEBUG", "-fPIC", "-shared", "-w"),
            *("-fvisibility=hidden", "-DTORCH_EXTENSION_NAME=fakecuda_ops", f"-isystem{include}"),
            *(f"-isystem{include}/torch/csrc/api/include", f"-I{sysconfig.get_path('include')}"),
            *(f"-I{self._includes()}", HERE / "ops.cpp", "-o", self.site / "fakecuda_ops.so"),
            *(f"-L{self.lib}", "-ltorch", "-ltorch_cpu", "-ltorch_cuda", "-lc10_cuda", "-lc10"),
            *("-ltorch_python", self.lib / RUNTIME),
        )

    def _includes(self) -> Path:
        return self.headers / "nvidia" / "cu13" / "include"


def stub(name: str) -> str:
    if name in CONSTANTS:
        return f"unsigned long {name}(void) {{ return {CONSTANTS[name]}; }}\n"
    return f'void {name}(void) {{ stop("{name}"); }}\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    environment = Environment(parser.parse_args().folder.resolve())
    environment.install()
    environment.compile()
    print(f"{environment.folder / 'bin' / 'python'}: {TORCH} on fakecuda")


if __name__ == "__main__":
    main()
