"""What deploy/ tells machines to do can be done: commands parse, settings load, sizes fit."""

import json
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.store_contract import small

import kvdepot
from kvdepot.cli.main import build_parser, main
from kvdepot.config.settings import MIB, Config, load
from kvdepot.core.units import parse_bytes
from kvdepot.testing.daemons import DaemonProcess

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
BASE = DEPLOY / "kubernetes" / "base"
OVERLAY = DEPLOY / "kubernetes" / "overlays" / "two-drives"
PROCESS_BYTES = 512 * MIB
"""For Python, the index and buffers, beside the memory tier."""


def parsed(*words: str) -> Any:
    """The words of a command that begins with `kvdepot`, as our own parser takes them."""
    name, command, *rest = words
    assert Path(name).name == "kvdepot"
    return build_parser({command}).parse_args([command, *rest])


def documents(path: Path) -> Any:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load(path.read_text())


@pytest.fixture
def pod() -> Any:
    return documents(BASE / "daemonset.yaml")["spec"]["template"]["spec"]


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.toml")), ids=lambda path: path.parent.name)
def test_settings_load(path: Path) -> None:
    assert load(path).file_tiers


def test_the_unit_starts_a_daemon_that_exists() -> None:
    text = (DEPLOY / "kvdepot.service").read_text()
    (command,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    args = parsed(*shlex.split(command))
    assert (str(args.config), args.group) == ("/etc/kvdepot/kvdepot.toml", "kvdepot")
    assert args.socket == Path("/run/kvdepot/depot.sock")
    assert "Type=notify" in text
    settings = load(DEPLOY / "kvdepot.toml")
    assert all(path.is_relative_to("/var/lib/kvdepot") for path in settings.file_tiers[0].path)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "kvdepot.service"
    text = (DEPLOY / "kvdepot.service").read_text()
    unit.write_text(text.replace("/opt/kvdepot/bin/kvdepot", "/bin/true"))
    command = ["systemd-analyze", "verify", "--man=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    if "Failed to" in done.stderr and "kvdepot.service" not in done.stderr:
        pytest.skip(f"systemd-analyze does not work here: {done.stderr.strip()}")
    assert "kvdepot.service:" not in done.stderr


def test_the_container_copies_what_it_may_see_and_runs_what_exists() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    seen = [
        line[1:]
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    for line in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.MULTILINE):
        for source in line.split():
            assert source in seen and (ROOT / source).exists(), source
    (health,) = re.findall(r"^HEALTHCHECK .* CMD (\[.*\])$", text, re.MULTILINE)
    parsed(*json.loads(health))
    (entry,) = re.findall(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)
    (command,) = re.findall(r"^CMD (\[.*\])$", text, re.MULTILINE)
    assert parsed(*json.loads(entry), *json.loads(command)).group == "kvdepot"


EXTRAS = ("hf", "llama", "demo", "http", "nats", "s3", "events")


def requirements(*extras: str) -> Iterator[tuple[str, str]]:
    """The names and version bounds that the package and these extras require."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = list(project["dependencies"])
    for extra in extras:
        listed += project["optional-dependencies"][extra]
    for line in listed:
        found = re.fullmatch(r"([A-Za-z0-9_-]+)(?:\[[^]]*\])?(.*)", line)
        assert found is not None
        if found[1] != "kvdepot":
            yield found[1], found[2]


def test_extras_have_upper_bounds() -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {*EXTRAS, "dev"} == set(known["optional-dependencies"])
    for name, bounds in requirements(*EXTRAS):
        pattern = (
            r">=[\d.]+" if name == "torch" else r">=[\d.]+,<[\d.]+"
        )  # any torch that is there stays
        assert re.fullmatch(pattern, bounds), name
        assert name != "h11" or bounds.startswith(">=0.16,"), "older ones accept malformed chunks"
    for extra in ("http", "llama"):
        assert "h11" in dict(requirements(extra)), "these parse HTTP with it"


def test_the_image_has_exact_versions() -> None:
    text = (DEPLOY / "constraints.txt").read_text()
    pinned = dict(re.findall(r"^([a-z0-9-]+)==([\d.]+)$", text, re.MULTILINE))
    assert {name for name, _ in requirements("http")} <= pinned.keys()
    for name, bounds in requirements("http"):
        low, high = re.findall(r"[\d.]+", bounds)
        assert numbers(low) <= numbers(pinned[name]) < numbers(high), name
    docker = (DEPLOY / "Dockerfile").read_text()
    assert "-c deploy/constraints.txt" in docker
    assert set(re.findall(r"^FROM (\S+)", docker, re.MULTILINE)) == {"${PYTHON}"}


def numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def test_actions_are_pinned_by_commit() -> None:
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for used in re.findall(r"uses: (.*)", path.read_text()):
            assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", used), used


def test_pods_run_commands_that_exist(pod: Any) -> None:
    (container,) = pod["containers"]
    assert parsed("kvdepot", *container["args"]).config == Path("/etc/kvdepot/kvdepot.toml")
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        parsed(*container[probe]["exec"]["command"])


def test_engines_reach_the_socket_by_a_folder_of_the_node(pod: Any) -> None:
    paths = {one["name"]: one.get("hostPath", {}).get("path") for one in pod["volumes"]}
    mounts = {one["mountPath"]: one["name"] for one in pod["containers"][0]["volumeMounts"]}
    assert paths[mounts["/run/kvdepot"]] == "/run/kvdepot"
    socket = re.search(r"KVDEPOT_SOCKET=(\S+)", (DEPLOY / "Dockerfile").read_text())
    assert socket is not None and Path(socket[1]).parent == Path("/run/kvdepot")


def test_users_are_the_same_everywhere(pod: Any) -> None:
    number = pod["securityContext"]["runAsUser"]
    assert f"--uid {number}" in (DEPLOY / "Dockerfile").read_text()
    for path in (BASE / "daemonset.yaml", OVERLAY / "drives.yaml"):
        assert f"chown {number}:{number}" in path.read_text()


def needed_bytes(config: Config) -> int:
    return config.dram.capacity + config.writeback.staging + PROCESS_BYTES


def test_memory_limits_hold_the_memory_tier(pod: Any) -> None:
    patch = documents(OVERLAY / "drives.yaml")["spec"]["template"]["spec"]
    for folder, spec in ((BASE, pod), (OVERLAY, patch)):
        limit = parse_bytes(spec["containers"][0]["resources"]["limits"]["memory"].rstrip("i"))
        assert limit >= needed_bytes(load(folder / "kvdepot.toml"))


def test_drives_are_mounted_where_the_settings_look(pod: Any) -> None:
    patch = documents(OVERLAY / "drives.yaml")["spec"]["template"]["spec"]
    for folder, spec in ((BASE, pod), (OVERLAY, patch)):
        mounts = [one["mountPath"] for one in spec["containers"][0]["volumeMounts"]]
        for path in load(folder / "kvdepot.toml").file_tiers[0].path:
            assert any(path.is_relative_to(mount) for mount in mounts), path


def test_images_are_of_this_version() -> None:
    for folder in (BASE, OVERLAY):
        (image,) = documents(folder / "kustomization.yaml")["images"]
        assert image["newTag"] == kvdepot.__version__
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == kvdepot.__version__


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl here")
@pytest.mark.parametrize("folder", [BASE, OVERLAY], ids=lambda folder: folder.name)
def test_kustomize_builds(folder: Path) -> None:
    yaml = pytest.importorskip("yaml")
    command = ["kubectl", "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    kinds = [one["kind"] for one in yaml.safe_load_all(done.stdout)]
    assert sorted(kinds) == ["ConfigMap", "DaemonSet", "Namespace"]


def test_the_probe_finds_the_daemon_by_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in the container: KVDEPOT_SOCKET and no option."""
    monkeypatch.setenv("KVDEPOT_SOCKET", str(tmp_path / "depot.sock"))
    assert main(["tiers", "list"]) == 2
    with DaemonProcess(tmp_path, small(tmp_path / "kv")):
        assert main(["tiers", "list"]) == 0
    assert "dram" in capsys.readouterr().out
