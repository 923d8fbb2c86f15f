"""Token ids through the daemon: laid into the slots by the client, kept by the daemon."""

from pathlib import Path

from tests.support.daemon_clients import StartDaemon
from tests.support.store_contract import BLOCK_BYTES, TOKENS, small, space_of

import kvdepot
from kvdepot.testing.daemons import DaemonProcess
from kvdepot.testing.images import payload_for


def test_what_clients_put_and_fill_is_kept_with_its_token_ids(
    tmp_path: Path, start_daemon: StartDaemon
) -> None:
    daemon: DaemonProcess = start_daemon()
    ids = list(range(500, 500 + 4 * TOKENS))
    with kvdepot.open(daemon.address) as store:
        space = space_of(store)
        keys, plain = space.keys(ids), space.keys(list(range(4 * TOKENS)))
        first = [payload_for(key, BLOCK_BYTES) for key in keys[:2]]
        assert all(store.put_many(keys[:2], first, token_ids=ids[: 2 * TOKENS]))
        with store.reserve(keys[2:], token_ids=ids[2 * TOKENS :]) as slots:
            for index, key in enumerate(keys[2:]):
                view = slots.view(index)
                assert view is not None
                view[:] = payload_for(key, BLOCK_BYTES)
            slots.seal()
        assert all(store.put_many(plain, [payload_for(key, BLOCK_BYTES) for key in plain]))
        assert store.flush(60.0)
    daemon.stop()
    with kvdepot.open(**small(tmp_path / "kv")) as store:
        expected = [ids[at : at + TOKENS] for at in range(0, len(ids), TOKENS)]
        assert store.routing.token_ids(keys) == expected
        assert store.routing.token_ids(plain) == [[]] * 4


def test_a_slot_that_was_used_before_keeps_no_token_ids_of_then(
    tmp_path: Path, start_daemon: StartDaemon
) -> None:
    daemon = start_daemon()
    ids = list(range(4 * TOKENS))
    with kvdepot.open(daemon.address) as store:
        space = space_of(store)
        keys = space.keys(ids)
        payloads = [payload_for(key, BLOCK_BYTES) for key in keys]
        assert all(store.put_many(keys, payloads, token_ids=ids))
        assert store.remove(keys) == len(keys)
        assert all(store.put_many(keys, payloads))
        assert store.flush(60.0)
    daemon.stop()
    with kvdepot.open(**small(tmp_path / "kv")) as again:
        assert again.routing.token_ids(keys) == [[]] * 4
