"""The stage notation, without tensors."""

from __future__ import annotations

import pytest

from dsp.stages.notation import NotationError, parse, solve_sizes


def test_reads_what_the_design_shows() -> None:
    stage = parse("b [t] s [c], context=b [l c]")
    assert stage.free == ("s", "b")  # batch is a last resort
    assert stage.computed == {"t", "c", "l"}
    assert [p.param for p in stage.inputs] == [None, "context"]
    assert stage.outputs[0].axes == stage.inputs[0].axes
    fold = parse("(b t) [s c]")
    assert fold.inputs[0].axes == (("b", "t"), ("s",), ("c",))
    assert parse("b i [k] c, b j [k] c -> b i j c").free == ("i", "c", "j", "b")
    assert parse("b s [r c], b [i j h] -> b s [r c]").free == ("s", "b")
    assert parse("(b t) 1 [l]").inputs[0].axes == (("b", "t"), (), ("l",))
    assert parse("[(h w) c] b").computed == {"h", "w", "c"}
    assert parse("x=b c t h w -> b t", root=True).outputs[0].names == ("b", "t")
    # a name in brackets anywhere is computed over everywhere
    assert parse("b i j, b [i] k -> b i j k").free == ("j", "k", "b")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("b t [s c", r"'\[|\[ is never closed"),
        ("b t s]", r"'\]' without"),
        ("b (t (s", "fold inside a fold"),
        ("b t) s", r"'\)' without"),
        ("b t t", "'t' appears twice"),
        ("b t -> b", "dim 't' is outside brackets, but missing from the output"),
        ("b t -> b -> t", "more than one '->'"),
        ("b t,, s", "empty tensor pattern"),
        ("", "empty stage pattern"),
        ("b 2 t", "unexpected '2'"),
        ("b, x=b, x=b", "named twice"),
        ("b -> x=b", "bound by position"),
        ("[b [t]]", "inside"),
    ],
)
def test_misreadings_are_explained(text: str, message: str) -> None:
    with pytest.raises(NotationError, match=message):
        parse(text)


def sizes(text: str, *shapes: tuple[int, ...], root: dict[str, int] | None = None) -> dict[str, int]:
    return solve_sizes(list(zip(parse(text, root=True).inputs, shapes)), root or {}, label="here")


def test_sizes_and_folds() -> None:
    assert sizes("(b t) s c, b l", (14, 5, 3), (2, 6)) == {"s": 5, "c": 3, "b": 2, "l": 6, "t": 7}
    assert sizes("(b t) s", (14, 5), root={"b": 2, "t": 7, "s": 99}) == {"b": 2, "t": 7, "s": 5}
    assert sizes("(a b) c, (b c) d", (6, 5), (10, 1)) == {"a": 3, "b": 2, "c": 5, "d": 1}
    assert sizes("b t c, b t c", (2, 7, 3), (2, 1, 3)) == {"b": 2, "t": 7, "c": 3}
    with pytest.raises(NotationError, match="cannot tell"):
        sizes("(b t) s", (14, 5))
    with pytest.raises(NotationError, match="not b=3 x t=7"):
        sizes("(b t) s", (14, 5), root={"b": 3, "t": 7})
    with pytest.raises(NotationError, match="'t' is 7 in one tensor and 5"):
        sizes("b t, b t", (2, 7), (2, 5))
    with pytest.raises(NotationError, match="says 1, but this axis"):
        sizes("b 1", (2, 7))
    with pytest.raises(NotationError, match=r"2 axes .* its shape is \(2, 7, 3\)"):
        sizes("b t", (2, 7, 3))
