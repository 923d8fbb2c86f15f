"""Every document, typed as printed: each page in a machine of its own, from its top to its end.

A block without a language is typed into a shell, one of Python is run, settings are checked, and
what follows a `$ command` must be what it prints, but for the numbers. What cannot be run here, or
not as it stands, is named below with the reason; a name that no page has any more is an error.
"""

import json
import re
import tomllib
from pathlib import Path

import pytest
from tests.support.documents import DATA, PAGES, SHELL, Step, name_of, steps_of
from tests.support.reader import HOME, Machine, refusal

pytestmark = [pytest.mark.slow, pytest.mark.root]

SPOKEN = (
    "docs/metrics.md",
    "docs/operate.md",
    "docs/planning.md",
    "docs/start.md",
    "docs/troubleshoot.md",
    "docs/tune.md",
)
"""Pages whose sentences tell what to type; elsewhere they name commands."""

NOT_RUN = {
    "pip install 'kvdepot[": "wants a package index; ./dev setup installs these extras",
    "./dev ": "this test runs in what it makes; CI runs what it has",
    "git clone …": "the machine has a checkout",
    "docker build": "there is no container runtime here",
    "docker run": "the same",
    "kubectl apply": "there is no cluster here; tests/deploy builds the manifests",
    "model = attach(model,": "wants a model; docs/transformers.md has a whole program",
    "cache = SequenceCache(": "wants a context of llama.cpp; tests/adapters/llama_cpp runs it",
    "store.sessions.name(": "parts of a program; tests/store/sessions runs them",
    'report.tiers["object"]': "parts of a program; tests/store/write/test_owed.py runs them",
    "# prefill.py": "tests/store/test_nodes_doc.py runs both programs",
    "# decode.py": "the same",
    "class Folder:": "tests/volumes/test_plugins_doc.py runs the page",
    "class TestFolder(": "the same",
    '"plugin": {"name": "folder"': "the same",
    "kvdepot bench": "minutes; tests/cli/test_bench.py runs all of them, shorter",
    "python benchmarks/": "minutes, or a GPU; tests/benchmarks runs parts of them",
    "kvdepot torture": "minutes; tests/cli/test_torture.py runs it",
    "conversation_trace.jsonl": "a download; tests/sim replays it where it is",
}
"""Lines, or whole blocks of Python, that have this in them: why they are not run."""

MENTIONED = {
    "kvdepot serve": "docs/daemon.md starts it",
    "kvdepot serve --http 127.0.0.1:9400": "docs/daemon.md starts it so",
    "kvdepot plan": "the page has whole commands",
    "kvdepot size": "the same",
}
"""Commands in sentences of these pages that name it, and are not typed."""

BLOCKS_NOT_RUN = {
    "python3 -m venv ~/vllm": "an environment with vLLM: ./dev e2e runs the same",
    "export VLLM_CPU_": "the same",
    "time curl -s localhost:8000": "the same",
    "curl -s localhost:8000": "the same",
    "vllm serve MODEL": "wants vLLM: ./dev e2e tiers runs it",
    "python -m sglang.launch_server": "wants SGLang: ./dev e2e sglang runs its parts",
}
"""Blocks that begin so."""

WHEEL = "kvdepot-0.3.0.dev1-cp311-abi3-manylinux_2_34_x86_64.whl"
INSTEAD = {
    "--for 1h": ("--for 1s", "an hour"),
    f"/opt/kvdepot/bin/pip install '{WHEEL}[http]'": (
        f"ln -s {HOME}/bin/kvdepot /opt/kvdepot/bin/kvdepot",
        "the sources in place of the wheel, which ./dev release installs and tries",
    ),
    "/opt/kvdepot-new/bin/pip install kvdepot-NEW.whl": (
        f"ln -s {HOME}/bin/kvdepot /opt/kvdepot-new/bin/kvdepot",
        "the same",
    ),
    "kvdepot audit list ": (
        "kvdepot audit list || [ $? = 1 ] ",
        "it ends with 1, as the page says",
    ),
    "130807e764b9133e": (
        '$(kvdepot audit list --json | grep -oP \'"namespace": *"\\K[^"]+\' | head -n 1)',
        "a namespace that is in quarantine here",
    ),
}
"""In a line: what is typed in place of what is printed, and why."""

LONG = {
    "kvdepot plan": "11 s of processor time each",
}
"""Lines that are typed with --whole-documents (./dev docs) only, and pages."""
LONG_PAGES = {"docs/guides/llama-cpp.md": "a real model reads a long document, twice"}

