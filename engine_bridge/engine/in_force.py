"""What we lay over a method of one of vLLM's objects, and whether it is still what is called.

Other plugins hook the same methods. One may wrap ours, put back what it had found before us, or take away all of an
instance's attributes of that name. So ours is never taken out blindly: only while it lies on top, and then what lay
beneath comes back; buried under somebody else's it stays where it is and passes everything through. And what must not
be lost is looked at before every step and laid on top once more where it is not: beneath a second layer of ours the
first one passes through, so nothing is done twice.
"""

# ruff: noqa: ANN401 - what is laid over has whatever signature this vLLM gives it

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Final

logger = logging.getLogger("vllm.kvctl")

MOST_LAYERS: Final = 8
"""So often a method is laid over once more; somebody who insists on lying on top as well would have it without end."""

_ABSENT: Final = object()

Body = Callable[..., Any]
"""Called with what lies beneath, then with the call's own arguments."""


class Layer:
    """One method of ours over one instance's. `lay` and `lift` may be called in any order, any number of times."""

    def __init__(self, owner: Any, name: str, body: Body) -> None:
        """`body(beneath, *arguments)` runs in place of `owner.name(*arguments)`. Nothing is laid yet."""
        self._owner = owner
        self._name = name
        self._body = body
        self._mine: dict[Callable[..., Any], object] = {}
        """What was laid -> the instance's attribute that it covered."""
        self._last: object = None
        """What was laid last: where it still lies on top, as nearly always, there is nothing to look into."""
        self._active = False
        self._inside = 0
        """The thread that is inside; an engine in its caller's process is called by several."""
        self._warned = False

    @property
    def on_top(self) -> bool:
        """Whether a call of the method reaches ours first."""
        return self._active and vars(self._owner).get(self._name) in self._mine

    def lay(self) -> None:
        """Be in force: on top, unless somebody insists on lying above. RuntimeError when the owner does not let us."""
        covered = self._owner.__dict__.get(self._name, _ABSENT)
        self._active = True
        if covered in self._mine:
            return
        mine = next((mine for mine, was in self._mine.items() if was is covered), None)
        if mine is None and len(self._mine) >= MOST_LAYERS:
            self._warn()
            return
        mine = mine or self._over(covered)
        setattr(self._owner, self._name, mine)
        if vars(self._owner).get(self._name) is not mine:
            self._active = False
            raise RuntimeError(f"{type(self._owner).__name__}.{self._name} cannot be laid over: it stays what it was")
        self._mine[mine] = covered
        self._last = mine

    def lift(self) -> None:
        """Be out of force. What others laid over ours stays, and ours beneath it passes everything through."""
        self._active = False
        while (mine := vars(self._owner).get(self._name)) in self._mine:
            covered = self._mine.pop(mine)
            if covered is _ABSENT:
                delattr(self._owner, self._name)
            else:
                setattr(self._owner, self._name, covered)

    def _over(self, covered: Any) -> Callable[..., Any]:
        body = self._body
        beneath = self._of_class if covered is _ABSENT else covered
        this_thread = threading.get_ident

        def laid_over(*args: Any, **kwargs: Any) -> Any:
            thread = this_thread()
            if not self._active or self._inside == thread:
                return beneath(*args, **kwargs)
            self._inside = thread
            try:
                return body(beneath, *args, **kwargs)
            finally:
                self._inside = 0

        return laid_over

    def _of_class(self, *args: Any, **kwargs: Any) -> Any:
        # Asked anew at each call: somebody may wrap the method on the class while ours lies over it on the instance.
        return getattr(type(self._owner), self._name)(self._owner, *args, **kwargs)

    def _warn(self) -> None:
        if not self._warned:
            self._warned = True
            logger.warning(
                "kvctl: %s.%s has been covered %d times by others; ours stays beneath",
                type(self._owner).__name__,
                self._name,
                MOST_LAYERS,
            )


class Layers:
    """Layers that are looked at together, before every step: nearly always there is nothing to do, and nothing is
    called then.
    """

    def __init__(self, *layers: Layer) -> None:
        """Nothing is laid yet."""
        self._layers = layers

    def lay(self) -> None:
        """See Layer.lay."""
        for layer in self._layers:
            if layer._owner.__dict__.get(layer._name) is not layer._last or not layer._active:
                layer.lay()

    def lift(self) -> None:
        """See Layer.lift."""
        for layer in self._layers:
            layer.lift()
