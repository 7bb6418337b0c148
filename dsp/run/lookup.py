"""Look up the script of a forward: a node is found by the operation and the tensors it reads, whenever it runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from dsp.plan.script import Alike, Key, Number, PlannedNode, Read, Script, Where, loose, numbers_in
from dsp.sharded import Sharded
from dsp.signature import Bound

RECIPES = 65536  # recipes kept for one plan, at most
NUMBERS = 1 << 32  # tensors numbered in one forward, at most


class NoKey(Exception):
    """Raised for an argument that cannot be part of a key, or a tensor that has to be opened first."""


class InTurn(NamedTuple):
    """The recipes of several nodes with the same key, by node index; recipes not yet made are missing."""

    alike: Alike
    made: dict[int, Any]


class Lookup:
    """The nodes of a script, found one by one as a forward runs.

    recipes: how nodes run, cached by key. first: tensor number 0 of this forward; each forward numbers its tensors
    from `NUMBERS` above the forward before, and a tensor that is not in the script has the number first - 1. turns:
    for nodes that share a key, how many have run, by the `id` of their `Alike`.
    """

    def __init__(self, script: Script | None, recipes: dict[Any, Any], first: int, turns: Mapping[int, int]) -> None:
        self.script, self.recipes, self.first, self.turns = script, recipes, first, dict(turns)
        self.on_wholes = script.on_wholes if script is not None else frozenset[str]()
        self.unknown: Where | None = None  # the forward's first stage call or operation that is not in the script
        self.declared: dict[int, tuple[DTensor, int]] = {}  # by id: declared inputs passed as DTensors, with numbers

    def reads(self, tensors: Sequence[Tensor], shells: Sequence[Sharded | None]) -> list[Read]:
        """The tensors of a node in the form that keys use."""
        return [
            tuple(t.shape) if s is None else Number(s.number - self.first, s.at.shape) for t, s in zip(tensors, shells)
        ]

    def find(self, key: Key) -> tuple[Alike | None, PlannedNode | None]:
        """The nodes with this key, and the one whose turn it is; if none, the only node that reads these tensors."""
        if self.script is None:
            return None, None
        alike = self.script.nodes.get(key)
        if alike is None:
            node = self.script.loosely.get(loose(key))
            if node is None and (key[0] == "stage" or any(True for _ in numbers_in(key[2]))):
                self.unknown = self.unknown or (key[0], -1, key[1])
            return None, node
        return alike, self.in_turn(alike)

    def in_turn(self, alike: Alike) -> PlannedNode:
        """The next node in order among those that share a key."""
        nodes = alike.nodes
        if len(nodes) == 1:
            return nodes[0]
        turn = self.turns.get(id(alike), 0)
        self.turns[id(alike)] = turn + 1
        return nodes[min(turn, len(nodes) - 1)]

    def declare(self, bound: Iterable[Bound]) -> None:
        """Number the declared inputs that were passed sharded."""
        assert self.script is not None
        for b in bound:
            number = self.script.numbers.get(b.param)
            if number is not None and isinstance(b.tensor, Sharded):
                b.tensor.number = self.first + number
            elif number is not None and isinstance(b.tensor, DTensor):
                self.declared[id(b.tensor)] = b.tensor, number

    def met(self, t: Sharded) -> None:
        """Number a tensor that an earlier call left behind, such as a cache."""
        _, node = self.find(("left", "", (t.at.shape, t.at.cut)))
        t.number = self.first + (-1 if node is None else node.results[0])

    def keep_in_turn(self, key: Any, alike: Alike | None, node: PlannedNode | None, made: Any) -> None:
        """Keep the recipe of a node, separately for each node that shares the key; without a key, keep nothing."""
        if key is None:
            return
        if alike is None or node is None or len(alike.nodes) == 1:
            self.keep(key, made)
            return
        if type(self.recipes.get(key)) is not InTurn:
            self.keep(key, InTurn(alike, {}))
        self.recipes[key].made[node.index] = made

    def keep(self, key: Any, recipe: Any) -> None:
        """Keep the recipe for every later node with this key."""
        if len(self.recipes) >= RECIPES:
            self.recipes.clear()
        self.recipes[key] = recipe
