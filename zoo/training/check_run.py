"""`check=true`: the model in parallel compared with itself on one process, on the batch of the first step."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import dsp
from zoo.training import UserError, config, ranks, user_error
from zoo.training.loader import open_data, place
from zoo.training.task_lookup import create_task


def compare(options: config.Config, device: torch.device) -> bool:
    """Print the report of `dsp.check` over the ranks of one sp group; return True if nothing differs.

    A rank holds the whole model and the whole batch, in float64.
    """
    if (method := options.parallel.method) != "dsp":
        raise UserError(f"check=true compares the stages of a model, which parallel.method={method} does not use")
    *groups, sp = config.mesh_shape(options.parallel, dist.get_world_size())
    if sp == 1:
        raise UserError("check=true compares ranks with one process: start two or more, dsp-launch --nproc-per-node 2")
    mesh = init_device_mesh(device.type, (*groups, sp), mesh_dim_names=("dp_replicate", "dp_shard", "sp"))["sp"]
    task = create_task(options, device=device)  # without a mesh, so that each rank has whole samples
    open_data(task)
    torch.manual_seed(options.train.seed)  # the same weights on every rank
    with device:
        objective = task.objective(task.model())
    inputs = place(task.batch(objective, 0, 0, 0, 1), device)
    report = user_error(dsp.check, objective, kwargs=inputs, mesh=mesh)
    ranks.log0(report.text())
    return bool(report)
