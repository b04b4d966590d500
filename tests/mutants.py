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
    "saving/": ["states", "methods"],
    "stores/": ["stores", "interface", "distributed"],
    "stores/server": [
        "distributed::test_settings_reach_the_optimizer_on_the_servers",
        "distributed::test_dist_async",
    ],
    "_mxnet/": ["methods", "interface", "states", "stores"],
    "schedule": ["schedule"],
    "variance": ["variance"],
    "estimator": ["estimator"],
}

MUTANTS = {
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
            "        copy_all(spare, here.buffers)\n",
            "        pass\n",
        ),
    },
    "estimator": {
        "epochs not counted": ("self._count.epochs += 1", "pass"),
        "refresh without a snapshot missed": (" or _has_none(estimator))", ")"),
        "epochs not saved": ("        estimator.trainer._remember(self._count)\n", ""),
    },
    "saving/states": {
        "momentum not loaded": (
            'updater.states = plain_data.decode(manifest["states"], arrays)',
            "pass",
        ),
        "lock starts again": ('"_base", "_count")', '"_base")'),
        "full gradient not loaded": ("*zip(full_grads, means)]", "]"),
        "optimizer's numbers not loaded": (
            '    plain_data.assign(manifest["optimizer"], arrays, trainer._optimizer)\n',
            "",
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
