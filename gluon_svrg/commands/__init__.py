"""The command line: what ``gluon-svrg`` runs. Nothing imports this room."""
