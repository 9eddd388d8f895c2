"""A dictionary of what calls of some kind need once they have been checked, of bounded size."""

from typing import Generic, TypeVar

Key, Value = TypeVar("Key"), TypeVar("Value")


class Kept(dict, Generic[Key, Value]):
    """Emptied when one more than ``most`` would be in it: what was there is worked out again when it is asked for."""

    def __init__(self, most: int):
        super().__init__()
        self.most = most

    def __setitem__(self, key: Key, value: Value):
        if len(self) >= self.most:
            self.clear()
        super().__setitem__(key, value)
