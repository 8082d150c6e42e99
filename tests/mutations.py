"""Break one mechanism of fsdp_compat at a time, and check that its test fails:

    python tests/mutations.py                    # all of them, about ten minutes
    python tests/mutations.py "no division" ...  # some of them, by name
    python tests/mutations.py --tenth            # a fixed tenth, which .ci/run runs
    python tests/mutations.py --texts            # none: only look for their texts, in a second

Each break replaces a piece of text that occurs exactly once in the package. It is made in a copy of
the checkout, where its test runs with a time limit; a test that hangs counts as failed. The exit
status is 1 if a test passes in spite of its break, or if a text does not occur exactly once. All
tests pass without a break: run them before."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
HANGS = -1  # in place of an exit status


@dataclasses.dataclass(frozen=True)
class Break:
    """One deliberate mistake. ``test``: arguments for pytest."""

    name: str
    old: str
    new: str
    test: str


FRONTENDS, FULLY_SHARD = "tests/frontends", "tests/fully_shard"
TWO_STAGES = "tests/comm/test_two_stages.py"
ORDER = "tests/gpu/test_order.py"  # skipped without a C++ compiler
BREAKS = (
    Break(
        "a view of a parameter leaves a forward with memory that is freed",
        "                    tensor = tensor.clone()\n",
        "                    pass\n",
        f"{FRONTENDS}/training/test_calls.py -k 'returns and parameters'",
    ),
    Break(
        "what a hook on a module sees does not leave the forward",
        "                    hooks.on_hooked_tensors(unit)\n",
        "                    pass\n",
        f"{FRONTENDS}/training/test_calls.py -k 'leave and hook'",
    ),
    Break(
        "collected gradients of a gradient reduced by nobody",
        "                hooks.on_gradients_of_collected_params(each)\n",
        "                pass\n",
        f"{FRONTENDS}/gradients/test_second_derivatives.py",
    ),
    Break(
        "hooks after accumulation not run",
        "                _torch_private.run_post_accumulate_hooks((param,))\n",
        "                pass\n",
        f"{FRONTENDS}/optimizers/test_optimizers_in_backward.py",
    ),
    Break(
        "a file replaced between its header and its values read all the same",
        "if known != {identity_of(descriptor)}:",
        "if False:",
        "tests/checkpoint/test_any_format.py -k replaced",
    ),
    Break(
        "shards moved to another device only while all others are at home",
        '    runtime.require_not_summoned("flat_param_to")\n',
        '    runtime.require_parts("flat_param_to")\n',
        f"{ORDER} -k recipe_moves",
    ),
    Break(
        "a module inside a sharded one moved to the meta device unseen",
        "        if on_meta and not self.shard.is_meta:\n",
        "        if False:\n",
        f"{FRONTENDS}/parameters/test_meta_values.py -k moved_to_the_meta_device_is_named",
    ),
    Break(
        "a file of dcp replaced before its chunks are opened read all the same",
        "return dataclasses.replace(span, file=file.identity)",
        "return span",
        "tests/checkpoint/test_any_format.py -k replaced",
    ),
    Break(
        "every chunk of a dcp directory opened by every rank",
        "chunk if file.header is None else span(), file.rank)",
        "span(), file.rank)",
        "tests/checkpoint/tools/test_dcp.py -k 'without_opening or opens_what'",
    ),
    Break(
        "a damaged checkpoint listed as the latest",
        "for each in reversed(self.checkpoints) if not each.problem",
        "for each in reversed(self.checkpoints)",
        "tests/checkpoint/tools/test_inspection.py -k each_step",
    ),
    Break(
        "renamed checkpoints listed as complete",
        "step_in(path.name) not in (None, archive.step)",
        "False",
        "tests/checkpoint/tools/test_inspection.py -k each_step",
    ),
    Break(
        "flat parameters converted without shapes",
        'known = Archive(path, "", {}) if shapes is None else shapes',
        "known = shapes",
        "tests/checkpoint/tools/test_rank_files.py -k stays_flat",
    ),
    Break(
        "ties lost where values are kept as saved",
        "return firsts.setdefault((leaf.dtype, leaf.shape, leaf.pieces), leaf)",
        "return leaf",
        "tests/checkpoint/tools/test_convert.py -k torchs_converter",
    ),
    Break(
        "other values beside the weights",
        "archive.states, archive.param_groups, archive.extra = {}, None, {}",
        "archive.states, archive.param_groups = {}, None",
        "tests/checkpoint/tools/test_convert.py -k weights_are",
    ),
    Break(
        "a mean of means",
        "float(sums.sum() / numels.sum())",
        "float((sums / numels).mean())",
        "tests/checkpoint/tools/test_inspection.py -k statistics",
    ),
    Break(
        "a run that starts anew on nodes without its checkpoints",
        "if newest is not None or not any(by_rank):",
        "if True:",
        "tests/checkpoint/test_directory.py -k folder_per_node",
    ),
    Break(
        "a run that starts anew although its checkpoint is damaged",
        "            read_manifest(step)  # raises",
        "            pass  # raises",
        "tests/checkpoint/test_directory.py -k unless_all_are",
    ),
    Break(
        "parameters without gradients stepped whole",
        "None if place.param.grad is None else grad",
        "grad",
        "tests/state/test_whole_parameters.py -k steps_are_those",
    ),
    Break(
        "states of whole parameters read from the first file",
        "number = owners.get(name, common)",
        "number = common",
        "tests/state/test_whole_parameters.py -k moves_between",
    ),
    Break(
        "optimizers of all parameters together accepted",
        "return None if alone is None or beside is None else _differ(alone[0], beside[0])",
        "return False",
        "tests/state/test_whole_parameters.py -k refused_on_all_ranks",
    ),
    Break(
        "whole states of other ranks missing in full optimizer state",
        "            found |= states\n",
        "            pass\n",
        "tests/state/test_whole_parameters.py -k moves_between",
    ),
    Break(
        "optimizers that need whole parameters not recognised",
        "return len(found) < len(parts) or _differ(whole[0].reshape(-1), torch.cat(found))",
        "return False",
        "tests/state/test_whole_parameters.py -k are_recognised",
    ),
    Break(
        "managed parameters described as not sharded",
        "(module, name) not in managed and ",
        "",
        "tests/state/test_description.py -k same_at_any_moment",
    ),
    Break(
        "records of a black box read that a kill has cut short",
        "if last_lost < number == number_later",
        "if 0 < number == number_later",
        "tests/comm/test_black_box_file.py -k cut_short",
    ),
    Break(
        "ends of waits not kept in a black box",
        "                untils[slot] = now()\n",
        "                pass\n",
        "tests/comm/test_black_box.py -k slow",
    ),
    Break(
        "storages that end still counted in a plan",
        "        self._count(kind, -nbytes)\n",
        "",
        "tests/plan/test_plan.py -k counts_a_storage_once",
    ),
    Break(
        "mapped shards copied outside of a pass",
        "elif mapped is not None and mapped.passes:",
        "elif mapped is not None:",
        f"{FULLY_SHARD}/test_mapped.py -k outside_of_a_pass",
    ),
    Break(
        "mapped shards copied by a rank that has left the pass",
        "        self._reading.discard(pass_)\n",
        "",
        f"{FULLY_SHARD}/test_mapped.py -k outside_of_a_pass",
    ),
    Break(
        "a unit that stays unsharded filled after the pass",
        "if unit.residency is Residency.UNSHARDING:  # it stays unsharded",
        "if False:",
        f"{FULLY_SHARD}/test_mapped.py -k keep_the_values",
    ),
    Break(
        "barriers in forwards that read no shard",
        "unit.residency is not Residency.UNSHARDED or unit.is_mapped",
        "True",
        f"{FULLY_SHARD}/test_mapped.py -k different_number",
    ),
    Break(
        "mapped shards in place of the user's all-gather",
        "elif self.behavior is not None and self.behavior.custom_all_gather is not None:",
        "elif False:",
        f"{FULLY_SHARD}/test_mapped.py -k outside_of_a_pass",
    ),
    Break(
        "evaluation in full precision filled from the buffer of training",
        "for memory in group.memories:\n                memory.use_copies_of",
        "for memory in group.memories[:1]:\n                memory.use_copies_of",
        "tests/engine/test_mapped_shards.py -k full_precision",
    ),
    Break(
        "gradients of newly trainable parameters without a place",
        "if buffer is None or not buffer.indices.issuperset(indices):",
        "if buffer is None:",
        f"{FULLY_SHARD}/test_programs.py -k frozen_and_trained",
    ),
    Break(
        "a second call of a collective taken for the first",
        "if frame is not self._frame or frame.f_lasti != self._instruction:",
        "if self._frame is None:",
        "tests/comm/test_progress.py -k another_wait",
    ),
    Break(
        "gather into the wrong segment",
        "self._buffer.narrow(0, rank * self._numel, self._numel)",
        "self._buffer.narrow(0, self._buffer.numel() - (rank + 1) * self._numel, self._numel)",
        f"{FRONTENDS}/training/test_training.py -k units_inside_of_units",
    ),
    Break(
        "reduce in another order on each rank",
        "        sum_in_rank_order(parts, total, divisor)\n",
        "        parts = [*parts[self.rank :], *parts[: self.rank]]\n"
        "        sum_in_rank_order(parts, total, divisor)\n",
        "tests/engine/test_reduce.py -k rank_order",
    ),
    Break(
        "a second gradient of one parameter in one put lost",
        "if received.isdisjoint(indices) and len(set(indices)) == len(indices):",
        "if received.isdisjoint(indices):",
        f"{FRONTENDS}/precision/test_evaluation.py -k evaluation_with_gradients",
    ),
    Break(
        "no division by the number of ranks",
        "value = (policy.divide_by or self._axes.ranks) / self._predivisor",
        "value = (policy.divide_by or 1) / self._predivisor",
        f"{FRONTENDS}/training/test_training.py -k units_inside_of_units",
    ),
    Break(
        "gradient accumulated twice",
        "view.add_(part, alpha=1 / self._predivisor)",
        "view.add_(part, alpha=2 / self._predivisor)",
        f"{FRONTENDS}/gradients/test_accumulation.py -k any_pattern",
    ),
    Break(
        "gradients that are zero on one rank dropped there",
        "self._buffer.zero(self._store.sharded_params[position].indices)",
        "self._buffer.drop(self._store.sharded_params[position].indices)",
        f"{FRONTENDS}/gradients/test_accumulation.py -k zero_on_one_rank",
    ),
    Break(
        "no reshard after forward",
        "if not (behavior.reshard_after_forward or is_fixed):",
        "if not is_fixed:",
        "tests/engine/test_counts.py -k full_shard_gathers",
    ),
    Break(
        "a unit that backward is about to use freed with the unused prefetched ones",
        "if unit.residency is Residency.UNSHARDING:\n            unit.reshard()",
        "if unit.residency is not Residency.SHARDED:\n            unit.reshard()",
        "tests/engine/test_counts.py -k full_shard_gathers",
    ),
    Break(
        "sum over the replicas skipped",
        "if axes.replica.ranks > 1 and not (policy.hook is not None and axes.one_group):",
        "if axes.replica.ranks > 99 and not (policy.hook is not None and axes.one_group):",
        f"{FRONTENDS}/training/test_training.py -k replicas_train",
    ),
    Break(
        "tied parameter owned by the first of its units",
        "if all(module in chain for chain in parameter_chains)",
        "if all(module in chain for chain in parameter_chains[:1])",
        f"{FRONTENDS}/training/test_training.py -k 'tied and across'",
    ),
    Break(
        "offloaded gradient not copied to the host",
        "        copy.copy_(total, non_blocking=True)\n",
        "        copy.zero_()\n",
        f"{FRONTENDS}/training/test_training.py -k every_kind",
    ),
    Break(
        "inputs of forward not cast in mixed precision",
        "args, kwargs = cast_floats((args, kwargs), options.compute_dtype)",
        "pass",
        f"{FRONTENDS}/precision/test_mixed_precision.py -k floating_point_inputs_are_cast",
    ),
    Break(
        "box of a part off by one",
        "first_full, end_full = -(-part.start // row), part.stop // row",
        "first_full, end_full = part.start // row + 1, part.stop // row",
        "tests/layout/test_box.py",
    ),
    Break(
        "optimizer state cut at the wrong elements",
        "value.reshape(-1)[part.slice].to(parameter.device, copy=True)",
        "value.reshape(-1)[: part.numel].to(parameter.device, copy=True)",
        f"{FRONTENDS}/optimizers/test_optimizers_from_before.py -k goes_on",
    ),
    Break(
        "single values taken beside states per element in a FlatParameter",
        "has_place = is_single and ownership.by_name[name][0] not in per_element_in",
        "has_place = is_single",
        "tests/checkpoint/test_any_format.py -k agree_on_which",
    ),
    Break(
        "checksum of a block not compared",
        "if (got := checksum.result()) != expected:",
        "if (got := checksum.result()) is None:",
        "tests/checkpoint/test_native.py -k damage_is_named",
    ),
    Break(
        "checkpoint committed although a rank could not write",
        "if report.problem is not None",
        "if False",
        "tests/checkpoint/test_native.py -k full_disk",
    ),
    Break(
        "connecting without a rendezvous",
        "rendezvous = rendezvous_of(axis.members, name)",
        "rendezvous = None",
        f"{FRONTENDS}/ranks/test_divergence.py -k built_by_one_rank_alone_is_refused",
    ),
    Break(
        "search for deadlocks finds nothing",
        "if post is not None and post.wait is not None and post.lacks(wait):",
        "if False:",
        "tests/comm/test_deadlock.py",
    ),
    Break(
        "every rank of a rendezvous asks for the missing ones",
        "self._ask_s *= 5**num_before",
        "pass",
        "tests/comm/test_many_ranks.py -k late",
    ),
    Break(
        "a rendezvous for each clipping",
        "if any(call not in _checked.get(group, ()) for group in groups):",
        "if True:",
        f"{FRONTENDS}/ranks/test_divergence.py -k checked_once",
    ),
    Break(
        "shards of a save named by the rank's number",
        "named.group.shard.rank - number",
        "named.group.shard.rank",
        "tests/comm/test_many_ranks.py -k tell",
    ),
    Break(
        "failed communicator usable again",
        "self.gloo = None\n        self.unfinished.clear()",
        "pass",
        "tests/comm/test_deadlock.py -k fails_on_all_ranks_for_good",
    ),
    Break(
        "placeholders not armed",
        "        self._always.put_in()\n",
        "",
        f"{FRONTENDS}/training/test_entry_points.py -k raise_outside_forward",
    ),
    Break(
        "no broadcast from rank 0",
        'comm.broadcast([packed], "the first rank\'s parameters and buffers")',
        "pass",
        f"{FRONTENDS}/parameters/test_meta_values.py -k values_of_the_first",
    ),
    Break(
        "norm of gradients of this rank only",
        "norm = norm_over_ranks(axis, norm, norm_type)",
        "pass",
        f"{FRONTENDS}/gradients/test_clip.py -k norm_and_clipped_gradients",
    ),
    Break(
        "gradients not unscaled",
        "super()._unscale_grads_(holder, inv_scale, found_inf, True)",
        "super()._unscale_grads_(holder, torch.ones_like(inv_scale), found_inf, True)",
        f"{FRONTENDS}/gradients/test_sharded_grad_scaler.py -k skipped_steps_equals",
    ),
    Break(
        "step skipped only on the rank with a non-finite gradient",
        "max_in_group(group, torch.stack(flags).amax(), what)",
        "torch.stack(flags).amax()",
        f"{FRONTENDS}/gradients/test_sharded_grad_scaler.py -k skipped_steps_equals",
    ),
    Break(
        "kept parameters taken for fresh after an update",
        "return self.freshness is not None and self.freshness.is_current",
        "return self.freshness is not None",
        f"{FULLY_SHARD}/test_programs.py -k updated_after_the_last",
    ),
    Break(
        "the user's divide factor ignored",
        "value = (policy.divide_by or self._axes.ranks) / self._predivisor",
        "value = self._axes.ranks / self._predivisor",
        f"{FULLY_SHARD}/test_methods.py -k divided_by_the_factor",
    ),
    Break(
        "the user's all-reduce hook skipped",
        "        if policy.all_reduce_hook is not None:\n",
        "        if False:\n",
        "tests/fully_shard/test_methods.py -k all_reduce_hook_sees",
    ),
    Break(
        "the list of modules to prefetch in backward ignored",
        "listed = behavior.backward_prefetch if backward else behavior.forward_prefetch",
        "listed = behavior.forward_prefetch",
        f"{FULLY_SHARD}/test_methods.py -k prefetch_lists",
    ),
    Break(
        "sums without all-reduce dropped",
        "total, used = total.add(earlier_total), used | earlier_used",
        "used = used | earlier_used",
        f"{FULLY_SHARD}/test_parity.py -k four_ranks",
    ),
    Break(
        "gradients for parameters that received none",
        "if len(used) < len(self.form.indices):\n            read = ",
        "if False:\n            read = ",
        f"{FULLY_SHARD}/test_programs.py -k random_programs_train",
    ),
    Break(
        "no zeros reduced for unused parameters",
        "or (policy.reduces_unused and gradients.is_trainable)",
        "or False",
        "tests/fully_shard/test_unused.py -k different_units",
    ),
    Break(
        "outputs not cast",
        "if unit.behavior.output_dtype is not None:",
        "if False:",
        f"{FULLY_SHARD}/test_parity.py -k two_ranks",
    ),
    Break(
        "kept storage freed",
        "        if not self.keeps_storage:\n",
        "        if True:\n",
        f"{FULLY_SHARD}/test_methods.py -k kept_storage",
    ),
    Break(
        "a checkpoint tool skips a piece of a tensor",
        "first = bisect.bisect_right(ends, box.offsets[0])",
        "first = bisect.bisect_right(ends, box.offsets[0] + 1)",
        "tests/checkpoint/tools/test_reading.py -k come_from",
    ),
    Break(
        "a checkpoint tool compares no checksums",
        "self.check_blocks(path, self._checksums[path].blocks_of(reads))",
        "self.check_blocks(path, [])",
        "tests/checkpoint/tools/test_convert.py -k changed_byte",
    ),
    Break(
        "a converted native checkpoint lies shifted in its shards",
        "_write_zeros(writer, (part.start - position) * size)",
        "_write_zeros(writer, (part.start - position + 1) * size)",
        "tests/checkpoint/tools/test_convert.py -k every_format",
    ),
    Break(
        "a pass ends before all ranks have read",
        "axis.communicator.end_barrier(handle, what, fails=not has_raised)",
        "pass",
        "tests/engine/test_mapped_shards.py -k written_only",
    ),
    Break(
        "a pass begins before all ranks have written",
        "*axis.communicator.end_barrier(handle, what)]",
        "*axis.others[1:]]",
        "tests/engine/test_mapped_shards.py -k written_only",
    ),
    Break(
        "writes to mapped parameters are kept",
        "if self.viewed_mapping.has_writes():",
        "if False:",
        f"{FRONTENDS}/parameters/test_writes.py -k lasts_until",
    ),
    Break(
        "autograd is not told of writes to sharded parameters",
        "        increment_version([p for _, _, params in written",
        "        list([p for _, _, params in written",
        f"{FRONTENDS}/parameters/test_writes.py -k refused",
    ),
    Break(
        "forks are counted while one is under way",
        "    with arena.lock:\n        return _num_forks",
        "    return _num_forks",
        "tests/engine/test_mapped_shards.py -k wherever",
    ),
    Break(
        "moved shards are not mapped again",
        "            if versions != axis.versions:",
        "            if not axis.others:",
        "tests/engine/test_mapped_shards.py -k fork",
    ),
    Break(
        "the death of a peer is not noticed",
        "return self._counters[_STATE] != _OPEN or self._process.has_ended()",
        "return self._counters[_STATE] != _OPEN",
        "tests/comm/test_counters.py -k ends",
    ),
    Break(
        "a message replaces one that was not read",
        "if (tag, last) in connections.sent:",
        "if False:",
        "tests/comm/test_gloo.py -k does_not_replace",
    ),
    Break(
        "gathers over hosts end in the order of the calls",
        "            self._end_gather(next(iter(self._gathers.values())), what)\n",
        "            self._end_gather(handle, what)\n",
        f"{TWO_STAGES} -k different_units",
    ),
    Break(
        "sums of a host are not rounded",
        "return self._near.end_reduce(handle.stage, own, own.dtype, what, None)",
        "return self._near.end_reduce(handle.stage, own, torch.float32, what, None)",
        f"{TWO_STAGES} -k collectives",
    ),
    Break(
        "no axis has several hosts",
        "return hosts if is_regular and min(num_hosts, per_host) > 1",
        "return hosts if is_regular and min(num_hosts, per_host) > whole.ranks",
        f"{TWO_STAGES} -k leaves",
    ),
    Break(
        "memory that a host shares is kept until the end of backward",
        'self._near.settle("gradients that this rank has sent", only_reductions=True)\n',
        "pass\n",
        f"{TWO_STAGES} -k memory",
    ),
    Break(
        "no wait for an all-gather",
        "    def end_gather(self, handle: Handle, what: str) -> None:\n"
        "        self._wait(handle, what)\n",
        "    def end_gather(self, handle: Handle, what: str) -> None:\n        pass\n",
        f"{ORDER} -k test_training",
    ),
    Break(
        "no wait for a reduce-scatter",
        "        self._wait(handle, what)\n        total = handle.received[0]",
        "        total = handle.received[0]",
        f"{ORDER} -k test_training",
    ),
    Break(
        "no wait for an all-reduce",
        "        self._wait(handle, what)\n        if handle.divisor is not None:\n",
        "        if handle.divisor is not None:\n",
        f"{ORDER} -k test_training",
    ),
    Break(
        "streams of the program not joined",
        "current.wait_stream(self._last)",
        "pass",
        f"{ORDER} -k two_forwards",
    ),
    Break(
        "a hook's stream does not wait",
        "    stream.wait_stream(torch.accelerator.current_stream(stream.device))\n",
        "",
        "tests/gpu/test_order.py -k all_reduce_hook",
    ),
    Break(
        "no wait for a hook's stream",
        "    return lambda: torch.accelerator.current_stream(stream.device).wait_event(done)",
        "    return _nothing",
        "tests/gpu/test_order.py -k all_reduce_hook",
    ),
    Break(
        "the host does not wait for copies of inputs",
        'is_pageable = tensor.device.type == "cpu" and not tensor.is_pinned()',
        "is_pageable = True",
        f"{ORDER} -k input",
    ),
    Break(
        "the host does not wait for copies to or from its shards",
        "self._last.popitem()[1].synchronize()",
        "self._last.popitem()",
        "tests/gpu/test_order.py -k after_an_evaluation",
    ),
    Break(
        "gradients not held until they are copied",
        "        self._side.hold(grads)\n",
        "        pass\n",
        "tests/gpu/test_order.py -k test_training",
    ),
    Break(
        "gradients read before the side stream has reduced them",
        "        torch.accelerator.current_stream(self._device).wait_stream(self._stream)\n",
        "",
        "tests/gpu/test_order.py -k test_training",
    ),
    Break(
        "units reduced without tags before all of their calls have passed",
        "(not at_end and unit.calls_left(backward.serial))",
        "False",
        "tests/gpu/test_order_of_collectives.py -k two_forwards",
    ),
    Break(
        "a backend's collectives taken for ones with tags",
        "axis.members, has_tags=False)\n",
        "axis.members, has_tags=True)\n",
        "tests/fully_shard/test_unused.py -k different_units",
    ),
    Break(
        "no event after the copies of an all-gather",
        "        self._offload.was_read()\n",
        "",
        "tests/gpu/test_order.py -k after_an_evaluation",
    ),
    Break(
        "no event after copies of gradients to the host",
        "        copy.copy_(total, non_blocking=True)\n        self.was_read()\n",
        "        copy.copy_(total, non_blocking=True)\n",
        f"{ORDER} -k offloaded_gradients",
    ),
    Break(
        "no event after copies of whole shards to the device",
        "non_blocking=True, copy=True)\n        self.was_read()\n",
        "non_blocking=True, copy=True)\n",
        f"{ORDER} -k shown_whole",
    ),
    Break(
        "the host does not wait for copies of whole shards to the device",
        "        self.offload.wait_copies()  # the caller may",
        "        # the caller may",
        f"{ORDER} -k shown_whole",
    ),
)


def files_with(text: str, sources: Mapping[Path, str]) -> dict[Path, int]:
    """Return the files that have the text, and how often."""
    return {path: source.count(text) for path, source in sources.items() if text in source}


def sources_of(checkout: Path) -> dict[Path, str]:
    return {path: path.read_text() for path in sorted((checkout / "fsdp_compat").rglob("*.py"))}


def text_problem(each: Break, sources: Mapping[Path, str]) -> str:
    """Return "" if the text of a break occurs exactly once."""
    places = files_with(each.old, sources)
    if list(places.values()) == [1]:
        return ""
    named = ", ".join(f"{number} times in {path.name}" for path, number in places.items())
    return f"NOT FOUND ONCE: its text is {named or 'nowhere'}"


def try_break(each: Break, copy: Path) -> str:
    """Return "caught", or what is wrong."""
    sources = sources_of(copy)
    if problem := text_problem(each, sources):
        return problem
    (path,) = files_with(each.old, sources)
    path.write_text(sources[path].replace(each.old, each.new))
    try:
        status, output = run_tests(each.test, copy)
    finally:
        path.write_text(sources[path])
    if status == HANGS:
        return "caught: the test hangs"
    if status == 0:
        return f"NOT CAUGHT by {each.test}"
    if status == 1:
        return "caught"
    return f"THE TEST DID NOT RUN (pytest ends with {status}): {each.test}\n{output[-500:]}"


def run_tests(tests: str, copy: Path, limit_s: float = 300.0) -> tuple[int, str]:
    """Run tests up to the first that fails; return pytest's exit status, or HANGS, and output."""
    command = f'exec "{sys.executable}" -m pytest -x -q --tb=no -p no:cacheprovider {tests}'
    with subprocess.Popen(
        ["bash", "-c", command],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=limit_s)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)  # the rank processes end with it
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return HANGS, ""
    return process.returncode, output


