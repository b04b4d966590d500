"""One broken line each, by the module that it stands in.

A module is named by its path inside the package, as ``"methods/svrg"``. A mutant has a name, the
text that stands there exactly once, and what takes its place.
"""

#: The test files, or single tests of them, that must see a broken line of a module, the fast ones
#: first; of the longest path that the module begins with.
SUITES = {
    "": ["identities", "methods", "interface", "accumulation", "blocks", "part_of_network"],
    "passes/": ["methods", "random_lock", "accumulation", "part_of_network", "blocks", "interface"],
    "methods/": ["methods", "stored", "identities", "accumulation"],
    "methods/barzilai_borwein": ["barzilai_borwein"],
    "saving/": ["states", "methods"],
    "stores/": ["stores", "interface", "distributed"],
    "stores/agreement": ["distributed::test_a_worker_that_fails_in_the_full_gradient"],
    "stores/checks": ["stores"],
    "stores/collective": ["distributed::test_workers_are_one_process_over_the_union_of_the_data"],
    "stores/kinds": ["stores"],
    "stores/parameter_servers": [
        "distributed::test_settings_reach_the_optimizer_on_the_servers",
        "distributed::test_dist_async",
    ],
    "stores/server": [
        "distributed::test_settings_reach_the_optimizer_on_the_servers",
        "distributed::test_dist_async",
    ],
    "_mxnet/": ["methods", "interface", "states", "stores"],
    "_mxnet/kvstores": [
        "distributed::test_convolutions",
        "distributed::test_ranks_that_start_apart_take_one_first_step",
    ],
    "_mxnet/optimizers": ["prox"],
    "prox": ["prox"],
    "schedule": ["schedule"],
    "variance": ["variance"],
    "estimator": ["estimator"],
}

