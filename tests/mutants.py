"""One broken line each, by the module that it stands in.

A module is named by its path inside the package, as ``"methods/svrg"``. A mutant has a name, the
text that stands there exactly once, what takes its place, and where others come first, a test that
sees it. If the text has moved, to another module or to another indentation, it is found where it
stands once in the package.
"""

FORMULA = ["methods::test_variance_and_bias", "methods::test_trajectory"]
SCALED = "methods::test_the_scale_of_the_losses_does_not_matter"
LARGE = "methods::test_trajectory_with_large_layers"
LOADED = "identities::test_a_loaded_full_gradient_is_the_same_to_the_last_bit"

#: The test files, or single tests of them, that must see a broken line of a module, the fast ones
#: first; of the longest path that the module begins with.
SUITES = {
    "": [*FORMULA, "identities", "interface", "accumulation", "blocks", "part_of_network"],
    "trainer": [
        "methods::test_micro_batches_accumulate",
        "methods::test_a_step_that_amp_skips_moves_nothing",
        "methods::test_an_update_that_fails_moves_nothing",
        "defects_frozen::test_coefficient_0_is_gluon_trainer_where_no_loss_reaches_a_parameter",
        *FORMULA,
        "interface",
        "prox",
    ],
    "_arguments": ["schedule::test_bad_arguments"],
    "commands/training": [
        "compare::test_each_method_against_its_twin",
        "compare::test_the_best_rate_trains_with_more_seeds",
    ],
    "commands/compare": ["compare::test_the_best_rate_trains_with_more_seeds"],
    "commands/datasets": [
        "compare::test_a_file_as_it_is",
        "compare::test_many_classes",
        "compare::test_labels_that_are_nearly_numbers",
    ],
    "__main__": ["import"],
    "passes/": [*FORMULA, "random_lock", "accumulation", "part_of_network", "blocks", "interface"],
    "passes/arrays": ["passes", "defects_interrupts"],
    "passes/entries": ["passes"],
    "passes/multiples": ["passes"],
    "passes/closure": ["interface", *FORMULA],
    "passes/estimate": [
        *FORMULA,
        "stored::test_the_oracle",
        "stored::test_an_overflow_confirms_nothing",
        "part_of_network",
        "random_lock",
        "rounding",
        "defects_random",
        "accumulation",
        "blocks",
    ],
    "passes/full_pass": [
        *FORMULA,
        "resume::test_each_step",
        "random_lock",
        "defects_random",
        "accumulation",
        "interface",
    ],
    "passes/losses": ["identities::test_the_mean_loss_of_many_minibatches"],
    "passes/interrupts": ["defects_leaks", "defects_interrupts"],
    "passes/network": ["part_of_network", "blocks", "accumulation", "interface", "methods"],
    "passes/outside": ["part_of_network", "defects_frozen"],
    "passes/points": ["defects_frozen", "defects_threads", "interface", "networks"],
    "passes/probe": ["recursive", "networks", "passes", "blocks"],
    "passes/random_lock": ["random_lock"],
    "passes/repeats": ["rounding", "random_lock"],
    "passes/sketch": ["passes", "random_lock", "rounding"],
    "passes/sums": [
        "recursive::test_factors_of_float64",
        *FORMULA,
        SCALED,
        LOADED,
        "stored",
        "accumulation",
        "blocks",
        "interface",
    ],
    "methods/at_work": ["defects_gradients", "defects_random", "interface", *FORMULA],
    "methods/live_gradients": [
        "methods::test_micro_batches_accumulate",
        "methods::test_a_step_that_amp_skips_moves_nothing",
        "methods::test_an_update_that_fails_moves_nothing",
        "defects_gradients",
        "saga::test_micro_batches_that_only_some_parameters_accumulate",
        "histories",
        "interface",
    ],
    "methods/": [*FORMULA, "stored", "identities", "accumulation"],
    "methods/barzilai_borwein": ["barzilai_borwein"],
    "methods/mars": [*FORMULA, "recursive"],
    "methods/recursive": [*FORMULA, "recursive"],
    "methods/saga": [
        "cures::test_a_table_over_reshuffled_data_and_no_refresh",
        *FORMULA,
        "saga",
        SCALED,
        "methods::test_micro_batches_accumulate",
    ],
    "methods/table": ["stored"],
    "methods/svrg": [*FORMULA, LOADED, "defects_frozen", "stored", "saving"],
    "saving/": ["saving_files", "saving_names", "saving_optimizers", "states"],
    "saving/objects": ["saving_optimizers", "defects_schedules"],
    "saving/parameters": ["saving_names"],
    "saving/pickles": ["saving_pickles"],
    "kvstore/": ["stores", "interface", "distributed"],
    "kvstore/collective": ["toy_kvstore"],
    "kvstore/kinds": ["stores"],
    "kvstore/server_optimizer": [
        "distributed::test_settings_reach_the_optimizer_on_the_servers",
        "distributed::test_dist_async",
    ],
    "kvstore/servers": [
        "stores::test_where_the_reduced_gradient_does_not_come_back",
        "distributed::test_settings_reach_the_optimizer_on_the_servers",
        "distributed::test_dist_async",
        "kvstore::test_dist_async_takes_the_snapshot_at_the_weights_of_the_servers",
    ],
    "kvstore/workers": ["toy_kvstore", "kvstore"],
    "_mxnet/": ["interface", "states", "stores"],
    "_mxnet/arrays": ["defects_gradients"],
    "_mxnet/operators": [*FORMULA, LOADED, LARGE, "blocks::test_parameters_of_many_dimensions"],
    "_mxnet/parameters": ["defects_threads"],
    "_mxnet/open_trainer": [
        "methods::test_a_step_that_amp_skips_moves_nothing",
        "distributed::test_convolutions",
        "distributed::test_ranks_that_start_apart_take_one_first_step",
    ],
    "_mxnet/optimizers": ["prox"],
    "prox": ["prox"],
    "schedule": ["schedule", "defects_schedules"],
    "variance": ["variance", "defects_schedules"],
    "estimator": ["estimator"],
}

