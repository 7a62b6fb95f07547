"""Reads and writes the files of a checkpoint without a toolkit, for both halves and the command line."""
