"""Breaks the package on purpose, one line at a time: the tests must see each, see `.ci/long`.

``python tests/breaks.py [FILE ...]`` tries all breaks, or those of some files of the package. A new
break is a row of `BREAKS`.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
COPIED = ("gluon_svrg", "tests", "benchmarks", "pyproject.toml")
SECONDS = 600  # for one run of pytest


#: For each file in gluon_svrg: what stands there once, what replaces it, and the tests of which one
#: must fail, as a file in tests (without "test_") and an expression for pytest's -k.
BREAKS = {
    # The formulas
    "svrg.py": [
        ("b=-alpha, k=alpha,", "b=-alpha, k=1.0,", "methods trajectory[alpha-SVRG"),
        ("(-count / full.mean.entries, 1)", "(-1.0, 1)", "methods trajectory[stored"),
        ("max(self.num_snapshots - 1, 0)", "self.num_snapshots", "schedule snapshot_in_force"),
    ],
    "saga.py": [
        ("(-1.0 * (entries / mean.entries), 2)", "(-1.0, 2)", "methods trajectory[SAGA"),
        ("1.0 * (entries * scale", "2.0 * (entries * scale", "methods trajectory[SAG-"),
    ],
    "sarah.py": [("b=-1.0, k=1.0,", "b=-1.0, k=0.9,", "methods trajectory[SARAH")],
    "storm.py": [("rest = 1 - self.mixing", "rest = self.mixing", "methods trajectory[STORM")],
    "mars.py": [
        ("scale_to_norm(column, self.clip * scale, entries)", "pass", "methods trajectory[MARS"),
        ("(self.s * scale)", "(0.5 * scale)", "methods trajectory[approximate"),
        ("self.ever_reached = []", "pass", "halves moves_by_the_last"),
    ],
    "kvstore/servers.py": [
        ('**_plain(optimizer.lr_scheduler, "lr_scheduler.")', "", "workers test_each_task_with_se"),
    ],
    "passes/recursive.py": [("1 / pending.total_scale", "1.0", "methods not_matter[STORM")],
    # The preconditioner
    "curvature/nystrom.py": [
        ("(float(self.S.min()) if self.has_all else 0.0)", "0.0", "curvature all_directions"),
        ("np.maximum(sign * self.inv", "np.maximum(self.inv", "preconditioner in_every_way"),
        ("float(S.sum()) / entries)", "0.0)", "curvature test_nystrom"),
        ("decay + floor, shift", "floor, shift", "curvature test_nystrom"),
        ("entries / ENTRIES_PER_DIRECTION", "entries", "curvature test_nystrom"),
        ("-1.1 * float(values[0])", "0.0", "curvature least_curvature"),
        ("rho == rounding", "False", "curvature least_curvature"),
        ("S = np.where(is_unseen, usual, S)", "pass", "curvature no_entry"),
        ("np.where(is_seen, of_weights, S.sum() / entries)", "of_weights", "curvature no_entry"),
        (" & (UNSEEN * S[0] > shift)", "", "curvature least_curvature"),
        ("np.append(inside, size)", "np.append(inside, 0)", "curvature rows_are_added"),
        ("if new.has_all", "if True", "curvature rows_and_rounding"),
        ("S.max()) if self.has_all", "S.max()) if False", "preconditioner largest_curvature"),
    ],
    "curvature/probe.py": [
        ("np.ascontiguousarray(", "np.asarray(", "curvature layout_of_a_file"),
        ("LEAST_ENTRIES)) or 1)", "LEAST_ENTRIES)))", "curvature layout_of_a_file"),
        ("min(noise, 2 * largest)", "noise", "curvature two_minibatches"),
        ("+ entries, failed=0", "+ entries", "curvature between_others"),
        ("=products[0], failed=0", "=products[0]", "curvature between_others"),
    ],
    "curvature/step_size.py": [
        ("if not (sums.squared < MOST and ", "if not (", "preconditioner gradient_that_is_not"),
        (" and sums.squared < MOST\n", "\n", "preconditioner gradient_that_is_not"),
        ("product(u) + decays * u", "product(u)", "curvature two_minibatches"),
        ("self.largest_norm, float(", "0.0, float(", "preconditioner by_hand"),
        ("self.P.S.max()", "self.P.S[0]", "curvature flat_minibatches"),
        ("self.noise_budget * DEFAULT.rise, ", "9.0, 9 * ", "curvature noise_budget"),
        ("entries * max(now, 1)", "entries", "curvature new_sketches"),
        ("probe.failed and self.refreshes < 2", "probe.failed", "curvature between_others"),
        ("2 * now + 1 if now", "now + 1 if now", "curvature new_sketches"),
        ("is_slow and now >=", "is_slow and now >", "curvature new_sketches"),
        ("if now == 0 or is_second or", "if now == 0 or", "curvature new_sketches"),
        ("fall, DEFAULT.least", "fall, 0.0 * DEFAULT.least", "curvature budget"),
        ("max(part, DEFAULT.least_rate)", "part", "preconditioner by_hand"),
        ("/ 2 - sums.cross", "/ 2 + sums.cross", "curvature what_steps_tell"),
        ("if secant > DEFAULT.change * self.L > 0:", "if False:", "curvature what_steps_tell"),
        ("min(secant, DEFAULT.change * self.L)", "secant", "curvature what_steps_tell"),
        ("max(largest, self.L / DEFAULT.change)", "largest", "curvature what_steps_tell"),
        ("self.secant_sum), 2 * self.L)", "self.secant_sum), 9e9)", "curvature steps"),
        ("if secant > self.L > 0:", "if secant > self.L:", "preconditioner by_hand"),
        ("and sums.moved > rounding", "", "curvature tell_nothing"),
        ("        if not self.refreshes:\n", "        if False:\n", "curvature tell_nothing"),
        ("/ DEFAULT.window\n", "/ len(self.loss_increases or [0])\n", "preconditioner by_hand"),
        ("rise > self.first_loss - self.loss", "rise > 0", "preconditioner by_hand"),
        ("self.failures = 0\n        if", "pass\n        if", "curvature not_finite"),
        ("self._learn_noise(self.N)", "pass", "preconditioner going_back"),
        ("self.L_at_reset * DEFAULT.change)", "0.0)", "preconditioner going_back"),
        (" * self.L), DEFAULT.change)", " * self.L), 9e9)", "curvature outliers"),
        ("2 * self.rank <= known < size", "False", "curvature outliers"),
        ("rows[-self.rank :]", "rows", "curvature outliers"),
        ("self.failures = None, 0", "_ = None, 0", "curvature outliers"),
        ("DEFAULT.outlier * self.L <", "self.L <", "curvature outliers"),
    ],
    "curvature/proximal.py": [
        ("sqrt(c @ c), least)", "sqrt(c @ c), 0.0)", "curvature few_weights"),
        ("w, z, self.factor * step, rows", "w, z, step, rows", "curvature derivative_and_value"),
        ("self.factor * total", "total", "curvature derivative_and_value"),
        ("self.apply(weights - step * gradient, step)", "weights", "curvature least_subgradient"),
        ("kind != self._last[0]", "not self._last[0]", "curvature in_turn"),
        ("<= {prox.L1, prox.Box}", "", "curvature same_zeros"),
        ("(z != 0).tobytes()", "b''", "curvature in_turn"),
        ("(z == v).tobytes()", "b''", "curvature in_turn"),
    ],
    "curvature/direction.py": [
        ("squared, 0.0, 0.0, 0.0, 0.0", "squared, *products[1:]", "preconditioner that_is_not"),
        ("1.0) if along > 0 else", "1.0) if along else", "preconditioner in_every_way"),
        ("if not np.isfinite(gradient).all()", "if False", "preconditioner overflow"),
        ('out = given["nan" if is_skipped', 'out = given["nan" if 0', "preconditioner overflow"),
        ('given("last_d"))', "d)", "preconditioner by_hand"),
        ('F.elemwise_mul(weights, given("wd"))', "0 * v", "preconditioner by_hand"),
        ('v += given["wd"] * w', "pass", "preconditioner in_every_way"),
        ("(1 - entries / most) * given", "0 * given", "preconditioner in_every_way"),
        ('solved + given["solved_slope"]', "solved", "preconditioner in_every_way"),
        ("kept[:] = d", "kept[:] = 0 * d", "preconditioner in_every_way"),
        ("max(float(squared) ** 0.5, TINY)", "squared", "preconditioner in_every_way"),
        ("MOST) / squared, 1.0) if", "MOST) / squared, 9.0) if", "preconditioner in_every_way"),
        (".get(name) != value", ".get(name) is None", "preconditioner in_every_way"),
        ("self._operators if beta is None else {}", "self._operators", "preconditioner trajectory"),
        ("given=given,", "given=self.given.update(given) or self.given,", "errors preconditioner"),
        ("along - SMALLEST", "along", "preconditioner in_every_way"),
        ('F.maximum(secant, given("bound"))', "secant", "preconditioner in_every_way"),
        (
            "list(_from_json(F.Group([*parts, *kept]).tojson()))",
            "[*parts, *kept]",
            "dtypes_and_amp not_cast",
        ),
        ('"rest", 1 - first / most', '"rest", 0.0', "preconditioner by_hand"),
    ],
    "curvature/threads.py": [("        assign(before)", "        pass", "preconditioner threads")],
    "curvature/preconditioner.py": [
        ("self._settle(step.proximal)", "self._settle(proximal)", "penalties makes_no_zeros"),
        ("if self.controller.P is not self._up", "if 0 and self._up", "preconditioner it_learns"),
        ("self.controller.rate, None", "self.controller.rate, 1.0", "preconditioner a_clip"),
        ("fall if fall < inf else 0.0", "fall", "penalties dropout_on"),
        ("slope=sums.slope + step", "slope=sums.slope - step", "preconditioner rise_of_the_pen"),
        ("8: [0, 4, 5, 6, 3]", "8: [0, 3, 4, 5, 6]", "preconditioner products_of_0_6"),
        ('reversed(state["pending"])', 'state["pending"]', "preconditioner every_phase"),
        ("replace(direction * scale", "replace(direction", "preconditioner in_every_way"),
        ("loss = controller.first_loss = self", "loss = self", "penalties entries_of_a_sample"),
        ("if self._wd is None else self._wd", "", "penalties interrupt_repeats"),
        ("step is each for each", "False for each", "penalties interrupt_repeats"),
        ("step / controller.P.least", "step", "penalties minimum[lasso-float64"),
        ("[*self.controller.secants]", "self.controller.secants", "errors preconditioner"),
        ("max(self._eps, full.eps)", "self._eps", "preconditioner rounding_of_losses"),
        ("first_loss, controller.loss = inf, loss", "loss = loss", "preconditioner more_"),
        ("replaces_grads = needs_closure", "needs_closure", "preconditioner errors"),
        (".set_rate_and_momentum()\n        ret", "\n        ret", "preconditioner trajectory"),
        ("most, self._most = self._most, 0.0", "most = self._most", "preconditioner by_hand"),
        ("full.all_entries, False", "full.all_entries, True", "penalties dropout"),
        ("rank, operators", "rank * 0 + 50, operators", "preconditioner in_every_way"),
        ("network.sum_everywhere(", "(lambda *_: 0)(", "preconditioner going_back"),
        ("workers.sum_arrays)", "lambda _: None)", "workers test_each_task"),
        ("method.point is None:  # all", "self.start is None:  # all", "preconditioner no_more"),
        ("/ 2 + self.penalty.value(w)", "/ 2", "penalties objective_in_history"),
        ("part.operator(weight, 0.0).copyto(weight)", "pass", "penalties minimum[bounds"),
        ("& (last[0] == 0)", "& False", "penalties minimum[lasso-float64"),
        (".wd = 1 / scale, 0.0", ".wd = 1 / scale, optimizer.wd", "penalties large_weight"),
        (".wd = 1 / scale, 0.0", ".wd = 1.0, 0.0", "preconditioner in_every_way"),
        ("rescale_grad * scale", "rescale_grad * 1", "preconditioner in_every_way"),
        ("pending.is_scaled", "scale != 1", "preconditioner overflow_of_amp"),
        ("(s - last) > self._rounding", "(s - last) > 0", "preconditioner at_the_minimum"),
        ("self._optimizer.wd, self._wd =", "self._wd, self._wd =", "penalties large_weight"),
        ("1 / (per_sample or 1.0)", "1.0", "penalties entries_of_a_sample"),
        ('"float64") / (per_sample or 1.0)', '"float64")', "penalties entries_of_a_sample"),
        ("controller.start_over(len(self.decays))", "pass", "penalties entries_of_the_first"),
        ("changed |= not full.draws", "changed |= False", "penalties data_that_change"),
        ("            if full.draws:\n", "            if False:\n", "penalties dropout"),
        ("if self.table is None and self", "if False and self", "penalties stored_gradients"),
        ("controller.entries // BEST_STEPS", "controller.entries // 16", "penalties few_steps"),
    ],
    # A step and a refresh
    "passes/states.py": [("row if _mxnet.is_auxiliary(p) else", "", "resume statistics_of_each")],
    "passes/estimate.py": [
        ("terms.b * (count / terms.mean.entries)", "terms.b", "methods trajectory[SVRG"),
        ("SPARE), ((1.0, MEAN)", "SPARE), ((0.9, MEAN)", "tables mean_is_that"),
    ],
    "passes/full_pass.py": [
        ("bool(sums[7])", "lock.locked", "workers test_two_workers"),
        ("network.sum_everywhere(total, workers.sum)", "pass", "methods trajectory[SVRG-2"),
        ("loss += added(queue)", "pass", "losses mean_of_many"),
        ("its_reached != reached", "number < 4", "halves reaches_moves_by_its_mean"),
    ],
    "passes/pending_update.py": [
        ("and not Mean([], entries).divisor()", "", "workers test_two_workers"),
        ("self.drop()  # or `update`", "pass  # or `update`", "penalties reduction_that_fails"),
        ("self.entries + estimated.rec", "estimated.rec", "halves a_clip_between"),
        ("max(norm([then]), self._largest / scale)", "norm([then])", "dtypes_and_amp large_micro"),
        ("map(or_, shown, leans)", "shown", "halves reaches_moves_by_its_mean[SVRG"),
        ("terms is not PLAIN_GRADIENT and ", "", "methods plain_optimizer[STORM"),
        ("if not self.entries and", "if False and", "losses without_losses[MARS"),
        ("sum_everywhere(self._apart, sum_arrays)", "fits([])", "workers test_two_workers"),
    ],
    "passes/method.py": [
        ("self.ever_reached or pending", "pending", "halves by_its_mean[SARAH"),
        ("if not np.isfinite(full.norm)", "if False", "errors 'mistakes and NaN'"),
    ],
    "passes/network.py": [
        ("copy(self.grads, self.spare)", "pass", "halves users_own_backward[SVRG]"),
        ("else p.grad_req)", 'else "write")', "layers penalty_that_ends[SVRG"),
        ('and p.grad_req != "add"]', "]", "halves before_the_update[SVRG"),
        ("if p in self.unseen and any(flags):", "if False:", "layers writes_elsewhere[SVRG"),
    ],
    "passes/closure.py": [("(device)] += prod", "(device)] = prod", "losses several_losses")],
    "passes/random_lock.py": [
        ("relative if relative > rounding else 0.0", "relative", "losses samples_in_another_order"),
        ("(entries.sum", "(entries[..., :1].sum", "losses samples_in_another_order"),
        ("int(sequence.generate_state(1)[0] >> 1)", "7", "losses both_passes"),
    ],
    "passes/rows.py": [
        ("self._point if is_on else None", "self._point", "tables no_check"),
        ("counts != self.counts", "sum(counts) != sum(self.counts)", "tables on_other_devices"),
        ("outside.fingerprint() == self.outside", "True", "tables 'weights_have_moved or share'"),
    ],
    "passes/watch.py": [
        ("if message not in self.messages:", "if True:", "penalties few_steps"),
        ("min(sizes[0] for", "max(sizes[0] for", "errors false_alarm"),
        ("and shape not in shapes[1:]", "", "errors false_alarm"),
        ("steps == self._steps + 1 and", "", "errors false_alarm"),
        ("and 2 * self._step_entries < self._refresh_entries", "", "errors false_alarm"),
        ("if self._has_one and", "if not self._has_one and", "errors 'false_alarm or probably'"),
    ],
    "passes/outside.py": [("_found if not _mxnet.is_auxiliary(p)", "_found", "tables statistics")],
    "passes/data.py": [("in (True, False):", "in (False,):", "networks only_training")],
    "passes/columns.py": [('16": "float32"', '16": "float16"', "dtypes_and_amp float16_cannot")],
    "trainer.py": [
        (
            "inner_steps = 0\n            self._b",
            "was = 0\n            self._b",
            "halves new_values",
        ),
        ("table and terms is not PLAIN_GRADIENT", "table", "errors no_false"),
        ("point.weights + point.frozen, net", "point.weights, net", "preconditioner all_values"),
        ("ations / full.entries", "ations / full.all_entries", "workers test_two_workers"),
        ("pending.drop()  # without", "pass  # without", "methods step_without_an_update"),
        ("attributes.update(earlier)", "pass", "losses both_passes"),
        ("value.copyto(grad)", "pass", "methods error_leaves_everything_unchanged"),
        ("note_overwritten(_mxnet.take_fresh(point.weights))", "hide_marks()", "halves snapshot"),
        ("        progress.inner_steps = 0", "        pass", "methods counters"),
        ("self._overflows_on_kvstore():", "False:", "dtypes_and_amp overflow_in_either"),
        ("self._progress.inner_steps = 0  # of", "pass  # of", "methods file_of_gluon_trainer"),
        ("self._progress.compared = False", "pass", "losses compares_once_more"),
    ],
    # Workers and files
    "kvstore/workers.py": [("len(total), BLOCK)", "1, BLOCK)", "workers test_two_workers")],
    "saving/file_format.py": [("first or content[", "first and content[", "files damaged_files")],
    "saving/files.py": [
        ("if method != self._method:", "if False:", "files formats_methods_and_parts"),
        ("if self._problems(self.waiting, parts,", "if (lambda *_: 0)(", "resume cast_after"),
        ('("method", "preconditioner"):', '("method",):', "resume waits_is_discarded"),
    ],
    "saving/objects.py": [
        (", *self._waiting]", "]", "schedule waits_for_its_schedule"),
        ("else np.array(value)", "else np.asarray(value)", "schedule arrays_of_a_sampler"),
        ("max(left, key=likeness)", "left[0]", "schedule remembered"),
        ("len(same & settings), len(same)", "len(same)", "schedule counters"),
        ("elif _has_object(value):", "elif False:", "files containers_of_0_6"),
        ("assign_object(value, getattr(current, name))", "pass", "files of_ones_own"),
    ],
    "saving/values.py": [
        ('encoded.get("order", "C")', '"C"', "files of_ones_own"),
        ('and not hasattr(item, "__name__")', "", "files is_its_attributes"),
        ("type(value) in (list, tuple):", "kind in _CONTAINERS:", "files not_s"),
    ],
    "saving/optimizer.py": [
        ("{**others, **restored(row)}", "restored(row)", "files of_ones_own"),
        ("max(row.get(n, 0), most.get(n, 0))", "0", "files 'resumes and adam'"),
    ],
    "saving/pickles.py": [
        ("if name not in [*_ARRAYS,", "if [] and name in [", "files crafted_pickles"),
        ("def get_extension(", "def _extension(", "files extensions"),
        ("if type(found) is not bytes:", "if False:", "files crafted_pickles"),
    ],
    # What surrounds the trainers
    "prox.py": [
        ("/ (1 - float(", "/ (1 - 0 * float(", "prox test_every_trainer[SVRG]"),
        ("(result != 0) / (1 + step", "(result != 0) / (1 + 0 * step", "curvature derivative"),
        ("np.where(share < 1, share, 0) * along", "0 * along", "curvature derivative"),
        ("directions * (weight == result)", "directions", "curvature derivative"),
    ],
    "schedule.py": [("num_snapshots - 1)", "num_snapshots)", "schedule test_refreshes")],
    "variance.py": [
        ("stack.callback(mx.random.seed, draw_seed())", "pass", "tables after_a_variance"),
        ("self._plain += count * g", "self._plain += g", "tables against_numpy"),
        ("self._squares += count *", "self._squares +=", "tables against_numpy"),
        ("coefficient * _ratio(both", "_ratio(both", "tables against_numpy"),
        ("unit_sum - count", "unit_sum", "tables against_numpy"),
        ("stack.callback(mx.random.seed, draw_seed())", "pass", "tables dropout_under"),
        ("seed = reference.seed", "pass", "tables dropout_under"),
    ],
    "estimator.py": [
        ("(batch, devices, batch_axis)", "(batch, devices)", "estimator another_axis"),
        ("estimator.trainer.epoch_count.epochs += 1", "pass", "estimator loop_by_hand"),
    ],
    "compare/training.py": [
        ('["data_passes"] <= self', '["data_passes"] < self', "compare_engine equal_gradients"),
        ("any(map(_mxnet.is_aux", "not any(map(_mxnet.is_aux", "compare_engine batchnorm_have"),
        ("since % self.problem.refresh_every", "since % 1", "compare_engine refreshes_come"),
        ("        put(accepted)\n", "", "compare_engine lbfgs_ends"),
        ("(1 + cos(pi * part))", "(1 + cos(pi * part / 2))", "compare_engine rates_of_steps"),
        ('method.base == "sag" and epoch > 0', "False", "compare_engine order_of_minibatches"),
        ("len(batch[0]) if mx", "1 if mx", "compare_engine equal_gradients[4-sgd"),
        ("self.done + cost / 2", "self.done - cost", "compare_engine equal_gradients[4-svrg"),
        ("raise FloatingPointError(", "print(", "compare_engine divergence"),
        ("        self.since = perf_counter()\n", "", "compare_engine first_in_seconds"),
        ("self.since > seconds", "self.since > 0", "compare_engine first_in_seconds"),
        ("losses + self.problem", "losses + 0 * self.problem", "compare_engine penalty"),
    ],
    "compare/methods.py": [
        ("Linear(0.75, snapshots)", "Linear(0.75, 3 * snapshots)", "compare_engine refreshes_come"),
        ("what.lower(), method.optimizer]", "method.optimizer][::-1]", "compare_engine options_of"),
        ('"lock_random": problem.is_random', '"lock_random": False', "compare_engine lock_of"),
        ('if method.base not in ("", *TRAINERS):', "if False:", "compare_engine proximal"),
    ],
    "compare/task.py": [
        ("penalties += number(", "penalties += 0 * number(", "compare_engine proximal"),
        ("operator(weight, 0.0).copyto(weight)", "pass", "compare_engine bounds"),
        ('p.grad_req = "write"', "pass", "compare_engine gradients_that_add"),
        ("if not any(p.data()", "if False and any(p.data()", "compare_engine beside_zero"),
    ],
    "compare/data.py": [
        ("= batch_size or size or 2 **", "= 2 **", "compare_engine default_minibatch"),
        ("one is None or other is None or", "other is not None and", "compare_engine gives"),
    ],
    "compare/search.py": [
        ("method.batch_size(self.problem.data)", "10", "compare_engine default_minibatch"),
        ("max(0, min(low, best - 1))", "low", "compare_engine 'edge or seed'"),
        ("(firsts[rate] <= worst and", "(False and", "compare_engine 'edge or seed'"),
        ("np.median(np.where(", "np.min(np.where(", "compare_engine 'edge or seed'"),
        ('max((each.curve[-1]["sec', 'min((each.curve[-1]["sec', "compare_engine first_in_seconds"),
        ("= max(1, best - 1)", "= best", "compare_engine search_is_counted"),
        ("/ (len(order) - place)", "", "compare_engine budget"),
    ],
    "compare/comparison.py": [
        ("if lowest < inf and not any", "if not any", "compare_engine divergence"),
        ('end = {**row, "data_passes": nan}', "end = {**row}", "compare_engine rivals"),
        ("not None and sign * minimum", "not None and minimum", "compare_engine a_known"),
        ("notna().any()][-1]", "notna().any()][0]", "compare_engine known_minimum"),
        ("ends[np.isfinite(ends)]", "ends", "compare_engine one_seed"),
        ("(training) <= level", "(training) >= level", "compare_engine minimum"),
        ("self._minimum, self._least)", "self._minimum, 0.0)", "compare_engine smallest_gap"),
        ("and e not in some]", "]", "compare_engine search_is_counted"),
    ],
    "commands/compare.py": [
        ("net.bias.data().asnumpy() if self", "0 if self", "compare bias_alone"),
        ("seeds=range(options.seed,", "seeds=range(0,", "compare momentum"),
        ("loss if has_converged else None", "loss", "compare converged"),
        ("return 130 if", "return 0 if", "compare interrupt"),
        ("np.nan_to_num(scaler", "(scaler", "compare a_file"),
        ("utc=True, ", "", "compare a_file"),
        ('{".*weight": L1(self.l1)}', "L1(self.l1)", "compare weights_alone"),
        ("self.l1 * abs(w).sum()", "0", "compare the_minimum"),
        ("net.bias.wd_mult = 0.0", "pass", "compare weights_alone"),
        ("] > MOST_WEIGHTS", "] > 1e9", "compare many_inputs"),
    ],
}


def selected(*tests):
    """The arguments of pytest for the tests of some breaks."""
    pairs = [shlex.split(each) for each in tests]
    files = sorted({f"tests/test_{file}.py" for file, _ in pairs})
    return *files, "-k", " or ".join(sorted({f"({expression})" for _, expression in pairs}))


def run_tests(folder, arguments):
    """Run tests with the package in a folder; the status, and the output."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    env = {**os.environ, "PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    # In the folder, because Python looks there for the package first:
    process = subprocess.Popen(command, cwd=folder, env=env, start_new_session=True, **pipes)
    try:
        output, _ = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
    return process.returncode, output


