"""Choosing what stands behind MLX's products: reports, refusals, and life without the compiled extension."""

from __future__ import annotations

import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import mlx.core as mx
import numpy as np
import pytest

from polytoken.errors import UsageError
from polytoken.kernels import products


@pytest.fixture(autouse=True)
def put_back(extension: ModuleType) -> Iterator[None]:
    yield
    products.enable("stock")
    extension.set_threads(1)


def without_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "polytoken.kernels._products", None)
    monkeypatch.setattr(products, "_warned", False)


def test_report_follows_what_was_enabled() -> None:
    assert products.enable("exact") == products.report()
    assert products.report().kind == "exact"
    assert "from first to last" in products.report().exactness
    assert products.enable("stock") == products.report()
    assert products.report().symbols == ()


def test_threads_are_reported_and_bounded() -> None:
    assert products.enable("exact", threads=2).threads == 2
    for wrong in (0, -1, 65):
        with pytest.raises(UsageError) as caught:
            products.enable("exact", threads=wrong)
        assert caught.value.field == "threads"
    assert products.report().threads == 2


def test_a_missing_library_is_a_usage_error_and_changes_nothing(tmp_path: Path) -> None:
    before = products.enable("exact")
    for path in (str(tmp_path / "libnowhere.so"), "libnosuchblas.so.9"):
        with pytest.raises(UsageError, match=r"nowhere|nosuchblas") as caught:
            products.enable(path)
        assert caught.value.field == "products"
    assert products.report() == before
    assert np.array(mx.ones((2, 2)) @ mx.ones((2, 2)))[0, 0] == 2


def test_a_library_without_the_symbols_is_refused() -> None:
    with pytest.raises(UsageError, match="cblas_sgemm"):
        products.enable("libm.so.6")


@pytest.mark.parametrize("prefix", ["", "scipy_"])
def test_a_named_library_stands_behind_mlx(tmp_path: Path, prefix: str) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        pytest.skip("no compiler here to make a library with")
    head = (
        "(int o, int ta, int tb, int m, int n, int k, float alpha, const float *a, int lda, const float *b, int ldb, "
    )
    tail = (
        "float beta, float *c, int ldc) { for (int i = 0; i < m; i++) for (int j = 0; j < n; j++) c[i * ldc + j] = 7; }"
    )
    source = tmp_path / "seven.c"
    source.write_text(
        f"void {prefix}cblas_sgemm{head}{tail}\n"
        f"void {prefix}cblas_dgemm(void) {{}}\n"
        f"void {prefix}cblas_cgemm(void) {{}}\n"
    )
    library = tmp_path / "libseven.so"
    subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    report = products.enable(str(library))
    assert (report.kind, report.library, report.form) == ("library", str(library), None)
    assert report.symbols == ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")
    x = mx.ones((3, 3), stream=mx.cpu)
    assert (np.array(mx.matmul(x, x, stream=mx.cpu)) == 7).all()
    products.enable("stock")
    assert (np.array(mx.matmul(x, x, stream=mx.cpu)) == 3).all()


def test_without_the_extension_one_warning_and_right_products(monkeypatch: pytest.MonkeyPatch) -> None:
    without_extension(monkeypatch)
    with pytest.warns(RuntimeWarning, match="keeps its own CPU products"):
        report = products.enable("exact")
    assert report.kind == "stock"
    assert report.form is None
    assert report.reason is not None
    assert "extension" in report.reason
    assert report == products.report()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert products.enable("exact").reason == report.reason
        assert products.enable("stock").reason is None
    x = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert np.array_equal(np.array(mx.matmul(mx.array(x), mx.array(x.T), stream=mx.cpu)), x @ x.T)


def test_without_the_extension_a_library_is_a_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    without_extension(monkeypatch)
    with pytest.raises(UsageError, match="extension is not there"):
        products.enable("libm.so.6")


def test_a_library_that_is_not_loaded_is_named(extension: ModuleType) -> None:
    with pytest.raises(LookupError, match="not loaded"):
        extension.redirect("libnosuchlibrary.so")


def test_macos_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert products.enable("exact").kind == "not_needed"
    with pytest.raises(UsageError):
        products.enable("libopenblas.dylib")
    monkeypatch.undo()
    products.enable("stock")


def test_importing_the_module_does_not_import_mlx() -> None:
    code = "import sys, polytoken.kernels.products; print('mlx.core' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
