"""Machine code, made from LLVM's intermediate one, that works in torch's own threads."""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

__all__ = ["ENTRY", "EXP", "HALVES", "NUM_THREADS", "THREAD", "Kernel", "compiled"]

# what code may ask for, by name: its place among the threads, how many there are, C's `expf`
THREAD, NUM_THREADS, EXP = "selfspec_thread", "selfspec_num_threads", "selfspec_expf"
# no llvmlite, no such library, no such processor; or an llvmlite that does not know all we ask for
_NOT_HERE = (ImportError, OSError, RuntimeError, AttributeError, TypeError)
HALVES = (torch.bfloat16, torch.float16)  # that code is written for
ENTRY = "work"  # void work(int64_t *arguments), which each thread calls


class Kernel:
    """A function of whole numbers and addresses, run by all of torch's threads together."""

    def __init__(self, engine: Any, pool: ctypes.CDLL) -> None:
        self._engine = engine  # owns the code
        self._code = engine.get_function_address(ENTRY)
        self._run = pool.GOMP_parallel
        self._run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self._run.restype = None

    def __call__(self, *arguments: int) -> None:
        """Comes back when all threads are done."""
        passed = (ctypes.c_int64 * len(arguments))(*arguments)
        self._run(self._code, passed, torch.get_num_threads(), 0)


def compiled(write: Callable[[], Any]) -> Kernel | None:
    """The code that `write` gives as an `llvmlite.ir.Module`; None where it can't be had here.

    `write` may need llvmlite, too: it is called where that is there.
    """
    pool = _pool()
    if pool is None:
        return None
    try:
        from llvmlite import binding as llvm

        with _lock:
            return Kernel(_engine(llvm, write(), pool), pool)
    except _NOT_HERE:
        return None


def _engine(llvm: Any, module: Any, pool: ctypes.CDLL) -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    for name, function in (
        (THREAD, pool.omp_get_thread_num),
        (NUM_THREADS, pool.omp_get_num_threads),
        (EXP, ctypes.CDLL("libm.so.6").expf),
    ):
        llvm.add_symbol(name, ctypes.cast(function, ctypes.c_void_p).value)
    parsed = llvm.parse_assembly(str(module))
    parsed.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(),
        features=llvm.get_host_cpu_features().flatten(),
        opt=3,
    )
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(parsed, builder)
    engine = llvm.create_mcjit_compiler(parsed, machine)
    engine.finalize_object()
    return engine


def _pool() -> ctypes.CDLL | None:
    """The library whose threads torch works in, where it is one that we can ask, too."""
    if not sys.platform.startswith("linux"):
        return None
    found = sorted((Path(torch.__file__).parent / "lib").glob("lib[gi]omp*.so*"))
    for path in (None, *found):  # none: one that was loaded before all others, for everybody
        pool = ctypes.CDLL(None if path is None else str(path))
        if hasattr(pool, "GOMP_parallel") and hasattr(pool, "omp_get_thread_num"):
            return pool
    return None


_lock = threading.Lock()
