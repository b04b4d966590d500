"""Mistakes that a reading of the package has found."""

import doctest

import gluon_svrg.estimator


def test_the_examples_of_the_estimator_run():
    found = doctest.testmod(gluon_svrg.estimator)
    assert found.attempted >= 17
    assert found.failed == 0
