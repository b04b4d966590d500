"""The command line, ``gluon-svrg``. Only `__main__` imports it."""
