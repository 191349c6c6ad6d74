"""Methods compiled for machines that are not here: TPU slices and clusters of GPUs.

XLA's compilers for TPUs and GPUs need a description of a machine and no machine. What
they make of a method says what it will send, inside a slice and between slices, how
much memory a chip needs, and what is computed while a transfer is under way.

    chips     the chips and topologies there are, and their memory
    clusters  the devices of a target, from its compiler
    programs  a method's steps on a cluster: what is placed where, traced and compiled
    reports   what compiled programs say, held against the formulas and the ledger
"""