@contextlib.contextmanager
def copies_of_checkout(number: int) -> Iterator[queue.SimpleQueue[Path]]:
    """Yield copies of the checkout, to be taken and put back."""
    copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="mutations-") as directory:
        for name in range(number):
            copies.put(Path(directory) / str(name))
            ignored = shutil.ignore_patterns(".git", "__pycache__", ".venv")
            shutil.copytree(ROOT, Path(directory) / str(name), ignore=ignored)
        yield copies


def main() -> int:
    parser = argparse.ArgumentParser(description="Break fsdp_compat and see that tests fail.")
    parser.add_argument("names", nargs="*", help="parts of names of breaks; default: all")
    parser.add_argument("--tenth", action="store_true", help="a fixed tenth, without tests/gpu")
    parser.add_argument("--texts", action="store_true", help="only check that the texts occur once")
    parser.add_argument("--jobs", type=int, default=2, help="breaks at the same time")
    args = parser.parse_args()
    chosen = [
        each for each in BREAKS if not args.names or any(name in each.name for name in args.names)
    ]
    if args.tenth:
        anywhere = [each for each in chosen if "tests/gpu" not in each.test]  # without a compiler
        chosen = sorted(anywhere, key=lambda each: each.name)[::9]
    if args.texts:
        sources = sources_of(ROOT)
        problems = {each.name: text_problem(each, sources) for each in chosen}
        wrong = [f"{name}: {problem}" for name, problem in problems.items() if problem]
        print(*wrong, f"{len(chosen) - len(wrong)} of {len(chosen)} texts occur once", sep="\n")
        return 1 if wrong or not chosen else 0

    def tried(each: Break) -> bool:
        copy, started = copies.get(), time.monotonic()
        try:
            outcome = try_break(each, copy)
        finally:
            copies.put(copy)
        print(f"{each.name}: {outcome} ({time.monotonic() - started:.0f} s)", flush=True)
        return outcome.startswith("caught")

    with copies_of_checkout(args.jobs) as copies, ThreadPoolExecutor(args.jobs) as pool:
        num_caught = sum(pool.map(tried, chosen))
    print(f"{num_caught} of {len(chosen)} breaks were caught")
    return 1 if num_caught < len(chosen) or not chosen else 0


if __name__ == "__main__":
    sys.exit(main())