CONFIGURED = """mkdir -p /etc/kvdepot /run/kvdepot /var/lib/kvdepot
cat >/etc/kvdepot/kvdepot.toml <<END
[dram]
capacity = "64MiB"
prefault = false

[ssd]
path = "/var/lib/kvdepot/ssd"
capacity = "256MiB"
END
"""
DAEMON = (
    f"{CONFIGURED}started kvdepot serve --config /etc/kvdepot/kvdepot.toml"
    " --socket /run/kvdepot/depot.sock"
)
HTTP = "(umask 077; openssl rand -hex 32 >token)\n" + (
    f"{DAEMON} --http 127.0.0.1:9400 --http-token-file token"
)
TALKS = """
import kvdepot

with kvdepot.open("unix:/run/kvdepot/depot.sock") as store:
    space = store.namespace(model="my-model", layout=kvdepot.KVLayout.opaque(1 << 16, 16))
    for number, name in enumerate(["chat-17", "agent-3"]):
        keys = space.keys(range(1000 * number, 1000 * number + 160))
        store.put_many(keys, [bytes([number]) * (1 << 16) for _ in keys])
        store.sessions.name(name, keys)
    assert store.flush()
"""
MISMATCH = """
import kvdepot
from kvdepot.core.audit import AuditFinding

with kvdepot.open("unix:/run/kvdepot/depot.sock") as store:
    for tenant in ("", "alice"):
        layout = kvdepot.KVLayout.opaque(1 << 16, 16)
        space = store.namespace(model="my-model", layout=layout, tenant=tenant)
        store.audits.report(AuditFinding(space.keys(range(16))[0], False, 1.4, 0.01, 3, "engine"))
"""
SECOND_DRIVE = (
    "install -d -o kvdepot -g kvdepot -m 0700 /mnt/nvme1/kvdepot;"
    " kvdepot tiers add ssd /mnt/nvme1/kvdepot --save"
)
SERVERS = r"^(\.venv/bin/python serve\.py|\.venv/bin/kvdepot proxy)"
"""They are typed into terminals of their own."""
INSTALLED = "the first three blocks of docs/operate.md"
BEFORE = {
    "docs/daemon.md": [CONFIGURED],
    "docs/dashboard.md": [CONFIGURED],
    "docs/audit.md": [DAEMON, TALKS, MISMATCH],
    "docs/ledger.md": [DAEMON, TALKS],
    "docs/metrics.md": [DAEMON],
    "docs/nodes.md": ["echo 127.0.0.1 broker >>/etc/hosts", "started nats-server -a 127.0.0.1"],
    "docs/sessions.md": [HTTP, TALKS],
    "docs/start.md": ["mkdir -p /mnt/nvme"],
    "docs/troubleshoot.md": [INSTALLED, SECOND_DRIVE],
    "docs/tune.md": [INSTALLED],
}
"""What a page takes for granted."""

DEEDS = {
    "Edit `/etc/kvdepot/kvdepot.toml`": "cat >/etc/kvdepot/kvdepot.toml <<END"
    '\n[dram]\ncapacity = "64MiB"\nprefault = false'
    '\n[ssd]\npath = "/mnt/nvme0/kvdepot"\ncapacity = "256MiB"'
    '\n[hdd]\npath = "/mnt/hdd0/kvdepot"\ncapacity = "256MiB"\nEND\n'
    "install -d -o kvdepot -g kvdepot -m 0700 /mnt/{nvme0,nvme2,hdd0}/kvdepot",
    "### Over HTTP": f"python {HOME}/program.py",  # the session that was expired
    "when it has recognised the server": "said serves 2",
    "Now end the server and the proxy with Ctrl-C": "stopped -9\n"
    "started .venv/bin/python serve.py\n"
    "started .venv/bin/kvdepot proxy llama-server --slots /dev/shm/llama-slots"
    " --set dram.capacity=1GiB --set ssd.path=$HOME/llama-kv --set ssd.capacity=4GiB\n"
    "said serves 4",
}
"""What a sentence tells people to do: done at that place."""

PRINTS = {
    'time ask "Which number comes last?"': r'"cache_n": ?[1-9]\d{2}',
    "/api/prefix": '"tokens": ?0',
    "kvdepot stats": "dram",
    "kvdepot tiers list": "ok",
}
"""Steps with these words print something in which this is found."""


def done_at(page: Path) -> list[Step]:
    """Steps of the page and the deeds between them, in its order."""
    steps = steps_of(page)
    text = page.read_text()
    for words, deed in DEEDS.items():
        if words in text:
            line = text.count("\n", 0, text.index(words)) + 1
            steps.append(Step(name_of(page), line, "deed", deed))
    return sorted(steps, key=lambda step: (step.line, step.kind != "deed"))


