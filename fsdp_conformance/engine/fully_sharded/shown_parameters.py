"""
The parameters of a unit as modules see them: which object is registered where, and when.

    original parameter   the object that the module had and the optimizer has: 1D, this rank's part of the shard
    leaf                 what a forward uses: a parameter of the original shape, a view of the unsharded storage
    place                a module's parameter table and a key, where either of them is registered
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fsdp_conformance.engine.errors import ParameterReplaced, UsedWhileSharded

#: Added to the version of a leaf without memory, to be recognised in autograd's message.
FREED = 1_000_000


class Place:
    """Where a parameter is registered: under a key of a module, which it does not keep alive."""

    __slots__ = ("_module", "key", "registry")

    def __init__(self, module: nn.Module, key: str) -> None:
        self.registry = module._parameters
        self.key = key
        # Modules that override __setattr__ (RNNs, for example) also keep their parameters elsewhere.
        is_usual = getattr(type(module), "__setattr__", None) is nn.Module.__setattr__
        # Weakly: the module has its unit, and a cycle would keep the model until Python collects cycles, as with FSDP1
        # (pytorch#183211).
        self._module = None if is_usual else weakref.ref(module)

    def register(self, parameter: nn.Parameter) -> None:
        """Register `parameter` under the key."""
        module = None if self._module is None else self._module()
        if module is None:
            self.registry[self.key] = parameter
        else:
            setattr(module, self.key, parameter)

    def copied(self, memo: Mapping[int, Any]) -> Place:
        """The same place in a deep copy of the module."""
        twin = Place.__new__(Place)
        twin.key, twin.registry = self.key, memo[id(self.registry)]
        module = None if self._module is None else self._module()
        twin._module = None if module is None else weakref.ref(memo[id(module)])
        return twin


@dataclass(eq=False, slots=True)
class Member:
    """One parameter of a unit."""

    name: str
    """Its name below the unit's module; the first of its names if it is tied."""
    parameter: nn.Parameter
    places: list[Place]
    shape: torch.Size = field(init=False)
    """The shape of the whole parameter, unsharded."""

    guard_key: int | None = field(init=False, default=None)
    """The key of the guard among the hooks of the original; None before `guard`."""

    def __post_init__(self) -> None:
        self.shape = self.parameter.shape

    def copied(self, memo: Mapping[int, Any]) -> Member:
        """The same parameter of a deep copy of the modules."""
        twin = Member(self.name, memo[id(self.parameter)], [place.copied(memo) for place in self.places])
        twin.shape = self.shape
        return twin

    def guard(self) -> None:
        """Make a backward that reaches the original raise: it is a shard, so its gradient would be wrong."""
        name = self.name

        def refuse(_: Tensor) -> None:
            raise UsedWhileSharded(
                f"{name} was used while it was sharded: use it only in the forward of its unit",
                where="backward",
            )

        self.guard_key = self.parameter.register_hook(refuse).id  # type: ignore[no-untyped-call]

    def show_hooks(self, leaf: nn.Parameter) -> None:
        """Let hooks that users have registered on the original see the gradients of the leaf."""
        # All but the guard, by its key: a hook that was registered before wrapping comes before it.
        registered = self.parameter._backward_hooks or {}
        hooks = OrderedDict((key, hook) for key, hook in registered.items() if key != self.guard_key)
        if hooks != leaf._backward_hooks:
            leaf._backward_hooks = hooks


