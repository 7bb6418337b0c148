"""A script as a forward looks it up: each node is found by what it reads, wherever and whenever it comes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from dsp.plan.script import Alike, Key, Number, PlannedNode, Read, Script, Where, loose, numbers_in
from dsp.sharded import Sharded
from dsp.signature import Bound

RECIPES = 65536  # kept for a plan
NUMBERS = 1 << 32  # of the tensors of a forward, at most


class NoKey(Exception):
    """An argument that no key can be made of, or a tensor that has to be opened first."""


class InTurn(NamedTuple):
    """How several nodes alike run, by their index, as far as is known."""

    alike: Alike
    made: dict[int, Any]


class Lookup:
    """The nodes of a script as a forward comes to them, and how each runs, as far as is known: `recipes`.

    first: what the numbers of this forward's tensors count from, above those of all before; one less has a tensor that
    is not in the script, and `NUMBERS` more those of the next forward. turns: how often nodes came of which the script
    has several alike, by the `id` of these.
    """

    def __init__(self, script: Script | None, recipes: dict[Any, Any], first: int, turns: Mapping[int, int]) -> None:
        self.script, self.recipes, self.first, self.turns = script, recipes, first, dict(turns)
        self.on_wholes = script.on_wholes if script is not None else frozenset[str]()
        self.unknown: Where | None = None  # the first thing that it did and its script does not have
        self.declared: dict[int, int] = {}  # the numbers of declared inputs that came as DTensors, by id

    def reads(self, tensors: Sequence[Tensor], shells: Sequence[Sharded | None]) -> list[Read]:
        """The tensors of a node as its key has them."""
        return [
            tuple(t.shape) if s is None else Number(s.number - self.first, s.at.shape) for t, s in zip(tensors, shells)
        ]

    def find(self, key: Key) -> tuple[Alike | None, PlannedNode | None]:
        """The nodes of a key, and that of them whose turn it is; or else the only one that reads these tensors."""
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
        """That of several nodes alike which comes now."""
        nodes = alike.nodes
        if len(nodes) == 1:
            return nodes[0]
        turn = self.turns.get(id(alike), 0)
        self.turns[id(alike)] = turn + 1
        return nodes[min(turn, len(nodes) - 1)]

    def declare(self, bound: Iterable[Bound]) -> None:
        """Number the declared inputs that came sharded."""
        assert self.script is not None
        for b in bound:
            number = self.script.numbers.get(b.param)
            if number is not None and isinstance(b.tensor, Sharded):
                b.tensor.number = self.first + number
            elif number is not None and isinstance(b.tensor, DTensor):
                self.declared[id(b.tensor)] = number

    def met(self, t: Sharded) -> None:
        """Give a tensor that an earlier call left its number in this forward."""
        _, node = self.find(("left", "", (t.at.shape, t.at.cut)))
        t.number = self.first + (-1 if node is None else node.results[0])

    def keep_in_turn(self, key: Any, alike: Alike | None, node: PlannedNode | None, made: Any) -> None:
        """Keep how a node runs, beside those that are alike; for no key, nothing."""
        if key is None:
            return
        if alike is None or node is None or len(alike.nodes) == 1:
            self.keep(key, made)
            return
        if type(self.recipes.get(key)) is not InTurn:
            self.keep(key, InTurn(alike, {}))
        self.recipes[key].made[node.index] = made

    def keep(self, key: Any, recipe: Any) -> None:
        """Keep how all that have this key run from now on."""
        if len(self.recipes) >= RECIPES:
            self.recipes.clear()
        self.recipes[key] = recipe
