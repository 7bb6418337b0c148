"""A clip that one rank cannot hold is encoded and decoded by all ranks together, each a part of its rows or columns."""

import copy
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import dsp
from zoo.video.codec import Autoencoder, Decoding, Encoding


def shared_codec(codec: Autoencoder, group: dist.ProcessGroup | None = None) -> Autoencoder:
    """A video autoencoder whose `encode` and `decode` all ranks of a group (None: of the run) call with the same clip.

    Each holds 1/N of every tensor, and the neighbouring rows that its convolutions read. The result is full on every
    rank, and that of one process to rounding: there are no tiles, so no seams. It is made once, and so are its plans.
    """
    if group not in codec.shared:
        everyone: Any = group or dist.group.WORLD
        mesh = DeviceMesh.from_group(everyone, codec.module.device.type, mesh_dim_names=("sp",))
        shared = codec.shared[group] = copy.copy(codec)
        shared.encoding = dsp.parallelize(Encoding(codec.module), mesh, {"": "x=b c t h w"})
        shared.decoding = dsp.parallelize(Decoding(codec.module), mesh, {"": "x=b c t h w"})
    return codec.shared[group]
