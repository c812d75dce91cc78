"""Whole training runs by name. A recipe supplies the parts; the loop is the command line's."""
