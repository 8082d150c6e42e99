"""A device for tests, "emulated": an accelerator as torch sees it, in host memory.

Work is executed at once, in the thread that enqueues it. What orders it on a real device is only
*recorded*: its stream, the bytes that it reads and writes, and the waits of streams and of the
host. ``order`` then finds accesses that no wait orders, in every run, also where no number changes.
The times that things take are not shown; ``play`` computes them from given costs.

    why_not()        why it cannot be used here, or ""
    use()            register the device in this process, for good: only in processes of run_ranks
    watching()       record what happens on it

``nccl`` adds collectives, and what torch's own FSDP needs of a device. ``device.cpp`` is compiled
when it is first needed, and kept where torch keeps its extensions."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from tests.support import order

NAME = "emulated"
_HERE = Path(__file__).parent
_SOURCES = [_HERE / name for name in ("../cpu_kernels.h", "memory.h", "device.cpp")]
_EXTENSION = "emulated_device"
# NDEBUG as in torch itself: some of its classes are larger without.
_FLAGS = (
    *("-std=c++20", "-O1", "-DNDEBUG", "-fPIC", "-shared", "-fvisibility=hidden"),
    f"-DTORCH_EXTENSION_NAME={_EXTENSION}",
)
_NOT_SHOWN = (str(Path(torch.__file__).parent), str(_HERE), "<frozen")
_NUM_SHOWN = 4  # calls of a place


# -- building


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++"))), None)


def why_not() -> str:
    """Return why the device cannot be built here, or ""."""
    if _compiler() is None:
        return "the emulated device needs a C++ compiler"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "the emulated device needs the headers of Python"
    return ""


@functools.cache
def build() -> Path:
    """Compile the device, unless that was done before. Takes half a minute.

    One call of the compiler: torch's own ``load`` would need ninja besides.
    """
    from torch.utils import cpp_extension

    compiler = _compiler()
    assert compiler is not None, why_not()
    versions = repr((torch.__version__, sys.version, _FLAGS)).encode()
    key = hashlib.sha256(b"".join([versions, *(p.read_bytes() for p in _SOURCES)])).hexdigest()
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root()
    folder = Path(root, "fsdp_compat_tests")
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{_EXTENSION}-{key[:16]}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            unfinished = library.with_suffix(".unfinished")
            abi = int(torch.compiled_with_cxx11_abi())
            includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
            subprocess.run(
                [
                    *(compiler, *_FLAGS, f"-D_GLIBCXX_USE_CXX11_ABI={abi}"),
                    *(f"-isystem{path}" for path in includes),
                    *(f"-L{path}" for path in cpp_extension.library_paths()),
                    *(str(_SOURCES[-1]), "-o", str(unfinished)),
                    *("-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"),
                ],
                check=True,
            )
            unfinished.replace(library)
    return library


# -- using


@functools.cache
def _extension() -> Any:
    loader = importlib.machinery.ExtensionFileLoader(_EXTENSION, str(build()))
    spec = importlib.util.spec_from_loader(_EXTENSION, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@functools.cache
def use() -> None:
    """Register the device in this process. There is no way back, and autograd must not have run: it
    starts a thread for each device that it finds at its first backward."""
    torch.utils.rename_privateuse1_backend(NAME)
    _extension()
    module: Any = types.ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.device = module.set_device = lambda device: contextlib.nullcontext()
    # Random numbers come from the CPU's generator.
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = module.set_rng_state = lambda *state: None
    module.get_rng_state = lambda *device: torch.empty(0, dtype=torch.uint8)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    torch._register_device_module(NAME, module)


# -- recording


class UnwantedSync(AssertionError):
    """The host waited for the device where it must not."""


class Recording:
    """What happened on the device, in the order in which it was enqueued. Its methods are called by
    the extension, which holds Python's lock; a garbage collection may call one inside another."""

    def __init__(self) -> None:
        self.happenings: list[order.Happening] = []
        self.syncs_allowed = True

    def unordered(self) -> list[order.Unordered]:
        return order.find_unordered(self.happenings)

    def op(
        self, stream: int, name: str, reads: list[order.Range], writes: list[order.Range]
    ) -> None:
        self.happenings.append(order.Op(stream, name, tuple(reads), tuple(writes), _place()))

    def host(self, name: str, reads: list[order.Range], writes: list[order.Range]) -> None:
        self.op(order.HOST, name, reads, writes)

    def record(self, event: int, stream: int) -> None:
        self.happenings.append(order.Record(event, stream))

    def wait(self, event: int, stream: int) -> None:
        self.happenings.append(order.Wait(event, stream))

    def host_waits_for_event(self, event: int) -> None:
        self._sync(order.EventSync(event))

    def host_waits_for_stream(self, stream: int) -> None:
        self._sync(order.StreamSync(stream))

    def host_waits_for_device(self) -> None:
        self._sync(order.DeviceSync())

    def allocate(self, stream: int, begin: int, end: int) -> None:
        self.happenings.append(order.Allocate(stream, (begin, end), _place()))

    def free(self, stream: int, begin: int, end: int, readers: set[int]) -> None:
        self.happenings.append(order.Free(stream, (begin, end), frozenset(readers), _place()))

    def forget(self, begin: int, end: int) -> None:
        self.happenings.append(order.Forget((begin, end)))

    def _sync(self, happening: order.Happening) -> None:
        if not self.syncs_allowed:
            raise UnwantedSync("the host waits for the device")
        self.happenings.append(happening)


def _place() -> order.Place:
    """Return where the running thread is, without torch's own calls."""
    found: list[str] = []
    node = torch._C._current_autograd_node()
    if node is not None:
        found.append(f"in backward: {node.name()}")
    frame = sys._getframe(1).f_back
    while frame is not None and len(found) < _NUM_SHOWN:
        code = frame.f_code
        if not code.co_filename.startswith(_NOT_SHOWN):
            found.append(f"{code.co_filename}:{frame.f_lineno} {code.co_name}")
        frame = frame.f_back
    return tuple(found)


def is_pinned(address: int) -> bool:
    """Return whether an address is in pinned memory of the host."""
    found: bool = _extension().is_pinned(address)
    return found


@contextlib.contextmanager
def watching(recording: Recording | None = None) -> Iterator[Recording]:
    """Record what happens on the device inside the context."""
    recording = recording or Recording()
    _extension().observe(recording)
    try:
        yield recording
    finally:
        _extension().observe(None)
