"""Rules of operations that mix one dim and keep the others separate: Fourier transforms and recurrences."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dsp.comm.layout import Cut
from dsp.core.torch_calls import Operand
from dsp.glue.rules.call import Frame, Outcome, independent, rule


def transformed(f: Frame, x: Operand) -> list[int]:
    """The dims of a Fourier transform."""
    shift = f.name.endswith("shift")
    sizes = None if shift else f.get(1, "n" if "n" in f.kwargs else "s")
    dims = f.get(1 if shift else 2, "dim", (-2, -1) if f.name.endswith("2") else None)
    if dims is None and f.name.endswith("fft"):
        dims = -1
    elif dims is None:  # all dims, or the last ones, one for each given size
        dims = range(x.ndim) if sizes is None else range(-len(sizes), 0)
    return f.dims(dims, x.ndim)


FOURIER = """
fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft fft_fftshift fft_ifftshift
fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2 fft_fftn fft_ifftn fft_rfftn fft_irfftn
"""
independent(FOURIER, mixed=transformed, filled=True)


@rule("lstm gru rnn_tanh rnn_relu")
def recurrent(f: Frame) -> Outcome:
    """A recurrence over (l b c) with states (layers b c), sharded along samples. Batch first is rewritten to this."""
    if f.kwargs or len(f.args) != 9 or not isinstance(f.args[2], (list, tuple)):
        raise f.refuse("it is given packed sequences")
    x, states, *_, dropout, train, _, batch_first = f.args
    known = [x, *(states if isinstance(states, (list, tuple)) else [states])]
    if batch_first or x.ndim != 3 or (dropout and train):
        raise f.refuse("it draws random numbers" if dropout and train else "its batch is not its second dim")
    cut = along_samples(f)
    narrow = {i: cut for i, o in enumerate(f.operands()) if any(o is t for t in known) and o.cut is None}
    nothing = not f.local_size(cut, x.shape[1])
    return Outcome(cut, x.shape[1], narrow, func=on_one(f.func) if nothing and f.func is not None else None)


def along_samples(f: Frame) -> Cut:
    """The cut of a recurrence's tensors, which is along samples; its weights are replicated."""
    cuts = {o.cut for o in f.operands() if o.cut is not None}
    if any(isinstance(w, Operand) and w.cut is not None for w in f.args[2]) or len(cuts) != 1:
        raise f.refuse("its operands are sharded differently")
    (cut,) = cuts
    if cut.dim != 1:
        raise f.refuse("it runs along the sharded dim" if cut.dim == 0 else "it mixes the sharded dim")
    return cut


def on_one(func: Any) -> Any:
    """A function for a rank without samples: it runs on one sample of zeros, and returns none."""

    def run(x: Tensor, states: Any, *options: Any) -> Any:
        def one(t: Tensor) -> Tensor:
            return torch.cat([t, t.new_zeros(t.shape[0], 1, t.shape[2])], 1)

        states = type(states)(map(one, states)) if isinstance(states, (list, tuple)) else one(states)
        return tuple(t.narrow(1, 0, 0) for t in func(one(x), states, *options))

    return run
