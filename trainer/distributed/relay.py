"""A way to process 0 that stays open when process 0 is gone.

JAX's client of the coordinator ends its process within a millisecond of losing the connection, with a C++ stack trace
that names nobody. So the client is given a port on its own host, and what it sends there is passed on to the
coordinator. When the coordinator's end closes, the client's end is left open, `lost` is set, and
trainer/distributed/liveness.py has the time to say who is missing.
"""

import contextlib
import socket
import threading
import time

# Until the coordinator listens: it is started by hand, or on a host that is still coming up.
POLL_SECONDS = 0.5


class Relay:
  """Passes bytes between a port here and `address`, until the process ends.

  Args:
    address: host:port of the coordinator; an IPv6 address stands in brackets.

  Attributes:
    address: host:port to give to the client instead.
    lost: set once a connection was closed by the coordinator's side.
  """

  def __init__(self, address: str):
    host, _, port = address.rpartition(":")
    self._target = host.strip("[]"), int(port)
    self.lost = threading.Event()
    self._server = socket.create_server(("127.0.0.1", 0))
    self.address = f"127.0.0.1:{self._server.getsockname()[1]}"

  def open(self, timeout_seconds: float) -> None:
    """Waits until the coordinator listens, then starts to pass on what comes.

    Raises:
      TimeoutError: with the last reason.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
      try:
        socket.create_connection(self._target, timeout=10).close()
        break
      except OSError as error:
        if time.monotonic() > deadline:
          host, port = self._target
          raise TimeoutError(f"{host}:{port} did not answer within {timeout_seconds:g} s ({error})") from error
      time.sleep(POLL_SECONDS)
    threading.Thread(target=self._accept, name="relay", daemon=True).start()

  def _accept(self) -> None:
    while True:
      client, _ = self._server.accept()
      try:
        coordinator = socket.create_connection(self._target, timeout=10)
      except OSError:
        client.close()  # as if it had been refused at the coordinator; the client tries again
        continue
      coordinator.settimeout(None)
      closing = threading.Event()
      for end in (self._up, self._down):
        threading.Thread(target=end, args=(client, coordinator, closing), name="relay", daemon=True).start()

  def _up(self, client: socket.socket, coordinator: socket.socket, closing: threading.Event) -> None:
    if _source_ended(client, coordinator):
      closing.set()
      _shut(coordinator)
    else:
      self.lost.set()  # the client's end stays open: it waits for an answer

  def _down(self, client: socket.socket, coordinator: socket.socket, closing: threading.Event) -> None:
    if _source_ended(coordinator, client) and not closing.is_set():
      self.lost.set()
    else:
      _shut(client)


def _source_ended(source: socket.socket, target: socket.socket) -> bool:
  """Passes everything on; whether it was the source that ended, or else the target."""
  while True:
    try:
      data = source.recv(1 << 16)
    except OSError:
      return True
    if not data:
      return True
    try:
      target.sendall(data)
    except OSError:
      return False


def _shut(connection: socket.socket) -> None:
  with contextlib.suppress(OSError):
    connection.shutdown(socket.SHUT_RDWR)
