"""Sockets between engines: a peer without the secret gets no further than the handshake."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from zmq.utils.monitor import recv_monitor_message

from twostroke.errors import ConfigError
from twostroke.network_auth import engine_secret, protect_connector, protect_listener
from twostroke.route.pool_settings import PoolSettings

pytestmark = pytest.mark.core  # bounds of security

PATIENCE_MS = 30_000
SECRET = "the secret of one server's engines"
PART = bytes(60_000)


class Listener:
    def __init__(self, context: zmq.Context[Any]) -> None:
        self._context = context
        self.socket = context.socket(zmq.PULL)
        protect_listener(self.socket, SECRET)
        self.monitor = self.socket.get_monitor_socket()
        self.socket.bind("tcp://127.0.0.1:*")

    def peer(self, secret: str | None) -> zmq.Socket[Any]:
        peer = self._context.socket(zmq.PUSH)
        peer.sndhwm = 4
        protect_connector(peer, secret)
        peer.connect(self.socket.get_string(zmq.LAST_ENDPOINT))
        return peer

    def wait_until_refused(self) -> None:
        while self.monitor.poll(PATIENCE_MS):
            event = recv_monitor_message(self.monitor)["event"]
            assert event != zmq.EVENT_HANDSHAKE_SUCCEEDED
            if event in (
                zmq.EVENT_DISCONNECTED,
                zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
                zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
                zmq.EVENT_HANDSHAKE_FAILED_AUTH,
            ):
                return
        raise AssertionError("the peer was not refused")


@pytest.fixture
def listener() -> Iterator[Listener]:
    context: zmq.Context[Any] = zmq.Context()
    yield Listener(context)
    context.destroy(linger=0)


def test_a_peer_with_the_secret_is_heard(listener: Listener) -> None:
    listener.peer(SECRET).send(b"hello")
    assert listener.socket.poll(PATIENCE_MS)
    assert listener.socket.recv() == b"hello"


@pytest.mark.parametrize("secret", [None, "the secret of another server's engines"])
def test_endless_parts_of_a_stranger_are_never_taken_in(
    listener: Listener, secret: str | None
) -> None:
    stranger = listener.peer(secret)
    for _ in range(64):  # of one message that does not end
        stranger.send(PART, zmq.SNDMORE)
    listener.wait_until_refused()
    listener.peer(SECRET).send(b"hello")
    assert listener.socket.poll(PATIENCE_MS)
    assert listener.socket.recv() == b"hello"


def test_the_secret_comes_from_the_environment_or_a_file_or_by_chance(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("TWOSTROKE_ENGINE_SECRET", "TWOSTROKE_ENGINE_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    assert len(engine_secret()) == 64
    assert engine_secret() != engine_secret()
    (tmp_path / "secret").write_text(SECRET + "\n")
    monkeypatch.setenv("TWOSTROKE_ENGINE_SECRET_FILE", str(tmp_path / "secret"))
    assert engine_secret() == SECRET
    monkeypatch.setenv("TWOSTROKE_ENGINE_SECRET_FILE", str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="cannot be read"):
        engine_secret()
    monkeypatch.setenv("TWOSTROKE_ENGINE_SECRET", "short")
    with pytest.raises(ConfigError, match="at least 32"):
        engine_secret()


def test_pools_and_clusters_have_one_secret_and_do_not_show_it() -> None:
    from twostroke.config import EngineConfig

    for settings in ({"prefill_engines": 1, "decode_engines": 2}, {"ray": "auto"}):
        configs = [one.config for one in PoolSettings(**settings).engines(EngineConfig())]  # type: ignore[arg-type]
        (secret,) = {config.engine_secret for config in configs}
        assert secret
        assert secret not in repr(configs)
    (alone,) = PoolSettings().engines(EngineConfig())
    assert alone.config.engine_secret is None