MUTANTS = {
    "prox": {
        "L1 without the step": (
            "_soft(weight, step * self.strength)",
            "_soft(weight, self.strength)",
        ),
        "negative weights not shrunk": (
            "mx.nd.maximum(mx.nd.minimum(weight, least), -least)",
            "mx.nd.minimum(mx.nd.abs(weight), least)",
        ),
        "elastic net without the step of l1": ("step * self.l1)", "self.l1)"),
        "elastic net without the step of l2": ("/ (1 + step * self.l2)", "/ (1 + self.l2)"),
        "elastic net without l2": (" / (1 + step * self.l2)\n", "\n"),
        "group lasso without the step": ("least = step * self.strength", "least = self.strength"),
        "groups along the other axes": ("if axis != self.axis", "if axis == self.axis"),
        "squared norms": (".sqrt() if others", " if others"),
        "nan for a group of zeros": ("max(least, 1e-30)", "least"),
        "an axis too many": ("self.axis >= len(shape)", "self.axis > len(shape)"),
        "no upper bound": (", float(self.high))", ", inf)"),
        "no lower bound": ("mx.nd.maximum(weight, float(self.low))", "weight"),
        "negative weights turned round": ("mx.nd.maximum(weight, 0.0)", "mx.nd.abs(weight)"),
    },
    "proximal": {
        "momentum forgotten": ("/ (1 - float(", "/ (1 - 0 * float("),
        "weights that have not moved": (
            "                if has_moved:",
            "                if True:",
        ),
        "one device only": (
            "_mxnet.data(parameter)), flags)",
            "_mxnet.data(parameter)[:1]), flags)",
        ),
        "the last key": (
            "(choice[key] for key in choice if",
            "(choice[key] for key in [*choice][::-1] if",
        ),
        "every optimizer": ("if not issubclass(cls, (SGD, NAG)):", "if False:"),
        "momentum of an instance": ('getattr(optimizer, "momentum", 0.0)', "0.0"),
        "updated on the kvstore": ('"A prox" if prox is not None else ""', '""'),
        "float16 taken": ("if dtype not in", "if None and dtype not in"),
    },
    "_mxnet/optimizers": {
        "rate without the multiplier": (
            "(rate,) = optimizer._get_lrs([index])",
            "rate = optimizer.learning_rate",
        ),
        "rate that is not rounded": ("return float(np.float32(rate))", "return float(rate)"),
    },
    "schedule": {
        "linear decay upwards": ("(self.initial - self.final) * left", "left"),
        "cosine of another angle": ("math.cos(math.pi * done)", "math.cos(done)"),
        "over too late": ("index >= self.snapshots", "index > self.snapshots"),
        "epoch missed": ("epoch % self.epochs == 0", "epoch % self.epochs == 1"),
        "coin on its side": ("coin < self.probability", "coin > self.probability"),
        "no doubling": ("self.first * 2 ** (taken - 1)", "self.first * taken"),
    },
    "variance": {
        "means not subtracted": ("-= [np.dot(g, g)", "-= [0 * np.dot(g, g)"),
        "minibatches of equal weight": ("self._plain[k] += count * g", "self._plain[k] += g"),
        "coefficient not squared": ("self._coefficient**2 * control", "control"),
        "gradients changed by a variance": (
            "        stack.enter_context(network.grads_kept())\n",
            "",
        ),
    },
    "estimator": {
        "epochs not counted": ("self._count.epochs += 1", "pass"),
        "refresh without a snapshot missed": ("(wanted or self", "(self"),
        "epochs not saved": ("self._count = estimator.trainer.epoch_count", "pass"),
    },
    "passes/estimate": {
        "reference gradient missing": ("                v.add(recorded, b)  # v += b r\n", ""),
        "reference gradient with another factor": ("v.add(recorded, b)", "v.add(recorded)"),
        "gradient missing": ("            v.add(recorded)  # v += g\n", ""),
        "mean missing": ("v.put(recorded.counts, k, m)  # v = k c m", "v.put()"),
        "row missing": ("v.put(recorded.counts, k, m, b, row)  # v = k c m + b row", "v.put()"),
        "unlocked at the weights": (
            "        random_lock.start(seed)\n        recorded = here.at(at_weights)",
            "        recorded = here.at(at_weights)",
        ),
        "not left in the live gradients": ("        v.finish()\n", "        pass\n"),
    },
    "passes/sums": {
        "count missing": ("k * counts[device] * self.scale, mean)", "k * self.scale, mean)"),
        "factor missing": (
            "recorded.backward(factor * self.scale)",
            "recorded.backward(self.scale)",
        ),
        "factor missing where gradients are added one by one": (
            "combine((1, factor), (totals, grads), totals)",
            "combine((1, 1), (totals, grads), totals)",
        ),
    },
    "passes/full_pass": {
        "entries of one minibatch": ("entries += recorded.entries", "entries = recorded.entries"),
        "mean not taken": ("combine([1 / divisor], [first], first)", "pass"),
        "a device not summed": ("total += addend.copyto(_mxnet.device_of(total))", "pass"),
        "a device without the mean": ("            total.copyto(target)\n", "            pass\n"),
        "infinite accepted": ("if not all_finite", "if None and all_finite"),
    },
    "methods/barzilai_borwein": {
        "old full gradient left out": ('new_mu.astype("float64") - mu', 'new_mu.astype("float64")'),
        "no weight decay": (" + wd * float(np.dot(dw, dw))", ""),
        "inverse": ("rate = squared / denominator", "rate = denominator / squared"),
        "steps left out": ("denominator = steps * product", "denominator = product"),
        "negative curvature": ("if denominator <= 0:", "if denominator == 0:"),
    },
    "methods/svrg": {
        "sign of the reference gradient": ("Terms(b=-alpha,", "Terms(b=alpha,"),
        "sign of the full gradient": ("k=alpha,", "k=-alpha,"),
        "old full gradient": ("            copy_all(mean, self._full_grads)\n", ""),
        "old snapshot": ("            self.snapshot.move()\n", ""),
        "moved where no loss is": (
            "if self.has_reference and self.coefficient else ()",
            "if self.has_reference else ()",
        ),
    },
    "stores/agreement": {
        "the failure of another worker not seen": ("if np.isnan(sums[0])", "if False"),
    },
    "stores/checks": {
        "reduced gradients that never come back": ("    if needs_reduced:", "    if False:"),
    },
    "stores/collective": {
        "nothing summed": ("self.kvstore.pushpull(key, [array], out=[array])", "pass"),
        "keys of parameters": ("self._first_key = first_free_key", "self._first_key = 0"),
    },
    "stores/kinds": {
        "unknown names taken": ("if name not in NATIVE and", "if False and"),
        "names in capitals taken for others": ("name_of(kvstore).lower()", "name_of(kvstore)"),
    },
    "stores/parameter_servers": {
        "batch size of the servers": ("            gradient /= batch_size\n", "            pass\n"),
        "settings never sent": ("if (settings, scheduler) != self._sent:", "if False:"),
        "one slot summed": ("for slot in slots[key]:  # in", "for slot in slots[key][:1]:  # in"),
        "weights not shared": ("self.kvstore.pull(key, out=list(arrays))", "pass"),
    },
    "_mxnet/kvstores": {
        "layout of oneDNN sent": (
            "                make_plain(parameter._data)\n",
            "                pass\n",
        ),
    },
    "stores/server": {
        "sums of gradients are updates": (
            "self._assign(index, weight, grad)",
            "self._optimizer.update_multi_precision(index, weight, grad, state)",
        ),
        "a wrong answer": ("grad * 0 + ANSWER", "grad * 0"),
        "settings dropped": ("vars(self._optimizer).update(settings)", "pass"),
    },
}