def shown(text: str) -> str:
    """Text without what differs from run to run: numbers, and widths of columns."""
    text = re.sub(r"\d[\d,.]*", "0", text)
    return "\n".join(" ".join(line.split()) for line in re.sub(r"-{3,}", "-", text).splitlines())


class Reading:
    """One page, on one machine."""

    def __init__(self, machine: Machine, *, whole: bool) -> None:
        self.machine = machine
        self.whole = whole

    def prepare(self, page: str) -> None:
        for deed in BEFORE.get(page, []):
            if deed == INSTALLED:
                operate = next(page for page in PAGES if name_of(page) == "docs/operate.md")
                blocks = [step for step in done_at(operate) if step.kind != "sentence"]
                for step in blocks[:3]:
                    self.take(step)
            elif deed.startswith("\n"):
                self.program(deed)
            else:
                self.machine.run(deed)

    def take(self, step: Step) -> None:
        """Type one step and look at what comes of it."""
        if step.kind == "console":
            self.console(step)
        elif step.kind in (*SHELL, "sentence", "deed"):
            if text := self.typed(step.text):
                printed = self.machine.run(text)
                for words, pattern in PRINTS.items():
                    assert words not in text or re.search(pattern, printed), printed
        elif step.kind == "python":
            if not any(words in step.text for words in NOT_RUN):
                promised = re.findall(r"print\(.*\)\s+# (.*)", step.text)
                lines = self.program(step.text).splitlines()
                assert [line.removeprefix("# ") for line in lines] == promised
        elif step.kind == "toml":
            self.settings(step.text)
        elif step.kind == "json":
            json.loads(step.text)
        else:
            assert step.kind in DATA, f"no one knows what to do with {step.kind}"

    def typed(self, text: str) -> str:
        """As it is typed here."""
        if text.startswith(tuple(BLOCKS_NOT_RUN)):
            return ""
        lines = re.sub(r"\\\n\s*", "", text).splitlines()
        left_out = (*NOT_RUN, *([] if self.whole else LONG))
        text = "\n".join(
            line
            for line in lines
            if line not in MENTIONED and not any(words in line for words in left_out)
        )
        for printed, (typed, _) in INSTEAD.items():
            text = text.replace(printed, typed)
        text = re.sub(r"^kvdepot serve", r"stopped; started \g<0>", text, flags=re.MULTILINE)
        return re.sub(SERVERS, r"started \g<0>", text, flags=re.MULTILINE)

    def console(self, step: Step) -> None:
        command, _, output = step.text.removeprefix("$ ").partition("\n")
        if any(words in step.text for words in LONG) and not self.whole:
            return
        printed = self.machine.run(f"{command} 2>/dev/null || [ $? = 1 ]")
        assert shown(output).strip() in shown(printed), printed

    def program(self, text: str) -> str:
        self.machine.write(HOME / "program.py", text)
        return self.machine.run(f"python {HOME}/program.py")

    def settings(self, text: str) -> None:
        found = tomllib.loads(text)
        self.machine.write(HOME / "printed.toml", text)
        if "model" in found:  # a scenario
            self.machine.run(f"kvdepot plan {HOME}/printed.toml --show")
        elif "project" not in found:
            self.machine.run(f"kvdepot config check --file-only {HOME}/printed.toml")


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> None:
    why = refusal(tmp_path_factory.mktemp("tried"))
    if why:
        pytest.skip(f"no machine for a reader can be made here: {why}")


@pytest.mark.usefixtures("machines")
@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page(page: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    steps = [step for step in done_at(page) if step.kind != "sentence" or name_of(page) in SPOKEN]
    whole = request.config.getoption("--whole-documents")
    if not steps or (name_of(page) in LONG_PAGES and not whole):
        return
    with Machine(tmp_path) as machine:
        reading = Reading(machine, whole=whole)
        reading.prepare(name_of(page))
        for step in steps:
            try:
                reading.take(step)
            except AssertionError as error:
                raise AssertionError(f"{step.place}: {error}") from error


def test_what_is_named_here_is_on_a_page() -> None:
    printed = "\n".join(step.text for page in PAGES for step in steps_of(page))
    prose = "\n".join(page.read_text() for page in PAGES)
    for words in (*NOT_RUN, *BLOCKS_NOT_RUN, *MENTIONED, *INSTEAD, *LONG, *PRINTS):
        assert words in printed, f"no page has {words!r}"
    for words in DEEDS:
        assert words in prose, f"no page says {words!r}"
    names = [name_of(page) for page in PAGES]
    assert {*BEFORE, *SPOKEN, *LONG_PAGES} <= set(names)