MUTANTS = {
    "prox": {
        "L1 without the step": (
            "_soft(weight, _times(step, self.strength))",
            "_soft(weight, self.strength)",
        ),
        "negative weights not shrunk": (
            "mx.nd.maximum(mx.nd.minimum(weight, least), -least)",
            "mx.nd.minimum(mx.nd.abs(weight), least)",
        ),
        "elastic net without the step of l1": ("_times(step, self.l1))", "self.l1)"),
        "elastic net without the step of l2": ("/ (1 + step * self.l2)", "/ (1 + self.l2)"),
        "elastic net without l2": (" / (1 + step * self.l2)\n", "\n"),
        "group lasso without the step": (
            "least = _times(step, self.strength)",
            "least = self.strength",
        ),
        "numbers that MXNet refuses": (" if product >= sys.float_info.min else 0.0", ""),
        "groups along the other axes": ("if axis != self.axis", "if axis == self.axis"),
        "squared norms": (".sqrt() if others", " if others"),
        "nan for a group of zeros": ("max(least, 1e-30)", "least"),
        "an axis too many": (
            "self.axis >= len(shape)",
            "self.axis > len(shape)",
            "prox::test_a_prox_that_cannot_be",
        ),
        "no upper bound": (", float(self.high))", ", inf)"),
        "no lower bound": ("mx.nd.maximum(weight, float(self.low))", "weight"),
        "negative weights turned round": ("mx.nd.maximum(weight, 0.0)", "mx.nd.abs(weight)"),
    },
    "proximal": {
        "momentum forgotten": ("/ (1 - float(", "/ (1 - 0 * float(", "prox::test_every_trainer"),
        "weights that have not moved": (
            "                if has_moved:",
            "                if True:",
            "prox::test_stale_gradients",
        ),
        "one device only": (
            "_mxnet.data(parameter)), flags)",
            "_mxnet.data(parameter)[:1]), flags)",
            "prox::test_trajectory",
        ),
        "the last key": (
            "(choice[key] for key in choice if",
            "(choice[key] for key in [*choice][::-1] if",
            "prox::test_a_none_is_no_prox",
        ),
        "every optimizer": (
            "if not _mxnet.steps_along_gradient(optimizer):",
            "if False:",
            "prox::test_optimizers_with_another_step",
        ),
        "momentum of an instance": (
            'getattr(optimizer, "momentum", 0.0)',
            "0.0",
            "prox::test_a_momentum_without_end",
        ),
        "float16 taken": ("if dtype not in", "if None and dtype not in", "prox::test_float16"),
    },
    "_mxnet/optimizers": {
        "rate without the multiplier": (
            "(rate,) = optimizer._get_lrs([index])",
            "rate = optimizer.learning_rate",
            "prox::test_multipliers_and_schedulers",
        ),
        "rate that is not rounded": (
            "return float(np.float32(rate))",
            "return float(rate)",
            "prox::test_trajectory",
        ),
    },
    "schedule": {
        "asked without a trainer": (
            'if hasattr(type(trainer), "wants_snapshot"):',
            "if True:",
            "schedule::test_a_refresh_schedule_needs_a_trainer",
        ),
        "overflow": (
            "        except OverflowError:\n            return _MOST",
            "        except ZeroDivisionError:\n            return _MOST",
            "defects_schedules::test_growing_never_overflows",
        ),
        "quiet without a snapshot": (
            "return trainer.wants_snapshot or trainer.inner_steps >= self.steps",
            "return trainer.has_snapshot and trainer.inner_steps >= self.steps",
        ),
        "coins of any trainer": (
            "        trainer.register(self)\n        coin",
            "        coin",
            "schedule::test_the_coins_are_saved_with_the_trainer",
        ),
        "linear decay upwards": ("(self.initial - self.final) * left", "left"),
        "cosine of another angle": ("math.cos(math.pi * done)", "math.cos(done)"),
        "over too late": ("index >= self.snapshots", "index > self.snapshots"),
        "epoch missed": (
            "epoch % self.epochs == 0",
            "epoch % self.epochs == 1",
            "schedule::test_every_epochs_by_its_own_count",
        ),
        "a seed that cannot be drawn with": (
            '        self.seed = _arguments.whole(seed, "seed", 0)\n        self.asked',
            "        self.seed = seed\n        self.asked",
            "schedule::test_bad_arguments",
        ),
        "coin on its side": (
            "coin < self.probability",
            "coin > self.probability",
            "schedule::test_loopless",
        ),
        "no doubling": (
            "self.first * 2 ** (taken - 1)",
            "self.first * taken",
            "schedule::test_doubling",
        ),
    },
    "variance": {
        "noise without the signal": ("return self.plain / signal", "return self.plain"),
        "random numbers left seeded": (
            "            stack.callback(random_lock.start, random_lock.draw_seed())\n",
            "            pass\n",
            "defects_schedules::test_what_mxnet_draws_after_variance_follows_from_what_it_had_drawn",
        ),
        "means not subtracted": ("-= [np.dot(g, g)", "-= [0 * np.dot(g, g)"),
        "minibatches of equal weight": ("self._plain[k] += count * g", "self._plain[k] += g"),
        "coefficient not squared": ("self._coefficient**2 * control", "control"),
        "gradients changed by a variance": (
            "        stack.enter_context(network.grads_kept())\n",
            "",
        ),
    },
    "methods/interface": {
        "an index of NumPy": (
            "        return int(index)",
            "        return index",
            "saga::test_indices_of_numpy",
        ),
    },
    "_arguments": {
        "truth is a number": (
            "isinstance(value, bool) or not isinstance(value, Real)",
            "not isinstance(value, Real)",
            "schedule::test_bad_arguments",
        ),
    },
    "estimator": {
        "a handler that outlives its training": (
            "        estimator.batch_processor._has_handler = False\n",
            "        pass\n",
            "estimator::test_a_second_training_without_a_handler",
        ),
        "a handler that nothing needs": (
            'not self._has_handler and getattr(trainer, "_needs_refresh", True)',
            "not self._has_handler",
            "cures::test_storm_in_an_estimator_needs_no_handler",
        ),
        "epochs not counted": ("self._count.epochs += 1", "pass"),
        "refresh without a snapshot missed": (
            "(wanted or self",
            "(self",
            "estimator::test_resuming_without_a_snapshot_refreshes_at_once",
        ),
        "epochs not saved": (
            "self._count = estimator.trainer.epoch_count",
            "pass",
            "estimator::test_checkpoints_and_resume",
        ),
    },
    "passes/estimate": {
        "an overflow is a difference": (
            "return differentiated, not np.isnan(difference)",
            "return differentiated, True",
            "stored::test_an_overflow_confirms_nothing",
        ),
        "gradients with other factors compared": (
            "is_alone = not total.rounds_alike(terms.b)",
            "is_alone = False",
            "rounding::test_both_gradients_are_taken_with_the_same_factor",
        ),
        "states moved by a comparison": (
            "                    copy_all(before, states)  # which",
            "                    pass  # which",
            "rounding::test_the_estimate_after_a_second_look",
        ),
        "reference gradient missing": (
            "v.add(recorded, reference, terms.b)  # v += b r",
            "v.add(recorded, reference, 0.0)",
        ),
        "reference gradient with another factor": (
            "v.add(recorded, reference, terms.b)",
            "v.add(recorded, reference)",
        ),
        "gradient missing": ("v.add_last(recorded, here)  # v += g", "v.add(recorded, here, 0.0)"),
        "mean missing": ("v.start(recorded.counts, terms.k, terms.mean)", "v.start()"),
        "gradient of a single pass missing": (
            "v.set_to(recorded, network.weights)  # v = g\n",
            "v.set_to(recorded, network.weights)\n        v.start()\n",
        ),
        "row missing": (
            "counts, k, m, b, row_grads)  #",
            "counts, k, m, b, None)  #",
            "stored::test_the_oracle",
        ),
        "row of a table missing": ("k, m, b, row_grads, *keep", "k, m, b, None, *keep"),
        "mean missing beside a row": (
            "counts, k, m, b, row_grads)  #",
            "counts, k, None, b, row_grads)  #",
        ),
        "mean of a table missing": (
            "counts, k, m, b, row_grads, *keep",
            "counts, 0.0, m, b, row_grads, *keep",
        ),
        "another minibatch than that of the row": (
            "            row.check_counts(recorded.counts)\n        reached",
            "            pass\n        reached",
            "stored",
        ),
        "another minibatch at the weights": (
            "        check_repeatable(there.counts, recorded.count().counts)\n",
            "        recorded.count()\n",
            "interface",
        ),
        "g not kept": ("keep = terms.copy_to, terms.moved,", "keep = terms.moved, terms.moved,"),
        "unlocked at the weights": (
            "    random_lock.start(seed)\n    recorded, touched = here.at(at_weights)",
            "    recorded, touched = here.at(at_weights)",
            "random_lock::test_locked",
        ),
    },
    "passes/sums": {
        "count missing": ("(k * counts[device] * self.scale,)", "(k * self.scale,)"),
        "count missing beside a row": (
            "((k * counts[device] * self.scale, len(columns)))",
            "((k * self.scale, len(columns)))",
            "methods::test_variance_and_bias",
        ),
        "sign of the row": (
            "(b * self.scale, 1)",
            "(-b * self.scale, 1)",
            "stored::test_equal_to_recomputing",
        ),
        "a scaled row kept": (
            "(1 / scale, v)",
            "(1.0, v)",
            "methods::test_the_scale_of_the_losses_does_not_matter",
        ),
        "a move that does not scale with the loss": (
            "(scale, last)",
            "(1.0, last)",
            "methods::test_the_scale_of_the_losses_does_not_matter",
        ),
        "no first term": ("else ((0, (first,)),)", "else ()", "methods::test_variance_and_bias"),
        "sign of the row in a move": (
            "((1.0, g), (b, r))",
            "((1.0, g), (-b, r))",
            "methods::test_variance_and_bias",
        ),
        "sign of the row in place": ("(1.0, v), (b, r)", "(1.0, v), (-b, r)", LARGE),
        "a mean that moves by the mean": (
            "moved = ((1.0, v), (1.0, m))",
            "moved = ((1.0, m), (1.0, m))",
            LARGE,
        ),
        "no mean in place": ("(1.0, v), (mean, m)", "(1.0, v), (0.0, m)", LARGE),
        "a scaled row in place": ("by_products and scale == 1 and", "by_products and", SCALED),
        "row that is not in the sum": (
            "((1.0, last), (1.0, m))",
            "((0.0, last), (1.0, m))",
            "saga",
        ),
        "mean that forgets nothing where it moves at once": (
            "((1.0, last), (1.0, m))",
            "((1.0, last), (0.0, m))",
            "saga",
        ),
        "a new row that is not in the sum": (
            "last = g if b is None else move",
            "last = move",
            "saga",
        ),
        "what a single pass did not reach": (
            "        self.clear(touched)\n        if self.observed",
            "        if self.observed",
            "methods::test_trajectory",
        ),
        "the operator of other factors": (
            "key = device, factors, id(",
            "key = device, id(",
            "methods::test_variance_and_bias",
        ),
        "factor missing": (
            "            recorded.backward(factor * self.scale)",
            "            recorded.backward(self.scale)",
            "methods::test_variance_and_bias",
        ),
        "a factor that the loss rounds": (
            "or not recorded.rounds(factor, self._live_grads.epsilon):",
            "or True:",
            "recursive::test_factors_of_float64",
        ),
        "factor missing where gradients are added apart": (
            "(1.0, factor), sources, self._sums",
            "(1.0, 1.0), sources, self._sums",
            "stored::test_data_that_does_not_know_its_length_is_watched",
        ),
        "full gradient of other minibatches": (
            "all(k * count * self.scale == 1 for count in counts)",
            "any(k * count * self.scale == 1 for count in counts)",
            "identities::test_a_loaded_full_gradient_is_the_same_to_the_last_bit",
        ),
        "full gradient missing where gradients are added apart": (
            "sources = before, self._live_grads",
            "sources = self._sums, self._live_grads",
            "identities::test_a_loaded_full_gradient_is_the_same_to_the_last_bit",
        ),
        "last gradient missing where gradients are added apart": (
            "(1.0, 1.0), sources, self._live_grads",
            "(0.0, 1.0), sources, self._live_grads",
            "stored::test_sparse",
        ),
        "all but the last gradient missing where gradients are added apart": (
            "(1.0, 1.0), sources, self._live_grads",
            "(1.0, 0.0), sources, self._live_grads",
            "stored::test_sparse",
        ),
    },
    "passes/full_pass": {
        "a locked pass draws what it likes": (
            "seed if self._one_by_one or is_first else None",
            "seed if self._one_by_one else None",
            "resume::test_each_step",
        ),
        "one minibatch repeated": (
            "REPEATED = 3",
            "REPEATED = 1",
            "defects_random::test_randomness_of_some_calls_is_found_by_most",
        ),
        "entries of one minibatch": ("entries += recorded.entries", "entries = recorded.entries"),
        "mean not taken": ("combine([1 / divisor], [first], first)", "pass"),
        "a device not summed": ("    sum_over_devices(total.arrays)\n", ""),
        "a device without the mean": ("    copy_to_devices(sums)\n", ""),
        "infinite accepted": (
            "if not all_finite",
            "if None and all_finite",
            "interface::test_a_full_gradient_that_is_not_finite",
        ),
    },
    "passes/repeats": {
        "losses of other random numbers compared": (
            "    random_lock.start(seed)\n    return here.at(here.network.record",
            "    return here.at(here.network.record",
            "rounding::test_a_state_that_a_recurrent_network_carries",
        ),
        "rounding is a difference": ("        if is_same:\n", "        if False:\n"),
        "each difference is rounding": ("MARGIN = 32", "MARGIN = 1e6"),
        "a second look though losses differ": (
            "if not sketch.is_other(loss_difference(*found.recorded), network.live_grads):",
            "if True:",
        ),
        "an operator without factors": ("if of_zero.any():", "if False:"),
        "a state at rest": (
            "    call_elsewhere(network, found.closure, found.inputs)\n",
            "",
            "rounding::test_a_state_that_a_recurrent_network_carries",
        ),
        "a small difference after the lock": (
            "network.live_grads, lock.locked)",
            "network.live_grads)",
            "rounding::test_a_small_difference_that_stays_after_the_lock",
        ),
        "half a gradient": (
            "                total.start()\n                once(here",
            "                once(here",
            "rounding::test_rows_that_are_mostly_rounding",
        ),
    },
    "passes/batches": {
        "one minibatch is data": (
            "if isinstance(data, arrays) or (is_list and",
            "if False and (is_list and",
            "cures::test_one_minibatch_is_no_data",
        ),
    },
    "passes/losses": {
        "losses added twice": ("        self._recorded.clear()\n", ""),
        "losses of one device": (
            "for losses in alike.values():",
            "for losses in [*alike.values()][:1]:",
        ),
    },
    "methods/barzilai_borwein": {
        "old full gradient left out": (
            'new_mu.astype("float64") / multiples[1] - mu.astype("float64") / multiples[0]',
            'new_mu.astype("float64") / multiples[1]',
        ),
        "a multiple of the full gradient": (" / multiples[1] - mu", " - mu"),
        "a multiple of the old full gradient": (") / multiples[0]", ")"),
        "no weight decay": (" + wd * float(np.dot(dw, dw))", ""),
        "inverse": ("rate = squared / denominator", "rate = denominator / squared"),
        "steps left out": ("denominator = steps * product", "denominator = product"),
        "negative curvature": (
            "if denominator <= 0:",
            "if denominator == 0:",
            "barzilai_borwein::test_a_concave_loss_keeps_the_rate",
        ),
    },
    "trainer": {
        "plain gradients taken": (
            "if self._live.stage == NOTHING and (",
            "if None and self._live.stage == NOTHING and (",
            "interface::test_an_estimate_is_not_used_after_an_error",
        ),
        "moves when nothing was updated": (
            "self._live.drop_next_state()",
            "self._live.end()",
            "methods::test_a_step_that_amp_skips_moves_nothing",
        ),
        "updated on the kvstore": ('"A prox" if prox is not None else ""', '""'),
    },
    "methods/live_gradients": {
        "one micro-batch of many": (
            "self.entries + found.entries",
            "found.entries",
        ),
        "kept after the update": (
            "[*changes, (vars(self), _empty())]",
            "[*changes]",
        ),
        "another backward not seen": (
            "        if overwritten:",
            "        if None and overwritten:",
        ),
        "a minibatch set to zero stays": (
            "            if all_zero(",
            "            if None and all_zero(",
        ),
        "what was there before counts": (
            "            if known:\n",
            "            if None and known:\n",
        ),
        "one minibatch kept apart": (
            "            if self._is_apart:\n                combine(",
            "            if False:\n                combine(",
        ),
        "one device kept apart": ("            sum_over_devices(self._apart)\n", ""),
        "what the user made of V": (
            "return self._apart if self._is_apart else self._network.live_grads",
            "return self._network.live_grads",
        ),
        "a lost change": ("if not (self._method.replaces_grads and", "if not (False and"),
        "only some gradients of all minibatches": (
            "            if len(kinds) > 1:",
            "            if None:",
        ),
    },
    "methods/at_work": {
        "no plain step": ("        if terms.is_plain:\n", "        if None and terms.is_plain:\n"),
        "compared though nothing is known": (
            "counters.compared = found.compared if compare else True",
            "counters.compared = True",
        ),
        "not compared after a refresh": ("        counters.compared = False\n", ""),
    },
    "_mxnet/open_trainer": {
        "moves when the update was skipped": (
            "(self._on_updated if moves else self._on_not_updated)()",
            "self._on_updated()",
        ),
        "layout of oneDNN sent": (
            "                make_plain(parameter._data)\n",
            "                pass\n",
        ),
    },
    "passes/closure": {
        "losses counted, not entries": ("+= prod(shape)", "+= 1"),
        "another minibatch the second time": ("if tuple(before) != tuple(counts):", "if False:"),
        "a loss where no parameters are": (
            "        if device not in devices:",
            "        if False:",
        ),
    },
    "passes/network": {
        "one gradient added to what has accumulated": (
            'for r in ("write", "add"))',
            'for r in ("add", "add"))',
        ),
        "marks that an interrupt leaves": (
            "            finally:\n                add()\n        finally:\n            add()\n",
            "            finally:\n                pass\n        finally:\n"
            '            _mxnet.put_gradients_into(weights, self._accumulating, "add")\n',
            "defects_interrupts::test_an_interrupt_at_each_place_of_a_step_that_adds",
        ),
        "gradients written after one that accumulates": (
            'for r in ("write", "add"))',
            'for r in ("write", "write"))',
            "accumulation",
        ),
        "a copy with the lock of the original": (
            "return {name: vars(self)[name] for name in kept}",
            "return vars(self)",
            "copies::test_a_deep_copy_of_network_and_trainer_trains_on",
        ),
        "the user's gradients lost in a refresh": (
            "            put_back(before, self.live_grads)\n",
            "            pass\n",
        ),
        "the user's gradients lost after an error": (
            "            put_back(before, self._accumulating)\n",
            "            pass\n",
        ),
        "gradients that oneDNN adds": ("            or any(map(_mxnet.is_for_onednn, w))\n", ""),
        "a closure's own values not seen": (
            "if any(map(any, _mxnet.take_fresh(",
            "if None and any(map(any, _mxnet.take_fresh(",
        ),
    },
    "passes/points": {
        "in the sight of other threads": (
            "        with network.lock:\n            was_elsewhere",
            "        if network.lock:\n            was_elsewhere",
        ),
        "frozen values of today": (
            "            arrays += self.frozen\n",
            "            arrays += [_mxnet.data(p) for p in network.frozen]\n",
        ),
        "left elsewhere": (
            "replacing(parameters, list(map(_mxnet.data, parameters)))",
            "replacing(parameters, arrays)",
        ),
    },
    "passes/outside": {
        "not looked for after a file": (
            "search = search or not self._searched",
            "pass",
        ),
        "gradients outside not put back": (
            "            put_back([before], [grads])\n",
            "            pass\n",
        ),
    },
    "passes/probe": {
        "overwritten ones": ("all((p == 1).all() or", "all((p == p).all() or"),
        "ignored head gradients": ("Probe(all(map(_are_ones, grads)),", "Probe(True,"),
    },
    "passes/sketch": {
        "no difference": ("return distance / norm if norm", "return 0.0 if norm"),
        "one piece of a large array": (
            "for begin in range(0, len(matrix), most)",
            "for begin in range(0, most, most)",
        ),
        "the end of a large array left out": (
            "[flat[len(flat) // _BUCKETS * _BUCKETS :].asnumpy()]",
            "[]",
        ),
        "no signs": (
            "mx.nd.dot(signs[start : start + len(rows)].reshape((1, -1)), rows)",
            "rows.sum(axis=0, keepdims=True)",
        ),
    },
    "passes/arrays": {
        "put back into a graph": (
            "    with mx.autograd.pause():\n        copy_all(before, targets)",
            "    copy_all(before, targets)",
        ),
    },
    "passes/entries": {
        "only the first arrays": ("(group[begin : begin + most] for", "(group[:most] for"),
        "only the first piece": ("for start in range(0, flat", "for start in range(0, 1, flat"),
    },
    "passes/multiples": {
        "float16 sums in float16": (
            "SUMMED_IN.get(_mxnet.dtype_name(target), target.dtype)",
            "target.dtype",
        ),
        "arrays of one column after those of another": (
            "for row in zip(*used) for",
            "for row in used for",
        ),
        "results of one column after those of another": (
            "for row in zip(*targets) for",
            "for row in targets for",
            "saga",
        ),
        "steps of the first that were ever kept": (
            "    known = _plans.get(key)\n",
            "    known = next(iter(_plans.values()), None)\n",
            "saga",
        ),
    },
    "passes/random_lock": {
        "one seed for all steps": ("        self._count += 1\n", "        self._count = 1\n"),
    },
    "passes/interrupts": {
        "an error in a list": ("raise errors.pop()", "raise errors[0]"),
        "interrupted": ("                _worker.do(run)\n", "                run()\n"),
    },
    "methods/sarah": {
        "sign of the reference gradient": ("Terms(b=-1.0,", "Terms(b=1.0,"),
        "sign of the mean": ("k=1.0,", "k=-1.0,"),
    },
    "methods/storm": {
        "the other share": ("rest = 1 - self.mixing", "rest = self.mixing"),
    },
    "methods/mars": {
        "another s": ("gamma * beta / (1 - beta)", "gamma * beta"),
        "not amplified": (
            "factor = 1.0 if self.now is None else 1 + self.s\n        for",
            "factor = 1.0\n        for",
        ),
        "clipped as a sum": ("self.clip * scale * entries", "self.clip * scale"),
        "vectors treated": ("or len(p.shape) > 1", "or len(p.shape) > 0"),
    },
    "methods/recursive": {
        "the reference of the step before": (
            "            following.reference.move()\n",
            "            pass\n",
        ),
        "a sum for a mean": (
            "combine([1 / (scale * entries), *more]",
            "combine([1 / scale, *more]",
        ),
    },
    "methods/saga": {
        "the row of another dtype": (
            "[row.grads for row in live.rows.values()] if self._sum else []",
            "[row.grads for row in live.rows.values()]",
            "saga::test_a_cast_between_the_halves_of_the_first_step",
        ),
        "a copy without the sum": (
            "if not self.table and what_changed(self._parameters, network):",
            "if not self.table:",
            "copies::test_a_copy_between_the_halves_of_the_first_step",
        ),
        "a check that a variance takes away": (
            "            return None  # the user, or another trainer, has moved them\n",
            "            self._weights_then = None\n            return None\n",
            "saga::test_a_variance_at_other_weights_leaves_the_check_to_the_first_step",
        ),
        "an index of NumPy from a file": (
            "return value.item() if is_numpy else value",
            "return value",
            "saga::test_indices_of_numpy",
        ),
        "sign of the row": (
            "b=0.0 if stored is None else -1.0",
            "b=0.0 if stored is None else 1.0",
        ),
        "rows of data that has become another": (
            "point, is_old = self._point_to_check(stored)",
            "point, is_old = None",
        ),
        "one micro-batch of many": (" and not pending\n", "\n"),
        "rows that are never counted": (
            "        if self._is_complete:\n            return (0,)",
            "        return (0,)",
        ),
        "one device of many": ("len(self._network.devices) == 1", "True"),
        "one worker of many": ("isinstance(entries, NDArray) or not all", "not all"),
        "mean that forgets nothing": ("((-share, 1),)", "((0 * share, 1),)"),
        "rows that scale with the loss": ("(1 / scale, 2)", "(1.0, 2)"),
        "a sum for a mean": ("k = 1 / entries if", "k = 1.0 if"),
        "new entries not counted": ("else self._entries + added", "else self._entries"),
        "old rows": (
            "            (self.table, live.rows),\n",
            "",
        ),
        "a row twice in an update": ("if batch_index in pending:", "if False:"),
        "old mean of SAG": (
            "zip(per_device(self._next_sum), per_device(network.live_grads))",
            "zip(per_device(self._sum), per_device(network.live_grads))",
        ),
    },
    "saving/container": {
        "checksum not compared": (
            "if not first or content[first : second - 1] !=",
            "if None ==",
            "saving_files::test_damaged_files",
        ),
        "the name of a temporary file": (
            "            error.filename = str(path)  # which the user knows\n",
            "            pass\n",
            "saving_files::test_an_error_leaves_the_old_file_and_names_it",
        ),
        "a link replaced": ("Path(os.path.realpath(path))", "Path(path)"),
        "permissions lost": ("shutil.copymode(target, temporary)", "pass"),
        "written in place": ('open(temporary, "xb")', 'open(temporary := target, "wb")'),
    },
    "saving/files": {
        "a file that is not complete": (
            "{**states, **self.waiting}",
            "states",
            "defects_schedules::test_what_was_set_between_a_load_and_the_initialization_is_saved",
        ),
        "another method": ("if method != self._method:", "if False:"),
        "another MXNet": (
            'if version.split(".")[0] != mx.__version__.split(".")[0]:',
            "if False:",
            "saving_files::test_momentum_and_master_copy_of_this_mxnet_alone",
        ),
        "parts that are checked one by one": (
            "        self._check(states, parts, path, then)\n",
            "",
        ),
    },
    "saving/parameters": {
        "by position": ("for old, new in (by_key, by_name):", "for old, new in ():"),
        "numbers as texts": ("int(part) if part.isdigit() else part", "part"),
    },
    "saving/pickles": {
        "any size": ("        if self._bytes_left < 0:", "        if False:"),
        "codes of extensions": ("after not in ([], [pickletools.anyobject])", "after"),
        "any name": ("if name not in names:", "if False:"),
    },
    "saving/values": {
        "functions saved": (
            "(is_object(item) or not callable(item))",
            "True",
            "saving_optimizers::test_an_attribute_that_is_set_is_data_and_was_data",
        ),
    },
    "methods/table": {
        "a check that a file forgets": (
            '"is_confirmed": self.is_confirmed or self.was_confirmed',
            '"is_confirmed": False',
            "resume::test_each_step",
        ),
        "a row moved the wrong way": ("[1.0, -count / multiple]", "[1.0, count / multiple]"),
        "another multiple of the mean": ("[1.0, -count / multiple]", "[1.0, -count]"),
        "compared with another gradient": (
            "[1.0, count / multiple], [grads, means], grads)\n        return row",
            "[1.0, 0.0], [grads, means], grads)\n        return row",
        ),
    },
    "methods/svrg": {
        "rows of an old file as they are": (
            "if self.table is not None and not self.table.is_centered:",
            "if False:",
        ),
        "sign of the reference gradient": ("Terms(b=-alpha, k=k", "Terms(b=alpha, k=k"),
        "sign of a row": ("Terms(b=-alpha, reference=", "Terms(b=alpha, reference="),
        "sign of the full gradient": ("k, mean = alpha / self", "k, mean = -alpha / self"),
        "old full gradient": (
            "            copy_all(full.mean, self._full_grads)\n",
            "",
        ),
        "a multiple of the full gradient": ("[[multiple / self._multiple for", "[[multiple for"),
        "a multiple that is rounded": ("if not multiple & (multiple - 1):", "if True:"),
        "a multiple that is not one": ("combine([float(multiple)], [means], means)", "pass"),
        "a multiple that is forgotten": ("        self._multiple = 1\n\n", "\n"),
        "old snapshot": ("            self.snapshot.move()\n", "            pass\n"),
    },
    "kvstore/collective": {
        "nothing summed": ("self.kvstore.pushpull(key, [array], out=[array])", "pass"),
    },
    "kvstore/kinds": {
        "servers without a job": (
            'if "DMLC_NUM_WORKER" not in os.environ:',
            "if False:",
            "stores::test_parameter_servers_need_a_job",
        ),
        "unknown names taken": ("if name not in known and", "if False and"),
        "names in capitals taken for others": ("name_of(kvstore).lower()", "name_of(kvstore)"),
        "reduced gradients that never come back": ("    if needs:", "    if False:"),
    },
    "kvstore/server_optimizer": {
        "sums of gradients are updates": ("self._assign(*row[:3])", "pass"),
        "a wrong answer": ("grad * 0 + ANSWER", "grad * 0"),
        "settings dropped": ("setattr(owner, attribute, value)", "pass"),
    },
    "kvstore/servers": {
        "settings never sent": ("if self.rank == 0 and changed:", "if False:"),
        "one slot summed": (
            "for slot in self._slots(key):  # in",
            "for slot in self._slots(key)[:1]:  # in",
        ),
        "weights not shared": ("self.kvstore.pull(key, out=list(arrays))", "pass"),
        "servers that seem to reduce": ("    reduces = False\n", ""),
    },
    "kvstore/workers": {
        "the failure of another worker not seen": (
            "if np.isnan(sums[0])",
            "if False",
            "distributed::test_a_worker_that_fails_in_the_full_gradient",
        ),
        "keys of parameters": ("self._first_key = first_free_key", "self._first_key = 0"),
        "64 numbers summed": ("range(0, len(total), BLOCK)", "range(0, 1)"),
        "other arrays each time": (
            "travelling = {key: self._travelling[key] for key in arrays}",
            "travelling = {key: array.copy() for key, array in arrays.items()}",
            "kvstore::test_one_worker_is_late",
        ),
    },
    "_mxnet/arrays": {
        "assignments let through": ("    array.__class__ = _guarded(cls)\n", "    pass\n"),
    },
    "_mxnet/operators": {
        "shapes that oneDNN does not take": ("1 <= a.ndim <= 6 and ", ""),
        "one array copied": ("[(node, output) for output", "[(node, 0) for output"),
        "factor of the first term": ("if factor == 1 else multiple", "if factor else multiple"),
        "sign of a term": ("else multiple(-factor, arrays", "else multiple(factor, arrays"),
        "term that is subtracted": ("if factor == -1 else", "if factor < 0 else"),
        "product without its factor": ('{"alpha": repr(factor)', '{"alpha": "1.0"', LARGE),
    },
    "_mxnet/parameters": {
        "left patched": (
            "                Parameter._check_and_get = self._original\n",
            "                pass\n",
        ),
    },
    "saving/optimizer": {
        "a hint for none": (
            "is_one_none = saved is None or expected is None",
            "is_one_none = saved is None",
            "saving_names::test_another_momentum_is_said",
        ),
        "states of the first device": (
            "for updater in self._updaters:",
            "for updater in self._updaters[:1]:",
        ),
        "counts of the first device": ('(*state["counts"], *self._devices())', 'state["counts"]'),
        "states that are not compared": (
            "return bool(_described(saved) == _described(expected))",
            "return True",
        ),
    },
    "saving/objects": {
        "objects in a list forgotten": (
            "        return dict(enumerate(value))",
            "        return {}",
        ),
        "a function replaced": (" and name not in vars(live)", ""),
        "a sampler is a refresh schedule": (
            'any(hasattr(live, "due") for live in self._live)',
            "bool(self._live)",
            "cures::test_a_snapshot_that_is_never_renewed",
        ),
        "the first of a class": ("left[common.index(max(common))]", "left[0]"),
        "nothing for those that come later": (
            "[saved for saved in state if all(saved is not s for s, _ in pairs)]",
            "[]",
        ),
    },
    "commands/datasets": {
        "any number of classes": ("    if classes > MOST_CLASSES:", "    if False:"),
        "007 is a number": (" or cells.str.match(_PADDED).any()", ""),
        "a decimal comma is text": ('if delimiter == ";":', "if False:"),
        "gaps filled with zero": ("fillna(numbers.mean())", "fillna(0)"),
        "names of rows are inputs": (
            "different > MOST_WORDS or 2 * different > len(known)",
            "False",
        ),
    },
    "commands/training": {
        "a snapshot at the start": ("settings.plain_epochs if method.refreshes else 0", "0"),
        "a rate that does not fall": ("math.cos(math.pi * share)", "1"),
        "one order of samples for all seeds": (
            "rng = len(model.dataset.X), np.random.RandomState(seed)",
            "rng = len(model.dataset.X), np.random.RandomState(0)",
        ),
    },
    "commands/compare": {
        "the lowest of the seeds": ("those[len(those) // 2]", "those[0]"),
        "a seed too few": (
            "for number in range(settings.seeds))",
            "for number in range(settings.seeds - 1))",
        ),
    },
    "__main__": {
        "a traceback for Ctrl-C": (
            "    except KeyboardInterrupt:",
            "    except ZeroDivisionError:",
        ),
    },
}