class ShownParameters:
    """
    The parameters of `members` as modules see them: originals between steps, leaves in forward and backward.

    `name`: that of their unit, for messages.
    """

    def __init__(self, members: Sequence[Member], name: str) -> None:
        self.members = list(members)
        self.name = name
        self.leaves: list[nn.Parameter] = []
        self.on_gradient: Callable[[Tensor], None] | None = None
        """Called with a leaf whenever it has received a gradient, from the next `follow_flags` on."""
        # The versions of the leaves when they were sealed; empty while they are not.
        self._versions: list[int] = []
        self._places = [(place, index) for index, member in enumerate(members) for place in member.places]
        self.registered: Sequence[nn.Parameter] = [member.parameter for member in members]
        """The parameters that modules have now, one for each member: originals, leaves, or whole copies."""

    def view(self, views: Sequence[Tensor]) -> None:
        """Let the leaves be views of new memory, in the shapes of the parameters."""
        for index, member in enumerate(self.members):
            if index < len(self.leaves):
                # The same object, with its hooks.
                self.leaves[index].data = views[index]
            else:
                self.leaves.append(_leaf(member.parameter, views[index]))

    # --- memory ------------------------------------------------------------------------------------------------------

    def seal(self) -> None:
        """
        Let autograd refuse to use the leaves, whose memory is gone.

        What a user has taken out of a forward unseen, in an attribute for example, leads to a backward that no hook
        announces. It would compute with whatever is in the memory, or where it was. Autograd raises if the version of
        what it has saved is another one.
        """
        if not self._versions:
            self._versions = [leaf._version for leaf in self.leaves]
            _set_versions(self.leaves, [version + FREED for version in self._versions])

    def unseal(self) -> None:
        """Let autograd use the leaves again, whose values are back, the same as before."""
        if self._versions:
            _set_versions(self.leaves, self._versions)
            self._versions = []

    # --- registering -------------------------------------------------------------------------------------------------

    def register(self, parameters: Sequence[nn.Parameter]) -> None:
        """
        Register `parameters`, one for each member, with the modules.

        A parameter that a user has registered in place of one of them stays there: `check_places` raises for it.
        """
        for place, index in self._places:
            if place.registry.get(place.key) is self.registered[index]:
                place.register(parameters[index])
        self.registered = parameters

    def register_leaves(self) -> None:
        """Let modules see whole parameters."""
        self.register(self.leaves)

    def register_originals(self) -> None:
        """Let modules see the objects that the optimizer has."""
        self.register([member.parameter for member in self.members])

    def check_places(self) -> None:
        """Raise ParameterReplaced if a module no longer has the parameter that was registered with it last."""
        replaced = [
            self.members[index].name
            for place, index in self._places
            if place.registry.get(place.key) is not self.registered[index]
        ]
        if replaced:
            raise ParameterReplaced(
                f"{', '.join(replaced)} was replaced by another parameter object after wrapping",
                where=self.name,
                hint="Wrap the module again, or write the new values into the parameter.",
            )

    # --- flags and hooks ---------------------------------------------------------------------------------------------

    def follow_flags(self) -> None:
        """Let the leaves have the `requires_grad` and the hooks of the originals, and report their gradients."""
        for member, leaf in zip(self.members, self.leaves, strict=True):
            parameter = member.parameter
            if leaf.requires_grad != parameter.requires_grad:
                leaf.requires_grad_(parameter.requires_grad)
            if parameter.requires_grad and member.guard_key is None:
                member.guard()
            if parameter.requires_grad and (len(parameter._backward_hooks or ()) > 1 or leaf._backward_hooks):
                member.show_hooks(leaf)
            if parameter.requires_grad and self.on_gradient is not None and not leaf._post_accumulate_grad_hooks:
                leaf.register_post_accumulate_grad_hook(self.on_gradient)  # type: ignore[no-untyped-call]


def _leaf(original: nn.Parameter, view: Tensor) -> nn.Parameter:
    leaf = nn.Parameter(view, requires_grad=original.requires_grad)
    leaf.__dict__.update(original.__dict__)  # attributes that users have set
    return leaf


def _set_versions(tensors: Sequence[Tensor], versions: Sequence[int]) -> None:
    set_version: Any = torch._C._autograd._unsafe_set_version_counter
    try:
        set_version(tensors, versions)
    except TypeError:  # in older versions of torch: one tensor at a time
        for tensor, version in zip(tensors, versions, strict=True):
            set_version(tensor, version)
