"""The command line, ``gluon-svrg``. No other package imports this one."""
