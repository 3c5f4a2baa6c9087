"""What threads hand each other: orders and requests to the owner thread, events back. Everyone is woken, nobody polls.

The locks are re-entrant, so that a signal handler may post while its own thread is inside one of these calls.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from polytoken.errors import PolytokenError

OrderT = TypeVar("OrderT")
ItemT = TypeVar("ItemT")


class Inbox(Generic[OrderT, ItemT]):
    """The owner's side: orders are taken first and without bound, items in order of arrival and up to `capacity`."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._changed = threading.Condition(threading.RLock())
        self._orders: deque[OrderT] = deque()
        self._items: deque[ItemT] = deque()
        self._shut: PolytokenError | None = None  # raised to whoever still posts

    def order(self, order: OrderT) -> None:
        """Leave an order. Raises what `shut` was given, once it was."""
        with self._changed:
            self._check()
            self._orders.append(order)
            self._changed.notify_all()

    def put(self, item: ItemT, *, wait: bool) -> bool:
        """Leave an item. While the box is full, block with `wait`, else return False with nothing done."""
        with self._changed:
            while wait and len(self._items) >= self.capacity and self._shut is None:
                self._changed.wait()
            self._check()
            if len(self._items) >= self.capacity:
                return False
            self._items.append(item)
            self._changed.notify_all()
            return True

    def take_orders(self, *, wait: bool) -> list[OrderT]:
        """Everything ordered so far; with `wait`, block until there is an order, an item or the end."""
        with self._changed:
            while wait and not self._orders and not self._items and self._shut is None:
                self._changed.wait()
            orders = list(self._orders)
            self._orders.clear()
            return orders

    def take_item(self) -> ItemT | None:
        with self._changed:
            if not self._items:
                return None
            self._changed.notify_all()
            return self._items.popleft()

    def remove(self, which: Callable[[ItemT], bool]) -> bool:
        """Take out the first item of this kind; False when there is none."""
        with self._changed:
            for item in self._items:
                if which(item):
                    self._items.remove(item)
                    self._changed.notify_all()
                    return True
            return False

    def items(self) -> list[ItemT]:
        """A copy of what waits."""
        with self._changed:
            return list(self._items)

    def shut(self, error: PolytokenError) -> None:
        """Accept nothing more; what is inside stays for the owner. Only the first call counts."""
        with self._changed:
            self._shut = self._shut or error
            self._changed.notify_all()

    @property
    def is_shut(self) -> bool:
        return self._shut is not None

    def _check(self) -> None:
        if self._shut is not None:
            raise type(self._shut)(str(self._shut), code=self._shut.code)  # a fresh one: threads share no traceback


class Outbox(Generic[ItemT]):
    """One consumer's side: events in order, without bound, since the owner thread must never wait for a consumer."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.RLock())
        self._items: deque[ItemT] = deque()

    def put(self, item: ItemT) -> None:
        with self._changed:
            self._items.append(item)
            self._changed.notify_all()

    def get(self, timeout: float | None) -> ItemT:
        """The next item. Raises TimeoutError after `timeout` seconds without one; None waits for ever."""
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._items), timeout):
                raise TimeoutError
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def wait_below(self, size: int, *, unless: Callable[[], bool]) -> None:
        """Block while `size` items or more wait here, and `unless()` is false."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._items) < size or unless())
