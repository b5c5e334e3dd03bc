"""Base classes of loaders that scripts derive from: `horovod.data.data_loader_base`."""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOOK = 0.1  # seconds between two looks whether the loader is closed


class BaseDataLoader:
    """A loader: a subclass gives its batches in `_iterate`."""

    def __len__(self) -> int:
        """The number of batches."""
        raise NotImplementedError

    def _iterate(self) -> Iterator[Any]:
        """The batches."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[Any]:
        for batch in self._iterate():
            yield self._process_batch(batch)

    def _process_batch(self, batch: Any) -> Any:
        """What a batch becomes before it is used, such as a copy on a device."""
        return batch


class AsyncDataLoaderMixin:
    """Reads batches ahead in a thread. It stands before the loader among the base classes.

    An error of the loader is raised where the batch would be used, and the thread of an epoch that was left ends.

    Args:
        async_loader_queue_size: number of batches that are read ahead; 0 reads none ahead.
        args, kwargs: of the loader.
    """

    def __init__(self, async_loader_queue_size: int = 5, *args: Any, **kwargs: Any) -> None:
        self.async_loader_queue_size = async_loader_queue_size
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        super().__init__(*args, **kwargs)

    def close_async_loader(self) -> None:
        """End the thread that reads."""
        self._closed.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def __iter__(self) -> Iterator[Any]:
        self.close_async_loader()  # of an epoch that was left
        if self.async_loader_queue_size <= 0:
            yield from super().__iter__()  # type: ignore[misc]  # of the loader behind it
            return
        self._closed = closed = threading.Event()
        read: queue.Queue[tuple[Any, BaseException | None, bool]] = queue.Queue(self.async_loader_queue_size)
        self._thread = threading.Thread(target=self._read, args=(read, closed), daemon=True)
        self._thread.start()
        try:
            while True:
                batch, error, is_last = read.get()
                if error is not None:
                    raise error
                if is_last:
                    break
                yield self._process_batch(batch)  # type: ignore[attr-defined]  # of the loader behind it
        finally:
            closed.set()

    def _read(self, read: queue.Queue[tuple[Any, BaseException | None, bool]], closed: threading.Event) -> None:
        """In the thread: read the batches, and at last say that there are no more."""
        error = None
        try:
            for batch in self._iterate():  # type: ignore[attr-defined]  # of the loader behind it
                if not _put(read, (batch, None, False), closed):
                    return
        except BaseException as raised:
            error = raised
        _put(read, (None, error, True), closed)


def _put(read: queue.Queue[Any], what: Any, closed: threading.Event) -> bool:
    while not closed.is_set():
        try:
            read.put(what, timeout=_LOOK)
        except queue.Full:
            continue
        return True
    return False
