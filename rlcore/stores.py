"""Key-value stores for the rendezvous of processes, closed to strangers.

torch's own `TCPStore` listens on every interface and needs no key: anyone who reaches it can end
the run, or give ranks false answers. So processes of one machine share a folder that only its owner
can enter, and a store for several machines listens on a single given address.
"""

from __future__ import annotations

import fcntl
import ipaddress
import os
import shutil
import socket
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from urllib.parse import quote

import torch.distributed as dist

_LOCK = ".lock"


def bound_store(host: str, timeout_s: float) -> dist.TCPStore:
    """Open a store, held by this process, that listens on a free port of `host` alone.

    Args:
        host: a name or an address of this machine. If a name stands for loopback here, the store
            listens on every interface.
        timeout_s: how long a call waits for a key.

    Raises OSError if `host` is not an address of this machine.
    """
    limit = timedelta(seconds=timeout_s)
    if not reaches_us(host):
        return dist.TCPStore("localhost", 0, None, True, limit, wait_for_workers=False)
    with listen_at(host) as listener:
        port = listener.getsockname()[1]
        return dist.TCPStore(
            host,
            port,
            None,
            True,
            limit,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


def reaches_us(host: str) -> bool:
    """Return whether other nodes reach the address that `host` has here; print a warning if not.

    Some systems resolve the machine's own name to an address of the loopback interface.
    """
    address = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    if not ipaddress.ip_address(address).is_loopback or host in (address, "localhost"):
        return True
    print(
        f"warning: {host} is {address} here, where other nodes do not reach it, so the ranks' store"
        " listens on every interface: give the address itself (MASTER_ADDR), or correct /etc/hosts",
        file=sys.stderr,
        flush=True,
    )
    return False


def listen_at(host: str, port: int = 0) -> socket.socket:
    """Listen on one address; port 0 picks a free port. Raises OSError for a foreign address."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        if port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(socket.SOMAXCONN)
    except OSError:
        listener.close()
        raise
    return listener


def loopback_interface() -> str:
    """Return the name of the loopback interface: lo, on macOS lo0."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    return min(names, default="lo")


class FolderStore:
    """A store for processes of one machine: a file per key, in a folder of mode 0700.

    It has the methods of `torch.distributed.Store` that ranks and their launcher use, with the same
    meaning and errors, except that `get` does not wait for a key.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    @contextmanager
    def made(cls) -> Iterator[FolderStore]:
        """Open a store in a new folder, which is removed at the end."""
        # mkdtemp makes the folder with mode 0700.
        folder = Path(tempfile.mkdtemp(prefix="rlcore-store-"))
        try:
            yield cls(folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def under(self, prefix: str) -> FolderStore:
        """Return the part of the store under `prefix` and a slash, like a `PrefixStore`."""
        folder = self.folder / f"+{quote(prefix, safe='')}"
        folder.mkdir(mode=0o700, exist_ok=True)
        return FolderStore(folder)

    def clone(self) -> FolderStore:
        """Return this store, which has no connection that a waiting thread could block."""
        return self

    def set(self, key: str, value: str) -> None:
        """Write a key; a reader sees the old value or the whole new one."""
        with self._written(value) as new:
            os.replace(new, self._path(key))

    def get(self, key: str) -> bytes:
        """Return the value of an existing key."""
        with _of_torch():
            return self._path(key).read_bytes()

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys exist."""
        return all(self._path(key).exists() for key in keys)

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write a key unless it exists; of several writers the first wins.

        Args:
            expected: must be "", which means a missing key.

        Returns:
            The value that the key has now.
        """
        if expected:
            raise NotImplementedError(f"{key}: only a missing key can be compared and set")
        with self._written(desired) as new:
            try:
                os.link(new, self._path(key))
            except FileExistsError:
                return self.get(key)
        return desired.encode()

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which starts at 0, and return the sum."""
        with _of_torch(), (self.folder / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            total = amount + (int(self.get(key)) if self.check([key]) else 0)
            self.set(key, str(total))
            return total

    def delete_key(self, key: str) -> bool:
        """Remove a key. Returns whether it existed."""
        try:
            self._path(key).unlink()
        except FileNotFoundError:
            return False
        return True

    def _path(self, key: str) -> Path:
        return self.folder / f"={quote(key, safe='')}"

    @contextmanager
    def _written(self, value: str) -> Iterator[Path]:
        """Write a value to a temporary file, which is removed at the end."""
        new = self.folder / f".{uuid.uuid4().hex}"
        with _of_torch():
            try:
                new.write_text(value)
                yield new
            finally:
                new.unlink(missing_ok=True)


Store = dist.Store | FolderStore

# gloo reads these variables when a group is made. Without them each of W ranks makes W requests for
# an address list of W entries; with them it makes one request, for lists of one entry.
_FEW_REQUESTS = {"GLOO_ENABLE_STORE_V2_API": "1", "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER": "1"}


@contextmanager
def few_store_requests() -> Iterator[None]:
    """Let the ranks of new gloo groups find each other with few requests to their store.

    All ranks of a group must create it inside this context. Other groups are unchanged: an engine
    that shares a group of two with a sender does not have these settings.
    """
    before = {name: os.environ.get(name) for name in _FEW_REQUESTS}
    os.environ.update(_FEW_REQUESTS)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def keys_under(prefix: str, store: Store) -> Store:
    """Return the part of a store whose keys begin with `prefix`."""
    return (
        store.under(prefix) if isinstance(store, FolderStore) else dist.PrefixStore(prefix, store)
    )


@contextmanager
def _of_torch() -> Iterator[None]:
    """Raise the error of torch's stores if the folder is gone."""
    try:
        yield
    except OSError as error:
        raise dist.DistStoreError(f"the run's store cannot be used: {error}") from error
