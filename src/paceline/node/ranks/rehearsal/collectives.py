"""Record the collectives that a script calls: their order, kinds, shapes, types and roots."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from .recording import facts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from .recording import Record


class _Kind(NamedTuple):
    tensor: str = ""  # the argument whose shape and type must be the same on all ranks
    root: str = ""  # the argument with a rank that all must name
    listed: str = ""  # the argument with a tensor for each rank


_KINDS = {
    "all_reduce": _Kind("tensor"),
    "broadcast": _Kind("tensor", "src"),
    "reduce": _Kind("tensor", "dst"),
    "all_gather": _Kind("tensor", listed="tensor_list"),
    "all_gather_into_tensor": _Kind("input_tensor"),
    "gather": _Kind("tensor", "dst", "gather_list"),
    "scatter": _Kind("tensor", "src", "scatter_list"),
    "reduce_scatter": _Kind("output", listed="input_list"),
    "reduce_scatter_tensor": _Kind("output"),
    "all_to_all": _Kind(listed="output_tensor_list"),
    "all_to_all_single": _Kind(),
    "barrier": _Kind(),
    "monitored_barrier": _Kind(),
    "all_gather_object": _Kind(listed="object_list"),
    "gather_object": _Kind("", "dst", "object_gather_list"),
    "broadcast_object_list": _Kind("", "src"),
    "scatter_object_list": _Kind("", "src", "scatter_object_input_list"),
}
_PEER = {"send": "dst", "isend": "dst", "recv": "src", "irecv": "src"}


class Collectives:
    """The collectives of this rank; `name_of` says which parameter or gradient a tensor is."""

    def __init__(self, record: Record, name_of: Callable[[Any], str], reduced: Callable[[str, Any, int], None]) -> None:
        """Patch the functions of torch.distributed, for the script and for libraries."""
        self._record, self._name_of, self._reduced = record, name_of, reduced
        self._depth = 0
        self._c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
        for name, kind in _KINDS.items():
            self._patch(name, functools.partial(self._collective, name, kind))
        for name, peer in _PEER.items():
            self._patch(name, functools.partial(self._message, name, peer))
        self._patch("new_group", self._new_group)
        self._patch("init_process_group", self._init)

    def _patch(self, name: str, ours: Callable[..., Any]) -> None:
        theirs = getattr(self._c10d, name, None)
        if theirs is None:  # in another version of torch
            return
        signature = inspect.signature(theirs)

        @functools.wraps(theirs)
        def called(*args: Any, **kwargs: Any) -> Any:
            if self._depth or not self._record.is_rank:
                return theirs(*args, **kwargs)
            try:
                given = signature.bind(*args, **kwargs)
            except TypeError:
                return theirs(*args, **kwargs)  # which raises it too
            given.apply_defaults()
            self._depth += 1
            try:
                return ours(given.arguments, functools.partial(theirs, *args, **kwargs))
            finally:
                self._depth -= 1

        for module in (self._c10d, sys.modules["torch.distributed"]):
            setattr(module, name, called)

    def _group(self, group: Any) -> tuple[str, Sequence[int]]:
        """The name and the ranks of a group; no ranks if this one is none of them."""
        c10d = self._c10d
        with contextlib.suppress(Exception):
            group = c10d._get_default_group() if group is None else group
            if group is not c10d.GroupMember.NON_GROUP_MEMBER:
                return str(group.group_name), c10d.get_process_group_ranks(group)
        return "", []

    def _collective(self, name: str, kind: _Kind, given: dict[str, Any], call: functools.partial[Any]) -> Any:
        group, ranks = self._group(given.get("group"))
        if not ranks:
            return call()
        tensor: Any = given.get(kind.tensor)
        facts = dict(facts_of(tensor))
        size = tensor.numel() if hasattr(tensor, "numel") else 0
        if size:
            facts["size"] = size
            facts["which"] = self._name_of(tensor) if name in ("all_reduce", "broadcast", "reduce") else ""
        root = given.get(kind.root)
        if root is None and given.get(f"group_{kind.root}") is not None:
            root = ranks[given[f"group_{kind.root}"]]
        if root is not None:
            facts["root"] = int(root)
        if given.get("op") is not None and name.startswith(("all_reduce", "reduce")):
            facts["op"] = str(given["op"]).rpartition(".")[2]
        if kind.listed and isinstance(given.get(kind.listed), list):
            facts["listed"] = len(given[kind.listed])
        self._record.note(
            "collective", kind=name, group=group, ranks=list(ranks), at=self._record.where(sys._getframe(2)), **facts
        )
        self._record.clock += 1
        result = call()
        if name == "all_reduce" and facts.get("op") == "SUM" and not given.get("async_op") and facts.get("which"):
            self._reduced(facts["which"], tensor, len(ranks))
        return result

    def _message(self, name: str, peer: str, given: dict[str, Any], call: functools.partial[Any]) -> Any:
        self._record.note(
            "message", kind=name, peer=given.get(peer), at=self._record.where(sys._getframe(2)),
            **facts_of(given.get("tensor")),
        )  # fmt: skip
        return call()

    def _new_group(self, given: dict[str, Any], call: functools.partial[Any]) -> Any:
        if not given.get("use_local_synchronization"):
            group, ranks = self._group(None)
            wanted = given.get("ranks")
            self._record.note(
                "collective", kind="new_group", group=group, ranks=list(ranks),
                of=sorted(map(int, wanted)) if wanted is not None else None, at=self._record.where(sys._getframe(2)),
            )  # fmt: skip
        return call.func(*call.args, **_on_cores(call.keywords))

    def _init(self, given: dict[str, Any], call: functools.partial[Any]) -> Any:
        kwargs = {name: it for name, it in _on_cores(call.keywords).items() if name != "device_id"}  # there is no GPU
        args = call.args
        if args and isinstance(args[0], str):
            args = ("gloo" if "nccl" in args[0] else args[0], *args[1:])
        result = call.func(*args, **kwargs)
        self._record.note("joined", at=self._record.where(sys._getframe(2)))
        return result


def _on_cores(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments with gloo in the place of NCCL."""
    backend = kwargs.get("backend")
    return {**kwargs, "backend": "gloo"} if isinstance(backend, str) and "nccl" in backend else kwargs
