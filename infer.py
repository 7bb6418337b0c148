"""Use a trained model: sample from it or predict with it, on any number of ranks.

    python infer.py runs/demo --label 3 --frames 16
    python infer.py runs/video --prompt "a boat on a lake" --format mp4
    python infer.py Wan2.1-T2V-1.3B-Diffusers --prompt "a boat on a lake"     # published weights: a pipeline's folder
    python infer.py esm2_t33_650M_UR50D x.fasta 1abc.cif     # contacts by published ESM-2; a structure judges them
    python infer.py openfold x.a3m                    # a backbone by OpenFold's published weights, as safetensors
    dsp-launch --nproc-per-node 4 infer.py runs/demo/checkpoints/step-00000500 --label 3
    dsp-launch --nproc-per-node 4 infer.py runs/protein_demo 1abc.cif 1abc.a3m
    python infer.py --dca 1abc.cif 1abc.a3m           # contacts by direct coupling analysis: no training, no run
    python infer.py runs/demo --help

All ranks share each sample (sp = all of them), and the result does not depend on how many there are, unless --wire has
them send activations in fewer bits.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from zoo.files import read_table
from zoo.protein import monomer_weights
from zoo.training import UserError, pipeline, ranks, user_error
from zoo.training import config as cfg
from zoo.training.console import Console
from zoo.training.environment import first_rank, world_size
from zoo.training.outputs.options import checked
from zoo.training.task_lookup import create_infer, create_task
from zoo.training.tracking import names_of, number_of
from zoo.training.trained import arguments as describe
from zoo.training.trained import load_model, locate, log_written, progress, wire_option


class Parser(argparse.ArgumentParser):
    """The parser of every rank: all read the same command line, and rank 0 alone prints. No option is abbreviated."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        error = UserError(f"{message}; {self.prog} --help explains every option")
        error.printed = not first_rank()
        raise error

    def print_help(self, file: Any = None) -> None:
        if first_rank():
            super().print_help(file)


def protein_family(folder: Path) -> str:
    """The module of zoo.training.outputs for a published model of proteins; "" for any other folder, as of a run."""
    config = folder / "config.json"
    if (folder / "config.yaml").is_file():
        return ""
    if config.is_file():
        return "esm2" if user_error(read_table, config).get("model_type") == "esm" else ""
    return "openfold" if user_error(monomer_weights.is_folder, folder) else ""


def direct_coupling_analysis(arguments: Sequence[str]) -> int:
    """Predict contacts from alignments, without a model, in one process."""
    if world_size() > 1:
        raise UserError("--dca is done by one process: python infer.py --dca ...")
    dca = user_error(import_module, "zoo.training.outputs.dca")  # Biopython comes with an extra
    parser = Parser(prog="infer.py --dca", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    dca.arguments(parser)
    options = checked(parser.parse_args(arguments))
    before = set(options.out.glob("*"))
    log_written(dca.run(options), before)
    return 0


def main(arguments: Sequence[str]) -> int:
    with Console():
        return work(arguments)


def work(arguments: Sequence[str]) -> int:
    usage = "infer.py RUN [options]   (RUN: the directory of a run, of one of its checkpoints, or of a published model)"
    try:
        if arguments[:1] == ["--dca"]:
            return direct_coupling_analysis(arguments[1:])
        if not arguments or arguments[0].startswith("-"):
            if first_rank():
                print(f"usage: {usage}\n\n{(__doc__ or '').partition(chr(10))[2].strip(chr(10))}")
            return 0 if "--help" in arguments or "-h" in arguments else 2
        if pipeline.is_pipeline(Path(arguments[0])):
            return pipeline.command(arguments[1:], Path(arguments[0]), Parser(prog="infer.py FOLDER"))
        if family := protein_family(Path(arguments[0])):
            show = user_error(import_module, f"zoo.training.outputs.{family}")  # Biopython comes with an extra
            folder = import_module("zoo.training.outputs.folder")
            return folder.command(show.Published(), arguments[1:], Path(arguments[0]), Parser(prog="infer.py FOLDER"))
        run, directory, step = locate(Path(arguments[0]))
        config = cfg.load([str(run / "config.yaml")])
        shape = argparse.ArgumentDefaultsHelpFormatter
        parser = Parser(prog="infer.py RUN", formatter_class=shape)
        task = create_task(config)
        infer = create_infer(task, names_of(run))
        describe(parser, infer, run / "inference")
        wire_option(parser)
        trained = [getattr(config.data, name, 1) for name in ("frames", "height", "width")]
        options = checked(parser.parse_args(arguments[1:]), trained)
        with ranks.process_group() as device:
            model = load_model(task, directory, step, device, options.weights == "averaged", options.wire)
            began, before = time.perf_counter(), set(options.out.glob("*"))
            with torch.no_grad():
                written = user_error(infer.run, model, options, device, progress())
            account = f": {infer.account}" if infer.account else ""
            took, shared = time.perf_counter() - began, number_of(dist.get_world_size(), "rank")
            ranks.log0(f"took {took:.2f} s on {shared}{account}")
            log_written(written, before)
        return 0
    except Exception as error:
        return ranks.report_uncaught(error)


if __name__ == "__main__":
    sys.exit(record(main)(sys.argv[1:]))