def verdict(folder, name, old, new, tests):
    """Whether the tests see a break, in a word."""
    file = Path(folder, "gluon_svrg", name)
    whole = file.read_text()
    file.write_text(whole.replace(old, new))
    status, output = run_tests(folder, selected(tests))
    file.write_text(whole)
    word = {0: "survived", 1: "died", -signal.SIGKILL: "took too long"}.get(status, "never ran")
    seen = re.findall(r"^FAILED \S+?::(\w+)", output, re.M)
    print(word, name, old, "->", new or "nothing", *seen, sep="  ", flush=True)
    if word != "died":
        print(output[-3000:], flush=True)
    return word


def main():
    """Try all breaks; 1 if the tests do not see one, or fail without a break."""
    chosen = [(name, *row) for name in sys.argv[1:] or BREAKS for row in BREAKS[name]]
    for name, old, _, _ in chosen:
        count = (ROOT / "gluon_svrg" / name).read_text().count(old)
        assert count == 1, f"{name} has {count} times: {old}"
    with tempfile.TemporaryDirectory() as folder:
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, Path(folder, name))
        status, output = run_tests(folder, selected(*(tests for *_, tests in chosen)))
        assert status == 0, output[-3000:]
        print("Without a break:", output.splitlines()[-1], flush=True)
        words = [verdict(folder, *each) for each in chosen]
    print(f"{words.count('died')} of {len(words)} breaks died.")
    return int({*words} != {"died"})


if __name__ == "__main__":
    sys.exit(main())
