"""Does the suite notice? Faults, put one at a time into a copy of dsp and zoo, and the first test that fails.

    python tools/mutations.py                # all of them, some twenty minutes: the short suite finds them?
    python tools/mutations.py --slow         # what the short suite does not find, `-m slow` has to
    python tools/mutations.py mean fold      # those whose name has one of the words
    python tools/mutations.py --once mean    # by the tests named with them alone

Run by hand. A fault is a text that stands once in its file, and another in its place. The tests named with it, of
the short suite, run first, and the others only if these pass. Without a fault they all have to pass.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

HOME = Path(__file__).resolve().parents[1]


class Fault(NamedTuple):
    name: str
    file: str
    text: str
    instead: str
    tests: str  # of which one should fail: files, or one test of a file


FAULTS = [
    Fault(
        "a plan forgets what a rank passes on for its neighbours",
        "dsp/comm/node_routes.py",
        "within = sum(goes) - sum(goes[place::node])",
        "within = sum(goes[mates.start : mates.stop]) - goes[rank]",
        "dsp/comm/test_routes::test_bytes_by_hand",
    ),
    Fault(
        "messages between nodes cost nothing",
        "dsp/comm/hardware.py",
        "alpha += self.network.message * messages_more(size, node)",
        "pass",
        "dsp/comm/test_routes::test_small_switches_are_hierarchical_and_large_ones_direct",
    ),
    Fault(
        "nodes that have unequal shares of an axis are taken for equal ones",
        "dsp/comm/routes.py",
        "if len({*shares}) != 1 or (size > node and size % node):",
        "if size > node and size % node:",
        "dsp/comm/test_routes::test_unequal_nodes_switch_directly_and_say_so",
    ),
    Fault(
        "a block with an infinity does not say so",
        "dsp/comm/formats.py",
        "torch.where(odd, -scale, scale)",
        "scale",
        "dsp/comm/test_wire::test_nan_and_infinity_arrive_as_such_and_their_neighbours_are_near",
    ),
    Fault(
        "gradients are rounded to the nearest",
        "dsp/comm/wire.py",
        "return replace(formats()[name], stochastic=wire != name)",
        "return formats()[name]",
        "dsp/comm/test_wire::test_gradients_are_rounded_without_bias",
    ),
    Fault(
        "a gradient is planned in the format of the forward",
        "dsp/report/traffic.py",
        'value.gradient if phase == "backward" else value',
        "value",
        "dsp/comm/test_wire::test_a_run_sends_what_its_plan_says",
    ),
    Fault(
        "a stage may return anything on a part",
        "dsp/core/run.py",
        "        self.refuse_sizes(stage, node, offer, results, out)\n",
        "",
        "dsp/core/test_stage_results dsp/core/test_hostile",
    ),
    Fault(
        "a bad step that nobody has read yet is taken",
        "zoo/training/optim.py",
        "optimizer.found_inf = None if mask is None else 1 - mask",
        "optimizer.found_inf = None",
        "training/test_robust::test_a_step_taken_before_its_numbers_are_read_is_the_same",
    ),
    Fault(
        "points are seen by axes of space, not by frames",
        "zoo/protein/structure.py",
        'attended = torch.einsum("biyx,bipy->bipx", rotation, attended - translation[:, :, None])',
        "attended = attended - translation[:, :, None]",
        "zoo/test_structure_module",
    ),
    Fault(
        "a pass starts without the distances of the one before",
        "zoo/protein/evoformer.py",
        "z = self.recycle_distance(z, positions, positions)",
        "z = self.recycle_distance(z)",
        "zoo/test_openfold",
    ),
    Fault(
        "the centre of a cluster is no row of it",
        "zoo/data/protein/clusters.py",
        "torch.ones(len(msa))",
        "torch.zeros(len(msa))",
        "zoo/test_openfold",
    ),
    Fault(
        "a predicted clip is taken for a velocity",
        "zoo/video/sampling.py",
        "velocity = (output - x) / levels[i] if predicts_clean else flow_sign(model) * output",
        "velocity = flow_sign(model) * output",
        "zoo/test_diffusion::test_a_predicted_clip_is_a_velocity_too",
    ),
    Fault(
        "a gradient of an input that no pattern names is not counted",
        "dsp/core/recording.py",
        "for b in bound if edge(b.tensor) in reached",
        "for b in bound if b.param in record.patterns and edge(b.tensor) in reached",
        "dsp/core/test_composition::test_gradients_of_inputs_are_in_the_plan",
    ),
    Fault(
        "a function that reads memory as it lies on each rank is run",
        "dsp/core/watch.py",
        "    if traits.name in UNRUNNABLE:",
        "    if False:",
        "dsp/core/test_record::test_a_refusal_names_its_line_though_the_forward_went_on",
    ),
    Fault(
        "a graph forgets where gradients are switched off",
        "dsp/compiled/tidy.py",
        "if needs and written != now:",
        "if False:",
        "dsp/compiled/test_graph::test_outputs_every_gradient_and_the_collectives",
    ),
    Fault(
        "discover does not look into functions that are many operations",
        "dsp/discovery/recording.py",
        "if traits.decomposition is not None and (out",
        "if False and (out",
        "dsp/discovery/test_discover::test_dims_are_followed_through_a_function_that_is_many_operations",
    ),
    Fault(
        "a tensor of which the type alone is read is an operand",
        "dsp/core/carrier.py",
        "if traits.dtype_arg is not None:",
        "if False:",
        "dsp/core/test_record",
    ),
    Fault(
        "a tensor is switched after it has grown",
        "dsp/core/offers.py",
        "    record.rules.complete(record)\n",
        "",
        "dsp/core/test_least::test_a_switch_is_offered_before_a_tensor_grows",
    ),
    Fault(
        "noise levels are sampled without the shift they are trained with",
        "zoo/training/tasks/video.py",
        "return partial(euler, shift=shift, predicts_clean",
        "return partial(euler, predicts_clean",
        "training/test_config",
    ),
    Fault(
        "what a stage writes into is not noted",
        "dsp/core/run.py",
        "            if version(parts[i]) != before:",
        "            if False:",
        "dsp/core/test_shared_memory dsp/core/test_unmarked_writes dsp/core/test_hostile",
    ),
    Fault(
        "a stretch is written where the chunk begins",
        "dsp/glue/rules/joins.py",
        "rows = [k - chunk(size, f.n, f.rank)[0] for k in places[a:b]]",
        "rows = [k - chunk(size, f.n, 0)[0] for k in places[a:b]]",
        "dsp/glue/test_prover",
    ),
    Fault(
        "who hears the forward does not hear its backward",
        "dsp/comm/observers.py",
        "ctx.observer = None if observer is None else observer.for_backward()",
        "ctx.observer = None",
        "dsp/report/test_plan_vs_traffic",
    ),
    Fault(
        "nobody hears what a checkpoint sends again",
        "dsp/core/checkpoints.py",
        "with observing(self.observer), ",
        "with observing(None), ",
        "dsp/report/test_plan_vs_traffic",
    ),
    Fault(
        "the gradient of an input is not divided by N",
        "dsp/comm/moves.py",
        "return run_observed(ctx, gather_local, grad, ctx.cut, ctx.shape, ctx.sp) / ctx.sp.size, None, None",
        "return run_observed(ctx, gather_local, grad, ctx.cut, ctx.shape, ctx.sp), None, None",
        "dsp/comm/test_ops",
    ),
    Fault(
        "a mean over unequal parts is a mean of means",
        "dsp/comm/ops.py",
        "return torch.ops.dsp.all_reduce(total, sp.group) / count",
        "return torch.ops.dsp.all_reduce(total / max(local.numel(), 1), sp.group) / sp.size",
        "dsp/comm/test_ops",
    ),
    Fault(
        "small switches that share an exchange come back in another order",
        "dsp/comm/exchange.py",
        "return [plan.from_each(parts[i::count]) for i, plan in enumerate(self.plans)]",
        "return [plan.from_each(parts[i::count][::-1]) for i, plan in enumerate(self.plans)]",
        "dsp/comm/test_ops parity/test_models::test_bytes_and_calls_are_those_of_the_plan",
    ),
    Fault(
        "bfloat16 is summed over ranks in bfloat16",
        "dsp/comm/collectives.py",
        "return rows.view(n, parts[rank], *rows.shape[1:]).sum(0, dtype=summed_in(dtype)).to(dtype)",
        "return sum(rows.view(n, parts[rank], *rows.shape[1:]))",
        "dsp/comm/test_ops",
    ),
    Fault(
        "what a collective makes is a view that nobody may write",
        "dsp/comm/collectives.py",
        "return list(map(alone, out)) if isinstance(out, list) else alone(out)",
        "return out",
        "dsp/core/test_composition",
    ),
    Fault(
        "a fold stays sharded though its parts straddle ranks",
        "dsp/comm/layout.py",
        "return inner == 1 or size % n == 0",
        "return True",
        "dsp/glue/test_prover::test_accepted_layouts_are_right",
    ),
    Fault(
        "any road out of a sharded tensor is let through",
        "dsp/comm/gradients.py",
        "return backward_pass() in cls._recent",
        "return True",
        "dsp/comm/test_ops dsp/core/test_composition",
    ),
    Fault(
        "the batch is as good a dim to shard as any",
        "dsp/stages/notation.py",
        "return tuple(sorted(seen, key=lambda n: n in BATCH_NAMES))",
        "return tuple(seen)",
        "dsp/stages/test_notation",
    ),
    Fault(
        "a dim that the output lacks may go without brackets",
        "dsp/stages/notation.py",
        "            if lost:",
        "            if len(lost) > 1:",
        "dsp/stages/test_notation",
    ),
    Fault(
        "what a rank holds is not held any more while it is last read",
        "dsp/planner/index.py",
        "for k in range(first, last + 1):",
        "for k in range(first, last):",
        "dsp/planner/test_planner",
    ),
    Fault(
        "a gather is priced as if each rank sent to one other",
        "dsp/planner/problem.py",
        "return [(n - 1) * part for part in value.parts(src, n)]",
        "return value.parts(src, n)",
        "dsp/planner/test_planner",
    ),
    Fault(
        "check lets a gradient pass that is half of the true one",
        "dsp/verify/compare.py",
        "if not off <= max(10 * tolerance, ROUNDINGS",
        "if not off <= max(1, ROUNDINGS",
        "dsp/verify/test_check",
    ),
    Fault(
        "a gradient's gather counts as recomputed",
        "dsp/comm/count.py",
        "_dsp_|SplitInput|WholeInput|",
        "_dsp_|WholeInput|",
        "dsp/core/test_composition",
    ),
    Fault(
        "squeeze takes a local dim of size 1 for one of the whole",
        "dsp/glue/rules/shape.py",
        "return Outcome(out, x.shape[cut.dim], args=(x, tuple(ones)), kwargs={}, view=True)",
        "return Outcome(out, x.shape[cut.dim], view=True)",
        "dsp/glue/test_prover::test_accepted_layouts_are_right",
    ),
    Fault(
        "a compiled module is another one than the pattern names",
        "dsp/stages/stage.py",
        'skip = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}',
        'skip = {"_checkpoint_wrapped_module", "_fsdp_wrapped_module"}',
        "dsp/core/test_composition",
    ),
    Fault(
        "in ring attention every rank takes its own keys for late ones",
        "dsp/embedded/pairs.py",
        "out, lse = block(q, k, v, True)",
        "out, lse = block(q, k, v, False)",
        "dsp/embedded/test_causal",
    ),
    Fault(
        "where no key is to be seen attention is not a number",
        "zoo/attention.py",
        "mask = (mask | ~mask.any(-1, keepdim=True))[:, None, None, :]",
        "mask = mask[:, None, None, :]",
        "zoo/test_attention",
    ),
    Fault(
        "the state that comes from before a chunk does not decay in backward",
        "zoo/scan.py",
        "later = decay[:, 0] * reached[-1]",
        "later = reached[-1]",
        "zoo/test_scan",
    ),
    Fault(
        "the posterior of a diffusion has a wrong weight",
        "zoo/video/noise.py",
        '"posterior_x0": beta * previous.sqrt() / (1 - abar),',
        '"posterior_x0": beta * abar.sqrt() / (1 - abar),',
        "zoo/test_diffusion",
    ),
    Fault(
        "a checkpoint stores permuted rows in the order of this run's ranks",
        "zoo/training/checkpoint.py",
        "key: _rows(value, self.orders[key[1]].argsort()) if",
        "key: _rows(value, self.orders[key[1]]) if",
        "training/test_checkpoint dsp/embedded/test_embedded_tensor",
    ),
    # what was found wrong in models that nobody here had seen, and its mend undone
    Fault(
        "attention looks past where its mask is cut",
        "dsp/glue/rules/attention.py",
        "aligned(f, rows, ndim)",
        "aligned(f, rows[:1], ndim)",
        "dsp/glue/test_prover::test_a_mask_that_is_cut_another_way",
    ),
    Fault(
        "nobody is told what runs whole",
        "dsp/report/cost.py",
        "if largest * self.size < 1.5 * self.longest or self.size == 1:",
        "if self.size:",
        "dsp/report/test_plan_whole::test_advice_where_no_line_helps",
    ),
    Fault(
        "a whole tensor that is written in place counts as nothing",
        "dsp/report/cost.py",
        "return node.in_place or any(",
        "return any(",
        "dsp/report/test_plan_whole::test_writes_into_a_replicated_tensor_are_listed",
    ),
    Fault(
        "what is long may run whole where it need not",
        "dsp/glue/offers.py",
        "if long and any(not o.last_resort for o in parts):",
        "if False:",
        "dsp/core/test_least dsp/core/test_random_models",
    ),
    Fault(
        "a result's dims are all called batch if one operand's are",
        "dsp/report/names.py",
        "bring = [pair for pair in laid if self.alone(node, *pair) == cut] or laid",
        "bring = laid",
        "dsp/report/test_plan_names dsp/report/test_plan",
    ),
    Fault(
        "batch alone is sharded though it divides unevenly",
        "dsp/core/decide.py",
        "    if batch_alone(compared, solution):",
        "    if False:",
        "dsp/core/test_plan_least::test_batch_is_sharded_only_where_few_ranks_are_idle",
    ),
    Fault(
        "dims of size 1 keep strides by which torch goes wrong",
        "dsp/comm/exchange.py",
        "stride = () if out.is_contiguous() else out.stride()",
        "stride = out.stride()",
        "dsp/comm/test_ops::test_all_to_all_of_every_pair_of_dims_and_memory_orders",
    ),
    Fault(
        "a plan leaves what was written in the layout that it had",
        "dsp/report/traffic.py",
        "        if target.maker is None and layout in copies:",
        "        if False:",
        "dsp/core/test_shared_memory::test_a_tensor_stays_in_the_layout_it_was_written_in",
    ),
    Fault(
        "small switches of what enters one node share no call",
        "dsp/core/decide.py",
        "    fuse_at_use(record.n, nodes, problem, bases, solution, push)\n    for",
        "    for",
        "dsp/report/test_plan dsp/report/test_traffic",
    ),
    Fault(
        "copies are not made where the plan says",
        "dsp/core/copies.py",
        "self.want(switches, base, dst, (src,))",
        "pass",
        "dsp/core/test_random_models::test_regressions",
    ),
    Fault(
        "of two that read the same the first decides for both",
        "dsp/core/keys.py",
        "return min(at, count - 1)",
        "return 0",
        "dsp/core/test_lookup::test_two_that_read_the_same_are_decided_apart",
    ),
    Fault(
        "what a checkpoint computes again takes the first turn",
        "dsp/core/checkpoints.py",
        'a.turns = {**turns, "run": None}',
        "a.turns = None",
        "dsp/core/test_lookup::test_two_that_read_the_same_are_decided_apart",
    ),
    Fault(
        "what a checkpoint reads from its closure takes the first turn in a recomputation",
        "dsp/core/checkpoints.py",
        "return self.turns[id(t)][1] if self.read(t) else {}",
        "return {}",
        "dsp/core/test_lookup::test_two_that_read_the_same_are_decided_apart",
    ),
    Fault(
        "what the collector of garbage does is an operation of the model",
        "dsp/core/torch_traits.py",
        '    set_backward_hooks: "register_hook",\n',
        "",
        "dsp/core/test_host::test_the_collector_may_come_at_any_operation",
    ),
    Fault(
        "what a hook kept is handed out as a part",
        "dsp/core/parallel.py",
        "t = carry(record, t, *place)",
        "pass",
        "dsp/core/test_foreign_code",
    ),
    Fault(
        "results whose sizes data say have those of an earlier call",
        "dsp/core/run.py",
        "if node.dynamic and node.results:",
        "if False:",
        "dsp/core/test_growth::test_data_may_say_other_sizes_in_every_call",
    ),
    Fault(
        "a record that grew too long goes on growing",
        "dsp/core/parallel.py",
        "if len(record.nodes) > GROWN:",
        "if False:",
        "dsp/core/test_growth::test_a_record_of_ever_other_sizes_does_not_grow_for_good",
    ),
    Fault(
        "an index list may be as long as the mark of the sharded dim",
        "dsp/glue/rules/joins.py",
        "mark = 1 + max(*x.shape, *lengths)",
        "mark = 1 + max(x.shape)",
        "dsp/glue/test_prover::test_accepted_layouts_are_right",
    ),
    Fault(
        "a record grows by no stages",
        "dsp/core/growth.py",
        'if node.results or node.kind != "stage"]',
        'if node.kind != "stage"]',
        "dsp/core/test_growth dsp/core/test_lookup",
    ),
    Fault(
        "a variant of a node has results of its own",
        "dsp/core/unplanned.py",
        "            if shapes == [tuple(r.shape) for r in node.like.results]:",
        "            if False:",
        "dsp/core/test_lookup::test_an_operation_less_or_other_numbers_leave_the_plan_in_force",
    ),
    Fault(
        "numbers that no rule reads make another node",
        "dsp/core/keys.py",
        'if hasattr(v, "tolist") else kind',
        'if hasattr(v, "tolist") else (kind, v)',
        "dsp/core/test_lookup::test_an_operation_less_or_other_numbers_leave_the_plan_in_force",
    ),
    Fault(
        "an operation with other numbers is none that the plan has",
        "dsp/core/unplanned.py",
        "return node if self.follow(key, node, func) else",
        "return",
        "dsp/core/test_lookup::test_an_operation_less_or_other_numbers_leave_the_plan_in_force",
    ),
    Fault(
        "what an earlier call left is no input of this one",
        "dsp/core/inputs.py",
        "self.record.persistent[paths[id(t)]] = t.ref",
        "pass",
        "dsp/core/test_persistent_state::test_a_sharded_kv_cache_over_ten_chunks",
    ),
    Fault(
        "what is whole already is switched once more",
        "dsp/core/copies.py",
        "None if None in copies or base.cut is None else base.cut",
        "base.cut",
        "dsp/core/test_random_models dsp/report/test_traffic",
    ),
    Fault(
        "a shard is a view of the tensor that was gathered for it",
        "dsp/core/copies.py",
        "part if is_input else part.clone()",
        "part",
        "dsp/core/test_random_models",
    ),
    Fault(
        "a fold that is opened by a copy is a view, which is switched for each use",
        "dsp/glue/offers.py",
        "self.views = one and node.results[0].memory == node.refs[0].memory",
        "self.views = one",
        "dsp/core/test_shared_memory dsp/core/test_glue_moves dsp/core/test_random_models",
    ),
    Fault(
        "what one device copies is a view where a rank's part allows one",
        "dsp/core/writes.py",
        "local.clone() if shares and (node.kin_unknown or not node.kin) else out",
        "out",
        "dsp/core/test_random_models::test_regressions dsp/core/test_shared_memory",
    ),
    Fault(
        "an operation waits for what it reads",
        "dsp/core/run.py",
        "if self.record.in_flight and not only_views(",
        "if False and not only_views(",
        "dsp/overlap/test_async_switch::test_nothing_is_read_before_its_all_to_all_arrives",
    ),
    Fault(
        "a stage waits for what it may reach",
        "dsp/core/run.py",
        "if self.record.in_flight:  # it may hold",
        "if False:  # it may hold",
        "dsp/overlap/test_async_switch::test_nothing_is_read_before_its_all_to_all_arrives",
    ),
    Fault(
        "gradients of switches under way at once come back in the pieces they went in",
        "dsp/comm/collectives.py",
        "[of[i] for i in asks] if of else [], dst_pieces, src_pieces, back, wire",
        "[of[i] for i in asks] if of else [], src_pieces, dst_pieces, back, wire",
        "dsp/comm/test_ops::test_concurrent_all_to_alls",
    ),
    Fault(
        "switches that share a call make one each",
        "dsp/comm/moves.py",
        '"small" if p.small(sp.size) else i if',
        "i if p.small(sp.size) else i if",
        "dsp/comm/test_ops::test_small_switches_share_a_call",
    ),
    Fault(
        "what an operation made is left where it was made",
        "dsp/core/run.py",
        "(not node.push or node.push[0] in (None, offer.gives[0]))",
        "True",
        "dsp/overlap/test_async_switch",
    ),
    Fault(
        "a result is switched at once though a use needs it as it was made",
        "dsp/core/decide.py",
        "if gives[v] not in used.get(v, set()) and all(",
        "if all(",
        "dsp/report/test_traffic dsp/report/test_plan_vs_traffic dsp/core/test_random_models",
    ),
    Fault(
        "what missed a write is read as it was",
        "dsp/core/writes.py",
        "                stale(x, who, ref)",
        "                pass",
        "dsp/core/test_shared_memory dsp/core/test_unmarked_writes dsp/core/test_random_models",
    ),
    Fault(
        "a rank without rows takes a tensor for up to date that missed a write",
        "dsp/core/writes.py",
        "(in_other_cut(x, base_of(t)) or into is None or plain(t).numel() > 0)",
        "in_other_cut(x, base_of(t))",
        "dsp/core/test_random_models::test_every_rank_refuses_a_write_that_the_original_missed",
    ),
    Fault(
        "an argument by NumPy's name is none that a rule reads",
        "dsp/core/torch_calls.py",
        "if not NUMPY_NAMES.keys().isdisjoint(kwargs):",
        "if False:",
        "dsp/glue/test_keywords",
    ),
    Fault(
        "an op of torch has the rule of whatever function has its name",
        "dsp/core/torch_traits.py",
        "if inspect.isroutine(f) and not inspect.isfunction(f)",
        "if f is not None",
        "dsp/core/test_foreign_code",
    ),
    Fault(
        "a custom op's backward gets tensors of the full shape",
        "dsp/core/run.py",
        "traits.name in ATTRIBUTES_READ or traits.custom",
        "traits.name in ATTRIBUTES_READ",
        "dsp/core/test_foreign_code",
    ),
    Fault(
        "check lets outputs pass that are not those of one process",
        "dsp/verify/compare.py",
        "if not difference.output <= tolerance:",
        "if difference.output < 0:",
        "dsp/verify/test_check::test_a_branch_that_subclasses_take_is_found",
    ),
    Fault(
        "complex numbers travel as they are",
        "dsp/comm/exchange.py",
        "return x.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8), x.element_size()",
        "return x, 1",
        "dsp/comm/test_dtypes",
    ),
    Fault(
        "nothing is divided by its size",
        "dsp/discovery/dims.py",
        "if size == 0:",
        "if whole and not parts:",
        "dsp/core/test_empty_ranks",
    ),
    Fault(
        "a forward that reads its data raises what torch does",
        "dsp/report/plan.py",
        "if not (place := place_of_read(reason)):",
        "if reason:",
        "dsp/report/test_plan_reads",
    ),
    Fault(
        "ranks may hold different weights",
        "dsp/guard/agreement.py",
        "            same_weights(self.axis, self.model)\n            if not",
        "            if not",
        "dsp/core/test_hostile",
    ),
    Fault(
        "ranks may be told different things",
        "dsp/guard/agreement.py",
        "    if same(axis, sorted(facts.items())):",
        "    if True:",
        "dsp/core/test_host",
    ),
    Fault(
        "two threads may call one model",
        "dsp/guard/guards.py",
        "if not idle.acquire(blocking=False):",
        "if False:",
        "dsp/core/test_host::test_a_second_thread_is_told_so",
    ),
    Fault(
        "a number is read as it was before a write",
        "dsp/core/reads.py",
        "UNKNOWN if origin is None or memory(t) in self.written else origin",
        "UNKNOWN if origin is None else origin",
        "dsp/core/test_reads",
    ),
    Fault(
        "nobody is told of a parameter that a stage should have got a part of",
        "dsp/guard/notes.py",
        "if pattern is None and size in shape:",
        "if False:",
        "dsp/core/test_host::test_an_argument_that_a_stage_does_not_mention_is_named",
    ),
    Fault(
        "an int argument does not tell how long a dim of a fold is",
        "dsp/stages/signature.py",
        "if len(dims) != 1 or len(error.unknown) != 2 or len(set(integers.values())) != 1:",
        "if error:",
        "dsp/test_root_sizes::test_an_argument_tells_how_many_frames_are_folded",
    ),
    Fault(
        "one call of each kind is enough to check",
        "dsp/verify/check.py",
        "CALLS = 3",
        "CALLS = 1",
        "dsp/verify/test_check::test_faults_after_the_first_call_are_found",
    ),
    Fault(
        "softmax takes a part of nothing for one whose largest is 0",
        "dsp/glue/rules/statistics.py",
        "return torch.stack([top, (t - near).exp().sum(over, keepdim=True)])",
        "return torch.stack([near, (t - near).exp().sum(over, keepdim=True)])",
        "dsp/glue/test_prover::test_accepted_layouts_are_right",
    ),
    Fault(
        "a graph holds whatever numbers come with the inputs",
        "dsp/compiled/guards.py",
        "self.options == options and all(",
        "all(",
        "dsp/compiled/test_graph",
    ),
    Fault(
        "a graph holds whatever the modules became",
        "dsp/compiled/guards.py",
        "attributes_of(m) == before for m, before in chain(self.modules, self.objects)",
        "True for _ in ()",
        "dsp/compiled/test_graph",
    ),
    Fault(
        "a graph has an autograd.Function, and not its backward",
        "dsp/compiled/reasons.py",
        "if function := custom_function(tensors):",
        'if function := "":',
        "dsp/compiled/test_graph",
    ),
    Fault(
        "a model keeps what a recording left it, without data",
        "dsp/compiled/graphs.py",
        "with World(self.model, flat):",
        "if True:",
        "dsp/compiled/test_graph",
    ),
    Fault(
        "who raises leaves what was under way",
        "dsp/core/parallel.py",
        "if record.in_flight:  # the forward raised",
        "if False:  # the forward raised",
        "dsp/overlap/test_async_switch",
    ),
    Fault(
        "a recomputation is planned beyond the last tensor that its checkpoint saves",
        "dsp/report/traffic.py",
        "ends = place.after < record.saved[region]",
        "ends = True",
        "dsp/report/test_traffic dsp/report/test_plan_vs_traffic",
    ),
    Fault(
        "a record that grew is planned again for every call that adds to it",
        "dsp/core/growth.py",
        "return record.strays >= 1 << max(0, record.replans - AT_ONCE)",
        "return True",
        "dsp/core/test_growth",
    ),
    Fault(
        "ranks may follow different plans",
        "dsp/guard/agreement.py",
        "if not same(self.axis, plan_key(record)):",
        "if False:",
        "dsp/core/test_hostile dsp/core/test_host dsp/verify/test_check",
    ),
    Fault(
        "a forward without a plan repeats work without a word",
        "dsp/guard/advice.py",
        "if rows := repeated(record):",
        "if rows := []:",
        "dsp/report/test_plan_whole::test_a_forward_that_no_plan_can_be_made_of_is_told_once",
    ),
    Fault(
        "dropout that begins to drop returns its operand",
        "dsp/core/keys.py",
        "    if name in DRAWS:",
        "    if False:",
        "dsp/core/test_composition::test_a_forward_that_draws_nothing_leaves_the_generator_as_it_was",
    ),
    Fault(
        "a number between stages is printed as a tensor",
        "dsp/core/carrier.py",
        "Tensor.__format__: formatted",
        "Tensor.__format__: described",
        "dsp/core/test_carrier",
    ),
]


def pytest(copy: Path, *arguments: str) -> str | None:
    """The first test that fails, or None."""
    environment = os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "--no-header", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, check=False)
    if done.returncode in (0, 5):  # 5: no test was chosen
        return None
    match = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - |$)", done.stdout, re.M)
    return match[1] if match else f"pytest ended with {done.returncode}: {done.stdout[-300:]}{done.stderr[-300:]}"


def named(fault: Fault) -> list[str]:
    """The tests to try first, as pytest takes them."""
    parts = [name.partition("::") for name in fault.tests.split()]
    return [f"tests/{file}.py{colons}{test}" for file, colons, test in parts]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only the faults whose name has one of these words")
    parser.add_argument("--slow", action="store_true", help="go on with `-m slow` where the short suite finds nothing")
    parser.add_argument("--once", action="store_true", help="run the tests named with a fault, and no others")
    options = parser.parse_args()
    faults = [f for f in FAULTS if not options.words or any(word in f.name for word in options.words)]
    missed = []
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "copy"
        kept = subprocess.run(["git", "ls-files", "-z"], cwd=HOME, capture_output=True, text=True, check=True).stdout
        for name in filter(None, kept.split("\0")):
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(HOME / name, copy / name, follow_symlinks=False)
        if red := pytest(copy, *sorted({name for fault in faults for name in named(fault)})):
            print(f"red without any fault: {red}")
            return 1
        for fault in faults:
            path = copy / fault.file
            sound = path.read_text()
            if sound.count(fault.text) != 1:
                print(f"{fault.file} has {sound.count(fault.text)} times, not once: {fault.text}")
                return 1
            path.write_text(sound.replace(fault.text, fault.instead))
            failure = pytest(copy, *named(fault))
            if not (failure or options.once):
                failure = pytest(copy, *(f"--ignore={name}" for name in named(fault) if "::" not in name))
            if failure is None:
                missed.append(fault.name)
                if options.slow and (slow := pytest(copy, "-m", "slow")):
                    failure = f"(slow) {slow}"
            path.write_text(sound)
            print(f"{'found ' if failure else 'MISSED'}  {fault.name}: {failure}", flush=True)
    print(f"{len(faults) - len(missed)} of {len(faults)} found by {'the tests named' if options.once else 'the suite'}")
    return int(10 * len(missed) > len(faults))


if __name__ == "__main__":
    sys.exit(main())
