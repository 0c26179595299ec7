"""The way to process 0 that stays open: bytes both ways, and whose end of it closes."""

import re
import socket

import pytest

from trainer.distributed import relay as relay_lib
from trainer.distributed.relay import Relay

SECONDS = 20  # that an answer may take; none is waited for so long


@pytest.fixture
def coordinator():
  with socket.create_server(("127.0.0.1", 0)) as server:
    server.settimeout(SECONDS)
    yield server


def connected(coordinator):
  """(relay, the client's end, the coordinator's), of a relay that is open."""
  relay = Relay(f"127.0.0.1:{coordinator.getsockname()[1]}")
  relay.open(SECONDS)
  coordinator.accept()[0].close()  # by which it saw that the coordinator listens
  host, port = relay.address.split(":")
  client = socket.create_connection((host, int(port)), timeout=SECONDS)
  theirs, _ = coordinator.accept()
  theirs.settimeout(SECONDS)
  return relay, client, theirs


def received(end, count):
  data = b""
  while len(data) < count:
    data += end.recv(1 << 16)
  return data


def test_bytes_go_both_ways_and_a_client_that_goes_is_no_loss(coordinator):
  relay, client, theirs = connected(coordinator)
  sent = bytes(range(256)) * 1024  # more than it reads at a time
  client.sendall(sent)
  assert received(theirs, len(sent)) == sent
  theirs.sendall(b"answer")
  assert received(client, 6) == b"answer"
  client.close()
  assert theirs.recv(1) == b""
  theirs.close()
  assert not relay.lost.wait(0.1)


def test_a_connection_on_which_nothing_is_said_stays(coordinator, monkeypatch):
  """None of its ends has a limit of time, as a new one has."""
  made, connect = [], socket.create_connection
  monkeypatch.setattr(relay_lib.socket, "create_connection",
                      lambda *given, **options: made.append(connect(*given, **options)) or made[-1])
  _, client, theirs = connected(coordinator)
  theirs.sendall(b"x")
  assert received(client, 1) == b"x"
  # The client's own may be made before or after it.
  (relayed,) = [one for one in made if one.fileno() >= 0 and one.getsockname() == theirs.getpeername()]
  assert relayed.gettimeout() is None


def test_where_the_coordinator_goes_the_client_s_end_stays_open(coordinator):
  relay, client, theirs = connected(coordinator)
  theirs.close()
  assert relay.lost.wait(SECONDS)
  client.settimeout(0.1)
  with pytest.raises(TimeoutError):  # no end: it waits
    client.recv(1)


def test_a_client_that_finds_no_coordinator_is_refused_as_there(coordinator):
  relay, client, theirs = connected(coordinator)
  coordinator.close()
  host, port = relay.address.split(":")
  with socket.create_connection((host, int(port)), timeout=SECONDS) as late:
    assert late.recv(1) == b""
  client.sendall(b"x")  # that of before goes on
  assert received(theirs, 1) == b"x" and not relay.lost.is_set()


def test_nobody_who_listens_is_named(monkeypatch):
  monkeypatch.setattr(relay_lib, "POLL_SECONDS", 0.01)
  with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
  with pytest.raises(TimeoutError, match=re.escape(f"127.0.0.1:{port} did not answer within 0.05 s (")):
    Relay(f"127.0.0.1:{port}").open(0.05)


def test_it_waits_for_one_who_listens_later(monkeypatch):
  monkeypatch.setattr(relay_lib, "POLL_SECONDS", 0.01)
  with socket.create_server(("127.0.0.1", 0)) as server:
    port, tries = server.getsockname()[1], []
  connect = socket.create_connection

  def late(address, **options):
    tries.append(address)
    if len(tries) < 3:
      raise ConnectionRefusedError
    return connect(address, **options)

  monkeypatch.setattr(relay_lib.socket, "create_connection", late)
  with socket.create_server(("127.0.0.1", port)):
    Relay(f"127.0.0.1:{port}").open(SECONDS)
  assert tries == [("127.0.0.1", port)] * 3


def test_an_ipv6_address_stands_in_brackets(monkeypatch):
  asked = []
  monkeypatch.setattr(relay_lib.socket, "create_connection",
                      lambda address, **_: asked.append(address) or socket.socket())
  relay = Relay("[::1]:7000")
  relay.open(SECONDS)
  assert asked == [("::1", 7000)] and re.fullmatch(r"127\.0\.0\.1:\d+", relay.address)
