"""Adds the fused blocks to what pyproject.toml builds: an extension of MLX itself, against the installed MLX's headers.

It is optional like the other one, and left out where the headers, nanobind or Linux are missing.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = "polytoken/kernels/cpu"
BINDING_PARTS = ("include", "src", "ext/robin_map/include")


def fused_extension() -> Extension | None:
    """The extension, or None where it cannot be built."""
    mlx, nanobind = find_spec("mlx"), find_spec("nanobind")
    if sys.platform != "linux" or mlx is None or nanobind is None or nanobind.origin is None:
        return None
    home, binding = Path(next(iter(mlx.submodule_search_locations or ()))), Path(nanobind.origin).parent
    if not (home / "include/mlx/mlx.h").exists() or not (home / "lib/libmlx.so").exists():
        return None
    return Extension(
        "polytoken.kernels._fused",
        sources=[f"{FOLDER}/fused.cpp", f"{FOLDER}/binding.cpp"],
        depends=[f"{FOLDER}/block.h"],
        include_dirs=[
            str(home / "include"),
            *(str(binding / part) for part in ("include", "src", "ext/robin_map/include")),
        ],
        library_dirs=[str(home / "lib")],
        libraries=["mlx"],
        # objects of MLX's own module are only seen within the same nanobind domain
        define_macros=[("NB_DOMAIN", "mlx"), ("NB_COMPACT_ASSERTIONS", None)],
        extra_compile_args=[
            "-std=c++20",
            "-O2",
            "-fvisibility=hidden",
            "-fno-strict-aliasing",
            "-Wno-unused-parameter",
        ],
        language="c++",
        optional=True,
    )


class BuildExtensions(build_ext):
    def finalize_options(self) -> None:
        fused = fused_extension()
        known = self.distribution.ext_modules or []
        if fused is not None and all(extension.name != fused.name for extension in known):
            self.distribution.ext_modules = [*known, fused]
        super().finalize_options()


setup(cmdclass={"build_ext": BuildExtensions})
